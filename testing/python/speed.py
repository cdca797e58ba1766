"""`LLM.generate` beside `dacapo run --batch`: `speed.py DACAPO FOLDER [ROUNDS]`.

The same 256 prompts, with the same engine settings, in turns. Both times are those of the answers alone, without
loading: the program says its own, and here the call is measured.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

from dacapo import LLM, SamplingParams

PROMPTS = 256
TOKENS = 32


def prompts():
    """Prompts of different lengths."""
    words = "one two three four five six seven eight nine ten".split()
    return [f"Question {i}: continue {' '.join(words[: 1 + i % 10])}" for i in range(PROMPTS)]


def of_program(dacapo, folder):
    """Seconds of `dacapo run --batch`."""
    asked, answered = folder / "asked.jsonl", folder / "answered.jsonl"
    asked.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts()))
    answered.unlink(missing_ok=True)
    flags = f"--batch {asked} -o {answered} --raw --ignore-eos -n {TOKENS} -t 0"
    flags += " --max-batch 32 --max-context 1024 --device cpu"
    said = subprocess.run([dacapo, "run", *flags.split()], check=True, capture_output=True, text=True).stderr
    tokens, seconds = re.search(r"(\d+) tokens in ([\d.]+) s", said).groups()
    assert int(tokens) == PROMPTS * TOKENS, said
    return float(seconds)


def of_package():
    """Seconds of `LLM.generate`."""
    with LLM(device="cpu", max_batch=32, max_context=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        took = time.perf_counter() - start
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == PROMPTS * TOKENS
        return took


def main():
    dacapo, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    times = {"dacapo run --batch": [], "LLM.generate": []}
    for number in range(rounds):
        # In turns, each first as often as the other.
        sides = [("dacapo run --batch", lambda: of_program(dacapo, folder)), ("LLM.generate", of_package)]
        for name, side in sides if number % 2 == 0 else reversed(sides):
            times[name].append(side())
            print(f"{name:<20} {times[name][-1]:6.2f} s", flush=True)
    medians = {name: statistics.median(of_rounds) for name, of_rounds in times.items()}
    ratio = medians["LLM.generate"] / medians["dacapo run --batch"]
    cores = len(os.sched_getaffinity(0))
    print(f"medians of {rounds} rounds on {cores} cores: {medians}, ratio {ratio:.3f}")
    if ratio > 1.05:
        sys.exit("error: LLM.generate is more than 5 % slower")


main()
