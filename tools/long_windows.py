#!/usr/bin/env python3
"""Greedy answers of Gemma 3 270M (window 512) behind a prompt of 7,837 tokens: those with pages of windows given back must
be those with all pages kept (`--keep-windows`), and with `--numerics ggml` those of llama.cpp.

    dacapo pull gemma3-270m
    python3 tools/long_windows.py [--dacapo target/release/dacapo] [--numerics fast|ggml|exact] [--threads N]
    python3 tools/long_windows.py --llama gemma-3-270m-q4_k_m.gguf --numerics ggml

The second needs llama-cpp-python, built as tools/bench_cpu.py says. Minutes on two cores.
"""

import argparse
import json
import pathlib
import subprocess
import sys

arguments = argparse.ArgumentParser()
arguments.add_argument("--dacapo", default="target/release/dacapo")
arguments.add_argument("--numerics", default="fast")
arguments.add_argument("--threads", type=int, default=2)
arguments.add_argument("--bytes", type=int, default=35000, help="of the prompt; a token has about 4.5")
arguments.add_argument("--answer", type=int, default=48)
arguments.add_argument("--llama", metavar="GGUF", help="compare with llama.cpp, too")
options = arguments.parse_args()

PROSE = pathlib.Path(__file__).resolve().parent.parent / "testing/texts/prose.txt"
CONTEXT = 8192


def prompt():
    """The project's prose, more than once."""
    return (PROSE.read_bytes() * 4)[: options.bytes].decode(errors="ignore")


def dacapo(*flags):
    command = [options.dacapo, "run", "gemma3-270m", "--device", "cpu", "--threads", str(options.threads), "--raw", "--json",
               "--temperature", "0", "-n", str(options.answer), "--max-context", str(CONTEXT), "--numerics", options.numerics]
    output = subprocess.run([*command, *flags], input=prompt(), check=True, capture_output=True, text=True).stdout
    answer = json.loads(output)
    kept = answer["memory"]["kv_pages"]
    print(f"{' '.join(flags) or 'pages given back'}: {answer['prompt_tokens']} tokens, pages {kept}: {answer['text']!r}", flush=True)
    return answer


def llama():
    from llama_cpp import Llama

    model = Llama(options.llama, n_ctx=CONTEXT, n_batch=512, n_threads=options.threads, verbose=False)
    tokens = model.tokenize(prompt().encode(), add_bos=True, special=True)
    answer = []
    for token in model.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0):
        answer.append(token)
        if len(answer) == options.answer:
            break
    text = model.detokenize(answer).decode(errors="replace")
    print(f"llama.cpp: {len(tokens)} tokens: {text!r}", flush=True)
    return text


freed, kept = dacapo(), dacapo("--keep-windows")
same = freed["text"] == kept["text"]
print("the same with pages given back and kept" if same else "DIFFERENT with pages given back and kept")
if options.llama:
    theirs = llama()
    shared = len([1 for a, b in zip(theirs, freed["text"]) if a == b])
    same &= theirs == freed["text"]
    print("the same as llama.cpp's" if theirs == freed["text"] else f"not llama.cpp's: {shared} characters agree")
sys.exit(0 if same else 1)
