#!/usr/bin/env python3
"""Compares greedy answers with llama.cpp: same GGUF, 20 prompts, 32 tokens each.

    pip install llama-cpp-python
    python tools/compare_greedy.py MODEL.gguf [--dacapo target/release/dacapo]

Where the first token differs, the gap between the two candidates in llama.cpp's own logits is printed: a small one is
a tie that rounding decides (both engines round activations to 8 bits).
"""

import argparse
import json
import subprocess

from llama_cpp import Llama

PROMPTS = [
    "The capital of France is", "The history of Rome begins", "Water boils at", "In 1969, the first man",
    "def fibonacci(n):", "The quick brown fox", "Once upon a time", "Photosynthesis is the process",
    "The three primary colours are", "To make a cup of tea,", "The opposite of hot is", "Mount Everest is",
    "A triangle has", "The sun rises in the", "Two plus two equals", "The largest ocean on Earth",
    "Shakespeare wrote", "The speed of light is", "Dogs are often called", "A good friend is someone who",
]
TOKENS = 32

arguments = argparse.ArgumentParser()
arguments.add_argument("model")
arguments.add_argument("--dacapo", default="target/release/dacapo")
options = arguments.parse_args()


def ours(prompt):
    command = [options.dacapo, "run", options.model, "--device", "cpu", "--raw", "--json", "-p", prompt,
               "--max-tokens", str(TOKENS), "--temperature", "0"]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["text"]


def main():
    model = Llama(options.model, n_ctx=512, n_threads=2, logits_all=True, verbose=False)
    equal = 0
    for prompt in PROMPTS:
        prefix = model.tokenize(prompt.encode(), add_bos=False, special=True)
        model.reset()
        model.eval(prefix)
        tokens, gaps = [], []
        for _ in range(TOKENS):
            logits = model.scores[model.n_tokens - 1]
            best = logits.argsort()[-2:][::-1]
            if best[0] == model.token_eos():
                break
            tokens.append(int(best[0]))
            gaps.append(float(logits[best[0]] - logits[best[1]]))
            model.eval([int(best[0])])
        pieces = [model.detokenize(tokens[: i + 1]).decode(errors="replace") for i in range(len(tokens))]
        text = ours(prompt)
        theirs = pieces[-1] if pieces else ""
        if text == theirs:
            equal += 1
            continue
        at = next((i for i, piece in enumerate(pieces) if not text.startswith(piece)), len(pieces) - 1)
        print(f"{prompt!r}: differs at token {at}, where llama.cpp's best two are {gaps[at]:.4f} logits apart")
    print(f"{equal} of {len(PROMPTS)} answers are equal")


if __name__ == "__main__":
    main()
