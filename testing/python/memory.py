"""Memory stays flat over many calls: `memory.py [CALLS]`."""

import gc
import os
import pathlib
import sys

from dacapo import LLM, SamplingParams, StructuredOutputsParams

TINY = pathlib.Path(__file__).resolve().parents[2] / "crates/model/tests/goldens/qwen3"


def resident():
    """Bytes of this process that are in memory."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main():
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    llm = LLM(str(TINY), load_format="dummy", device="cpu", max_context=128, max_batch=4, kv_cache="4MiB")
    short = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
    restricted = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[a-f]{2,4}"))

    def call(number):
        kind = number % 5
        if kind == 0:
            llm.generate([f"prompt {number}", "another"], short, use_tqdm=False)
        elif kind == 1:
            llm.chat([{"role": "user", "content": f"question {number}"}], short, use_tqdm=False)
        elif kind == 2:
            llm.embed(f"text {number}", use_tqdm=False)
        elif kind == 3:
            next(llm.stream(f"stream {number}", short))
        else:
            llm.generate(f"restricted {number}", restricted, use_tqdm=False)

    marks = []
    for number in range(calls):
        call(number)
        if number % (calls // 10) == calls // 10 - 1:
            gc.collect()
            marks.append(resident())
            print(f"{number + 1:>6} calls  {marks[-1] / 1e6:8.2f} MB", flush=True)
    # The first tenths fill caches: of prefixes, of compiled grammars, of step records.
    grown = marks[-1] - marks[2]
    print(f"grown by {grown / 1e3:.0f} kB in the last {calls - 3 * calls // 10} calls")
    if grown > 1_000_000:
        sys.exit("error: memory grows")


main()
