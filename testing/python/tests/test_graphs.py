"""Graphs explained, compared and verified, and the state of the engine."""

import unittest
from xml.etree import ElementTree

from dacapo import InvalidInput

from .models import GREEDY, tiny


class GraphTools(unittest.TestCase):
    def test_a_graph_is_explained_as_text_dict_and_drawing(self):
        explained = tiny().graphs.explain("decode/8")
        data = explained.to_dict()
        self.assertEqual((data["phase"], data["key"]), ("decode", "decode/8/fixed"))
        self.assertEqual(len(explained.nodes), len(data["nodes"]))
        for node in explained.nodes:
            self.assertIn(node["name"], str(explained))
        self.assertEqual(ElementTree.fromstring(explained._repr_svg_()).tag.split("}")[-1], "svg")
        other = tiny().graphs.explain("decode/8@h200").to_dict()
        self.assertNotEqual(other["target"], data["target"])
        self.assertGreater(sum(len(node["kernels"]) for node in other["nodes"]), 0)

    def test_graphs_are_compared(self):
        graphs = tiny().graphs
        self.assertTrue(graphs.diff("decode/8", "decode/8").same)
        backends = graphs.diff("decode/8/full", "decode/8/breakable")
        self.assertFalse(backends.same)
        self.assertEqual(backends.to_dict()["cuts"][0], {"what": "backend", "a": "full", "b": "breakable"})
        self.assertIn("backend: full → breakable", str(backends))
        self.assertTrue(graphs.diff("decode/4", "decode/8").to_dict()["plans"])

    def test_replays_are_verified(self):
        report = tiny().graphs.verify(buckets_decode="1,2", buckets_prefill="16", steps=1, backend="full")
        self.assertTrue(report.passed)
        self.assertIn("all replays match their plans", str(report))
        self.assertIn("steps agree", report.to_dict()["lines"][1])

    def test_invalid_names_are_refused(self):
        for graph in ["decode", "decode/0", "decode/8@tpu", "decode/9999", "train/8"]:
            with self.subTest(graph=graph), self.assertRaises(InvalidInput):
                tiny().graphs.explain(graph)
        with self.assertRaisesRegex(InvalidInput, "--bucket"):
            tiny().graphs.verify(bucket=1)

    def test_steps_have_times(self):
        llm = tiny()
        llm.generate("a", GREEDY, use_tqdm=False)
        stats = llm.stats()
        self.assertEqual({step["phase"] for step in stats["steps"]}, {"decode", "prefill"})
        self.assertTrue(all(step["run"] == "replayed" for step in stats["steps"]))
        self.assertGreater(stats["steps"][-1]["device_us"], 0)
        self.assertEqual(stats["seats"], llm.about["max_batch"])
