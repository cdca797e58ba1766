#!/usr/bin/env python3
"""Compares greedy answers of the GPU with those of the CPU: same GGUF, 20 prompts, 32 tokens each.

    python3 tools/gpu/compare_devices.py MODEL.gguf [--dacapo target/release/dacapo] [--numerics exact]

With `--numerics exact` nothing is rounded below float32 on either, and the texts must be the same. By default the devices
round at different places: the GPU multiplies bf16, the CPU's kernels multiply 8-bit integers. Where the two best tokens
are nearly tied, the devices may choose differently, and the texts diverge from there. So every token that the CPU chose
is also scored on the GPU: the difference in nats to the GPU's best token. A wrong kernel gives differences of whole
nats. Exits with 1 if one is above 0.5 (exact: 0.01).
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

# The prompts of tools/compare_greedy.py, whose answers are stored for the tests.
GOLDENS = pathlib.Path(__file__).parents[2] / "tests/goldens/llama_cpp.json"
PROMPTS = [answer["prompt"] for answer in json.loads(GOLDENS.read_text())["answers"]]
TOKENS = 32
MOST = {"fast": 0.5, "exact": 0.01}


def run(options, device, prompts, *flags):
    """One answer for each prompt, in order."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = pathlib.Path(folder) / "prompts.jsonl", pathlib.Path(folder) / "answers.jsonl"
        asked.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in enumerate(prompts)))
        command = [options.dacapo, "run", options.model, "--device", device, "--raw", "--batch", str(asked),
                   "-o", str(answered), "--temperature", "0", "--numerics", options.numerics, *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{device}: {done.stderr.strip()}")
        answers = [json.loads(line) for line in answered.read_text().splitlines()]
    return sorted(answers, key=lambda answer: answer["id"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dacapo", default="target/release/dacapo")
    parser.add_argument("--numerics", default="fast", choices=MOST)
    parser.add_argument("--devices", default="cpu,cuda", help="the one whose tokens are scored, and the one that scores")
    options = parser.parse_args()
    one, other = options.devices.split(",")
    asked = ["--max-tokens", str(TOKENS)]
    answers = [run(options, device, PROMPTS, *asked) for device in (one, other)]
    whole = [prompt + answer["text"] for prompt, answer in zip(PROMPTS, answers[0])]
    scored = run(options, other, whole, "--max-tokens", "1", "--prompt-logprobs", "1")
    worst, same, agreed, total = 0.0, 0, 0, 0
    for prompt, here, there, score in zip(PROMPTS, *answers, scored):
        count = here["answer_tokens"]
        if score["prompt_tokens"] != here["prompt_tokens"] + count:
            print(f"{prompt!r}: the answer tokenizes differently as a prompt; not scored")
        else:
            entries = score["prompt_logprobs"][-count:]
            gaps = [entry["top"][0]["logprob"] - entry["logprob"] for entry in entries]
            agreed += sum(gap == 0 for gap in gaps)
            total += count
            worst = max([worst, *gaps])
        same += here["text"] == there["text"]
        if here["text"] != there["text"]:
            pairs = zip(here["text"] + "\0", there["text"] + "\1")
            print(f"{prompt!r}: same for {next(i for i, (a, b) in enumerate(pairs) if a != b)} characters")
    print(f"{same} of {len(PROMPTS)} texts are the same; {other} would choose {agreed} of {total} tokens of {one}, "
          f"and prefers another by {worst:.3f} nats at most")
    sys.exit(worst > MOST[options.numerics])


if __name__ == "__main__":
    main()
