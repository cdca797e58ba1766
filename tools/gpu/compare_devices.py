#!/usr/bin/env python3
"""Compares greedy answers of the GPU with those of the CPU: same GGUF, 20 prompts, 32 tokens each.

    python3 tools/gpu/compare_devices.py MODEL.gguf [--dacapo target/release/dacapo]

The devices round at different places: the GPU multiplies bf16, the CPU's fast kernels multiply 8-bit integers. Where the
two best tokens are as good as tied they may choose differently, and the texts part from there. So beside the texts, every
token the CPU chose is scored on the GPU: how much likelier is the token that the GPU would rather have chosen, in nats?
A wrong kernel shows here as whole nats. Exits with 1 when one is above 0.5.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

PROMPTS = [
    "The capital of France is", "The history of Rome begins", "Water boils at", "In 1969, the first man",
    "def fibonacci(n):", "The quick brown fox", "Once upon a time", "Photosynthesis is the process",
    "The three primary colours are", "To make a cup of tea,", "The opposite of hot is", "Mount Everest is",
    "A triangle has", "The sun rises in the", "Two plus two equals", "The largest ocean on Earth",
    "Shakespeare wrote", "The speed of light is", "Dogs are often called", "A good friend is someone who",
]
TOKENS = 32
MOST = 0.5


def run(options, device, prompts, *flags):
    """One answer for each prompt, in order."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = pathlib.Path(folder) / "prompts.jsonl", pathlib.Path(folder) / "answers.jsonl"
        asked.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in enumerate(prompts)))
        command = [options.dacapo, "run", options.model, "--device", device, "--raw", "--batch", str(asked),
                   "-o", str(answered), "--temperature", "0", *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{device}: {done.stderr.strip()}")
        answers = [json.loads(line) for line in answered.read_text().splitlines()]
    return sorted(answers, key=lambda answer: answer["id"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dacapo", default="target/release/dacapo")
    parser.add_argument("--devices", default="cpu,cuda", help="the one whose tokens are scored, and the one that scores")
    options = parser.parse_args()
    one, other = options.devices.split(",")
    asked = ["--max-tokens", str(TOKENS)]
    texts = [[answer["text"] for answer in run(options, device, PROMPTS, *asked)] for device in (one, other)]
    whole = [prompt + text for prompt, text in zip(PROMPTS, texts[0])]
    scored = run(options, other, whole, "--max-tokens", "1", "--prompt-logprobs", "1")
    worst, same, agreed, total = 0.0, 0, 0, 0
    for prompt, here, there, answer in zip(PROMPTS, *texts, scored):
        # What is scored begins behind the prompt.
        at, gaps, seen = len(prompt), [], len(prompt + here)
        for score in reversed(answer["prompt_logprobs"]):
            seen -= len(score["text"])
            if seen < at:
                break
            gaps.append(score["top"][0]["logprob"] - score["logprob"])
        agreed += sum(gap == 0 for gap in gaps)
        total += len(gaps)
        worst = max([worst, *gaps])
        same += here == there
        if here != there:
            shared = next(i for i, (a, b) in enumerate(zip(here + "\0", there + "\1")) if a != b)
            print(f"{prompt!r}: same for {shared} characters; worst gap {max(gaps):.3f} nats")
    print(f"{same} of {len(PROMPTS)} texts are the same; {other} would choose {agreed} of {total} tokens of {one}, "
          f"and prefers another by {worst:.3f} nats at most")
    sys.exit(worst > MOST)


if __name__ == "__main__":
    main()
