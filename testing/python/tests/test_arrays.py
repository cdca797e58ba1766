"""Vectors and log-probabilities as arrays of other libraries."""

import gc
import math
import unittest

from dacapo import Array, SamplingParams

from .models import smollm2


class Vectors(unittest.TestCase):
    def test_vectors_have_length_one_and_scores_are_cosines(self):
        llm = smollm2()
        texts = ["A cat sat on the mat.", "A kitten is on the rug.", "Interest rates rose by a quarter point."]
        vectors = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
        for vector in vectors:
            self.assertAlmostEqual(math.sqrt(sum(x * x for x in vector)), 1, places=4)
        scores = llm.score(texts[0], texts, use_tqdm=False)
        for vector, score in zip(vectors, scores):
            expected = sum(a * b for a, b in zip(vectors[0], vector))
            self.assertAlmostEqual(score.outputs.score, expected, places=4)
        same, near, far = (score.outputs.score for score in scores)
        self.assertAlmostEqual(same, 1, places=4)
        self.assertGreater(near, far)
        [longer] = llm.embed(texts[0], normalize=False, pooling="last", use_tqdm=False)
        self.assertNotAlmostEqual(sum(x * x for x in longer.outputs.embedding), 1, places=2)

    def test_pairs_must_match(self):
        with self.assertRaises(ValueError):
            smollm2().score(["a", "b"], ["c"], use_tqdm=False)


class Libraries(unittest.TestCase):
    def setUp(self):
        params = SamplingParams(temperature=0, max_tokens=5, logprobs=0, ignore_eos=True)
        [output] = smollm2().generate("One, two,", params, use_tqdm=False)
        [embedded] = smollm2().embed("One, two,", use_tqdm=False)
        self.arrays = [embedded.outputs.embedding, output.outputs[0].token_logprobs, Array()]

    def test_numpy(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("numpy is not installed")
        for ours in self.arrays:
            for theirs in (numpy.asarray(ours), numpy.from_dlpack(ours)):
                self.assertEqual((theirs.dtype, theirs.shape), (numpy.float32, ours.shape))
                self.assertEqual(theirs.tolist(), ours.tolist())
        kept = numpy.from_dlpack(Array([1.0, 2.0]))
        gc.collect()
        self.assertEqual(kept.tolist(), [1.0, 2.0], "it owns its memory")

    def test_torch(self):
        try:
            import torch
        except ImportError:
            self.skipTest("torch is not installed")
        for ours in self.arrays:
            tensor = torch.from_dlpack(ours)
            self.assertEqual((tensor.dtype, tuple(tensor.shape)), (torch.float32, ours.shape))
            self.assertEqual(tensor.tolist(), ours.tolist())
            tensor += 1
        self.assertLess(max(self.arrays[1]), 1, "a tensor is a copy")

    def test_capsules_that_nobody_takes_are_freed(self):
        import resource

        array = Array([0.0] * 250_000)
        for _ in range(20):
            array.__dlpack__()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(200):
            array.__dlpack__()
        # Two hundred capsules are 200 MB.
        self.assertLess(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 20_000)
