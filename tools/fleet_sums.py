#!/usr/bin/env python3
"""The sums of docs/FLEET.md: requests per second, memory and events of a fleet, from measured figures.

    tools/fleet_sums.py [--gpus 2 16 1000] [--prompt 2000] [--answer 300] [--busy 0.65] [--check docs/FLEET.md]

Prints the table; with --check compares it with the one in a document and fails if they differ.
"""

import argparse
import sys

# Qwen3-8B in bf16 on one H200, docs/BENCHMARKS.md: milliseconds of a decode step at a context of about 600.
DECODE_MS = {64: 5.86, 128: 8.04, 256: 13.22}
DECODE_CONTEXT = 600
# Tokens per second of prefill, 16 prompts of 512 tokens.
PREFILL = 46_900
# Bytes per second that one kernel reads.
READ = 4.53e12
# Keys and values of a token: 36 layers, 2, 8 heads of 128, 2 bytes.
KV_TOKEN = 36 * 2 * 8 * 128 * 2
# Bytes of GPU memory that are used (139 GiB, --memory-share 0.9), and of weights with workspace.
MEMORY, WEIGHTS = 139 * 2**30 * 0.9, 17.5e9
# Bytes of the event of a stored and later removed block of 16 tokens, in maps.
EVENT = 16 * 4 + 2 * 9 + 24


def decode_ms(batch, context):
    """A step at this context: the measured one, and the time to read the longer cache."""
    return DECODE_MS[batch] + max(0, context - DECODE_CONTEXT) * KV_TOKEN * batch / READ * 1e3


def row(hits, prompt, answer, busy, gpus, batch=128):
    """Of one hit rate: GPU time of a request, requests per second of each fleet, shares, events."""
    prefill = prompt * (1 - hits) / PREFILL * 1e3
    decode = answer * decode_ms(batch, prompt + answer / 2) / batch
    each = busy * 1e3 / (prefill + decode)
    blocks = (prompt * (1 - hits) + answer) / 16
    return prefill + decode, [each * count for count in gpus], prefill / (prefill + decode), each * blocks * EVENT


def table(args):
    counts = " | ".join(f"requests/s, {count:,} GPUs" for count in args.gpus)
    lines = [f"| prefix hits | GPU ms per request | {counts} | of it prefill | events per GPU |"]
    lines.append("|" + "---|" * (4 + len(args.gpus)))
    for hits in (0, 0.5, 0.8):
        ms, rates, share, events = row(hits, args.prompt, args.answer, args.busy, args.gpus)
        shown = " | ".join(f"{rate:,.0f}" for rate in rates)
        lines.append(f"| {hits:.0%} | {ms:.0f} | {shown} | {share:.0%} | {events / 1e3:.0f} kB/s |")
    tokens = (MEMORY - WEIGHTS) / KV_TOKEN
    lines.append("")
    lines.append(
        f"A GPU holds {tokens / 1e3:,.0f} k tokens of KV; 250 GB of host memory another "
        f"{250e9 / KV_TOKEN / 1e3:,.0f} k. 1,000 tokens are {KV_TOKEN / 1e3:.0f} MB: "
        f"{1000 * KV_TOKEN / 50e9 * 1e3:.1f} ms at 50 GB/s, against {1000 / PREFILL * 1e3:.0f} ms of prefill."
    )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 16, 1000])
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--answer", type=int, default=300)
    parser.add_argument("--busy", type=float, default=0.65)
    parser.add_argument("--check")
    args = parser.parse_args()
    sums = table(args)
    if not args.check:
        print(sums)
        return
    with open(args.check) as document:
        if sums not in document.read():
            sys.exit(f"error: {args.check} does not have these sums:\n{sums}")


main()
