#!/usr/bin/env python3
"""Greedy answers of Gemma 3 270M (window 512) behind a prompt of 7,837 tokens: those with pages of windows given back must
be those with all pages kept (`--keep-windows`), and with `--numerics ggml` those of llama.cpp.

    dacapo pull gemma3-270m
    python3 tools/long_windows.py [--dacapo target/release/dacapo] [--numerics fast|ggml|exact] [--threads N]
    python3 tools/long_windows.py --llama gemma-3-270m-q4_k_m.gguf --numerics ggml [--f32]

The second needs llama-cpp-python, built as tools/bench_cpu.py says, and says how many tokens of the answer agree and how close
llama.cpp's choice was where they differ first. As in tools/compare_greedy.py, such a difference must be a tie. `--f32` writes the weights
out as float32, which it takes from the same file, and both engines run those. Minutes on two cores.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

arguments = argparse.ArgumentParser()
arguments.add_argument("--dacapo", default="target/release/dacapo")
arguments.add_argument("--numerics", default="fast")
arguments.add_argument("--threads", type=int, default=2)
arguments.add_argument("--bytes", type=int, default=35000, help="of the prompt; a token has about 4.5")
arguments.add_argument("--answer", type=int, default=48)
arguments.add_argument("--llama", metavar="GGUF", help="compare with llama.cpp, too")
arguments.add_argument("--f32", action="store_true", help="with --llama: both on the same weights written out as float32")
options = arguments.parse_args()

PROSE = pathlib.Path(__file__).resolve().parent.parent / "testing/texts/prose.txt"
CONTEXT = 8192


def prompt():
    """The project's prose, more than once."""
    return (PROSE.read_bytes() * 4)[: options.bytes].decode(errors="ignore")


def dacapo(model, *flags):
    command = [options.dacapo, "run", model, "--device", "cpu", "--threads", str(options.threads), "--raw", "--json",
               "--temperature", "0", "-n", str(options.answer), "--max-context", str(CONTEXT), "--numerics", options.numerics]
    output = subprocess.run([*command, *flags], input=prompt(), check=True, capture_output=True, text=True).stdout
    answer = json.loads(output)
    kept = answer["memory"]["kv_pages"]
    print(f"{' '.join(flags) or 'pages given back'}: {answer['prompt_tokens']} tokens, pages {kept}: {answer['text']!r}", flush=True)
    return answer


def as_llama(path, ours):
    """Compares an answer with llama.cpp's; false if they differ where llama.cpp's choice was no tie."""
    from compare_greedy import TIE, llama

    answer = llama(path, [prompt()], options.answer, CONTEXT, threads=options.threads)[0]
    print(f"llama.cpp: {answer.text!r}", flush=True)
    gaps = sorted(best[0][1] - best[1][1] for _, best in answer.places)
    print(f"its two best logits are at least {gaps[0]:.4f} apart, {gaps[len(gaps) // 2]:.4f} in the middle")
    if ours == answer.text:
        print(f"all {len(answer.places)} tokens are llama.cpp's")
        return True
    at, (piece, logit), (other, other_logit) = answer.first_difference(ours)
    print(f"the first {at} of {len(answer.places)} tokens are llama.cpp's; then it gives its {piece!r} {logit:.4f}, "
          f"and our {other!r} {other_logit:.4f}: {logit - other_logit:.4f} less")
    return logit - other_logit <= TIE


def main():
    with tempfile.TemporaryDirectory() as folder:
        model = options.llama or "gemma3-270m"
        if options.f32:
            from compare_greedy import written_out

            model = written_out(options.llama, folder)
        freed, kept = dacapo(model), dacapo(model, "--keep-windows")
        same = freed["text"] == kept["text"]
        print("the same with pages given back and kept" if same else "DIFFERENT with pages given back and kept", flush=True)
        if options.llama:
            same &= as_llama(model, freed["text"])
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
