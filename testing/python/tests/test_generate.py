"""Answers: texts, tokens, parameters, schemas, errors."""

import json
import math
import unittest

from dacapo import EngineError, InvalidInput, LLM, SamplingParams, StructuredOutputsParams

from .models import GREEDY, TINY, ask, smollm2, tiny

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}


class Answers(unittest.TestCase):
    def test_texts_and_tokens_are_prompts(self):
        llm = smollm2()
        text = "The capital of France is"
        tokens = llm.get_tokenizer().encode(text)
        forms = [text, tokens, {"prompt": text}, {"prompt_token_ids": tokens}]
        outputs = llm.generate(forms, GREEDY, use_tqdm=False)
        self.assertEqual({output.outputs[0].text for output in outputs}, {outputs[0].outputs[0].text})
        self.assertIn("Paris", outputs[0].outputs[0].text)
        self.assertEqual([output.prompt for output in outputs], [text, None, text, None])
        self.assertTrue(all(output.prompt_token_ids == tokens and output.finished for output in outputs))
        [alone] = llm.generate(tokens, GREEDY, use_tqdm=False)
        self.assertEqual(alone.outputs[0], outputs[0].outputs[0])
        self.assertEqual(llm.get_tokenizer().decode(alone.outputs[0].token_ids), alone.outputs[0].text)

    def test_answers_come_in_the_order_of_the_prompts(self):
        llm = tiny()
        lengths = [9, 1, 5, 3, 7, 2, 8, 4, 6, 12]
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        finished = []
        outputs = llm.generate(
            [f"prompt {n}" for n in lengths],
            params,
            use_tqdm=False,
            on_output=lambda output: finished.append(len(output.outputs[0].token_ids)),
        )
        self.assertEqual([len(output.outputs[0].token_ids) for output in outputs], lengths)
        self.assertEqual(sorted(finished), sorted(lengths))
        self.assertNotEqual(finished, lengths, "short answers are complete first")

    def test_seeds_repeat_and_answers_differ(self):
        llm = tiny()
        params = SamplingParams(n=3, temperature=1, seed=7, max_tokens=8, ignore_eos=True)
        first, second = (llm.generate("a", params, use_tqdm=False)[0] for _ in range(2))
        texts = [output.text for output in first.outputs]
        self.assertEqual(texts, [output.text for output in second.outputs])
        self.assertEqual(len(set(texts)), 3)
        free = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True)
        drawn = {llm.generate("a", free, use_tqdm=False)[0].outputs[0].text for _ in range(3)}
        self.assertEqual(len(drawn), 3)

    def test_answers_end_where_they_should(self):
        llm = smollm2()
        prompt = "One, two, three,"
        [whole] = llm.generate(prompt, GREEDY, use_tqdm=False)
        self.assertEqual(whole.outputs[0].finish_reason, "length")
        params = SamplingParams(temperature=0, max_tokens=16, stop="five")
        [cut] = llm.generate(prompt, params, use_tqdm=False)
        self.assertEqual((cut.outputs[0].finish_reason, cut.outputs[0].stop_reason), ("stop", "five"))
        self.assertEqual(cut.outputs[0].text, whole.outputs[0].text.split("five")[0])
        params = SamplingParams(temperature=0, max_tokens=16, stop=["five"], include_stop_str_in_output=True)
        [kept] = llm.generate(prompt, params, use_tqdm=False)
        self.assertEqual(kept.outputs[0].text, cut.outputs[0].text + "five")
        comma = whole.outputs[0].token_ids[1]
        params = SamplingParams(temperature=0, max_tokens=16, stop_token_ids=[comma])
        [token] = llm.generate(prompt, params, use_tqdm=False)
        self.assertEqual((token.outputs[0].stop_reason, len(token.outputs[0].token_ids)), (comma, 1))

    def test_log_probabilities(self):
        llm = smollm2()
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=0)
        [output] = llm.generate("The capital of France is", params, use_tqdm=False)
        answer = output.outputs[0]
        for token, scores in zip(answer.token_ids, answer.logprobs):
            self.assertEqual(scores[token].rank, 1, "greedy takes the likeliest")
            self.assertEqual(len(scores), 3)
            self.assertLessEqual(sum(math.exp(score.logprob) for score in scores.values()), 1.0001)
        self.assertIn("Paris", answer.logprobs[0][answer.token_ids[0]].decoded_token)
        self.assertAlmostEqual(answer.cumulative_logprob, sum(answer.token_logprobs), places=5)
        self.assertIsNone(output.prompt_logprobs[0])
        self.assertEqual(len(output.prompt_token_logprobs), len(output.prompt_token_ids) - 1)

    def test_schemas_of_dicts_and_pydantic_models(self):
        llm = smollm2()
        schemas = [PERSON, json.dumps(PERSON)]
        try:
            import pydantic
        except ImportError:
            print("skipped: pydantic is not installed")
        else:
            fields = {"name": (str, pydantic.Field(max_length=12)), "age": (int, pydantic.Field(le=99, ge=0))}
            schemas.append(pydantic.create_model("Person", **fields))
        for schema in schemas:
            restrict = StructuredOutputsParams(json=schema)
            params = SamplingParams(temperature=0, max_tokens=64, structured_outputs=restrict)
            [output] = llm.chat(ask("Invent a person."), params, use_tqdm=False)
            made = json.loads(output.outputs[0].text)
            self.assertEqual(sorted(made), ["age", "name"])
            self.assertIsInstance(made["age"], int)

    def test_choices_and_regular_expressions(self):
        llm = smollm2()
        for restrict, allowed in [
            (StructuredOutputsParams(choice=["red", "blue"]), "red|blue"),
            (StructuredOutputsParams(regex="[0-9]{3}"), "[0-9]{3}"),
        ]:
            params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=restrict)
            [output] = llm.generate("x", params, use_tqdm=False)
            self.assertRegex(output.outputs[0].text, f"^({allowed})$")

    def test_no_parameters_are_the_models_own(self):
        llm = smollm2()
        params = llm.get_default_sampling_params()
        self.assertEqual(params.max_tokens, 512)
        [output] = llm.chat(ask("What is the capital of France? Answer in one sentence."), use_tqdm=False)
        self.assertIn("Paris", output.outputs[0].text)


class Errors(unittest.TestCase):
    def test_invalid_input_is_refused_and_loses_nothing(self):
        llm = tiny()
        for prompts, params, says in [
            ([[10**6]], GREEDY, "vocabulary"),
            ("", GREEDY, "empty"),
            ("a" * 500, GREEDY, "256"),
            ("a", SamplingParams(temperature=-1), "temperature"),
            ("a", SamplingParams(top_k=-5), "top_k"),
            ("a", SamplingParams(logprobs=50), "logprobs"),
            ("a", SamplingParams(n=0), ""),
            (["a", "b"], [GREEDY], "1 sampling parameters for 2 prompts"),
            ("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), "grammar"),
            ("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", choice=["b"])), "two ways"),
            ({}, GREEDY, "a prompt is"),
            ("\ud800", GREEDY, ""),
        ]:
            with self.subTest(prompts=prompts, params=params):
                with self.assertRaises(InvalidInput) as caught:
                    llm.generate(prompts, params, use_tqdm=False)
                self.assertIn(says, str(caught.exception))
                self.assertNotIn("\n", str(caught.exception))
        with self.assertRaises(TypeError):
            SamplingParams(temprature=1)
        [output] = llm.generate("a", GREEDY, use_tqdm=False)
        self.assertTrue(output.finished)

    def test_options_are_those_of_the_command_line(self):
        for options, says in [
            ({"max_contxt": 5}, "--max-contxt"),
            ({"max_context": 5}, "max-context"),
            ({"memory_share": 2}, "memory-share"),
            ({"device": "tpu"}, "tpu"),
            ({"graph_backend_decode": "fastest"}, "fastest"),
            ({"model": "/no/such/folder"}, "/no/such/folder"),
        ]:
            with self.subTest(options=options):
                with self.assertRaises(InvalidInput) as caught:
                    LLM(**{"model": TINY, "load_format": "dummy", **options})
                self.assertIn(says, str(caught.exception))
        eager = LLM(TINY, load_format="dummy", device="cpu", max_context=64, graph_backend_decode="disabled")
        backend = [row for row in eager.about["graphs"] if row["key"].endswith("decode.backend")]
        self.assertEqual([row["value"] for row in backend], ["disabled"])
        eager.close()
        with self.assertRaises(EngineError):
            eager.generate("a", GREEDY, use_tqdm=False)
