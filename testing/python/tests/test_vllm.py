"""Programs as vLLM's documentation has them, with the import and the model's name changed."""

import unittest

from dacapo import LLM, SamplingParams


class Vllm(unittest.TestCase):
    def test_the_offline_quick_start_runs(self):
        prompts = [
            "Hello, my name is",
            "The president of the United States is",
            "The capital of France is",
            "The future of AI is",
        ]
        sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
        llm = LLM(model="smollm2", device="cpu", max_model_len=1024)
        outputs = llm.generate(prompts, sampling_params)
        shown = []
        for output in outputs:
            prompt = output.prompt
            generated_text = output.outputs[0].text
            shown.append(prompt)
            self.assertTrue(generated_text)
            self.assertLessEqual(len(output.outputs[0].token_ids), 16)
        self.assertEqual(shown, prompts)

    def test_the_chat_example_runs(self):
        llm = LLM(model="smollm2", device="cpu", max_model_len=1024)
        sampling_params = SamplingParams(max_tokens=24, temperature=0)
        conversation = [
            {"role": "system", "content": "You are a helpful assistant"},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello! How can I assist you today?"},
            {"role": "user", "content": "What is the capital of France? Answer in one sentence."},
        ]
        outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
        self.assertIn("Paris", outputs[0].outputs[0].text)
        self.assertIn("You are a helpful assistant", outputs[0].prompt)
        # Several conversations at once, with a progress bar.
        conversations = [conversation for _ in range(4)]
        outputs = llm.chat(messages=conversations, sampling_params=sampling_params, use_tqdm=True)
        self.assertEqual(len({output.outputs[0].text for output in outputs}), 1)
        llm.close()
