"""Compares `dacapo bench cpu` with llama.cpp: same GGUF, same threads, interleaved.

    pip install llama-cpp-python     # CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON
                                     #   -DGGML_AVX512_VNNI=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX2=ON
                                     #   -DGGML_FMA=ON -DGGML_F16C=ON"
    python tools/bench_cpu.py MODEL.gguf [--dacapo target/release/dacapo] [--rounds 5] [--threads 2]
"""

import argparse
import json
import os
import statistics
import subprocess
import time

from llama_cpp import Llama

arguments = argparse.ArgumentParser()
arguments.add_argument("model")
arguments.add_argument("--dacapo", default="target/release/dacapo")
arguments.add_argument("--rounds", type=int, default=5)
arguments.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
arguments.add_argument("--prompt", type=int, default=512)
arguments.add_argument("--answer", type=int, default=128)
options = arguments.parse_args()


def dacapo():
    command = [
        options.dacapo, "bench", "cpu", options.model, "--device", "cpu", "--repeats", "1",
        "--threads", str(options.threads), "--prompt", str(options.prompt),
        "--answer", str(options.answer), "--json", "-",
    ]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["figures"]
    return figures["prompt_rate"], figures["decode_rate"]


def llama(model):
    tokens = [i * 40503 % model.n_vocab() for i in range(options.prompt)]
    model.reset()
    start = time.perf_counter()
    model.eval(tokens)
    token = model.sample(temp=0.0)
    first = time.perf_counter()
    for _ in range(options.answer - 1):
        model.eval([token])
        token = model.sample(temp=0.0)
    end = time.perf_counter()
    return options.prompt / (first - start), (options.answer - 1) / (end - first)


model = Llama(
    options.model, n_ctx=options.prompt + options.answer, n_batch=options.prompt,
    n_threads=options.threads, n_threads_batch=options.threads, verbose=False,
)
llama(model)
rounds = []
for _ in range(options.rounds):
    rounds.append((dacapo(), llama(model)))
    (our_prompt, our_decode), (their_prompt, their_decode) = rounds[-1]
    print(
        f"prompt {our_prompt:7.1f} / {their_prompt:6.1f} tok/s = {our_prompt / their_prompt:5.2f}   "
        f"decode {our_decode:6.1f} / {their_decode:5.1f} tok/s = {our_decode / their_decode:5.2f}",
        flush=True,
    )
for what, at in (("prompt", 0), ("decode", 1)):
    ratio = statistics.median(ours[at] / theirs[at] for ours, theirs in rounds)
    ours = statistics.median(ours[at] for ours, _ in rounds)
    theirs = statistics.median(theirs[at] for _, theirs in rounds)
    print(f"{what}: {ours:.1f} against {theirs:.1f} tok/s, median ratio {ratio:.2f}")
