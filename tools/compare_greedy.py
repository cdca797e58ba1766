#!/usr/bin/env python3
"""Compares greedy answers with llama.cpp: same GGUF, 20 prompts, 32 tokens each.

    pip install llama-cpp-python gguf
    python tools/compare_greedy.py MODEL.gguf [--dacapo target/release/dacapo] [--numerics fast] [--f32] [--itself]

A quantised model is multiplied with activations rounded to 8 bits, by both engines. Two sums that differ in their last
bit (the order of additions is enough) round some activation the other way, and that moves logits by tenths: llama.cpp
with and without flash attention differs from itself as much, which `--itself` shows. So Dacapo runs with `--numerics
ggml`, which rounds and adds like llama.cpp built for AVX-512; `--numerics fast` shows the default. `--f32` writes the
same weights out as float32 (exactly: a block's scale times its integers) and runs both engines on that file. The first
difference, if any, must be a tie: the exit status is 1 if llama.cpp's two best tokens are further apart than 1e-3
logits at the first place where the answers differ.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from llama_cpp import Llama

PROMPTS = [
    "The capital of France is", "The history of Rome begins", "Water boils at", "In 1969, the first man",
    "def fibonacci(n):", "The quick brown fox", "Once upon a time", "Photosynthesis is the process",
    "The three primary colours are", "To make a cup of tea,", "The opposite of hot is", "Mount Everest is",
    "A triangle has", "The sun rises in the", "Two plus two equals", "The largest ocean on Earth",
    "Shakespeare wrote", "The speed of light is", "Dogs are often called", "A good friend is someone who",
]
TOKENS = 32
TIE = 1e-3


def written_out(path, folder):
    """The model with every weight as float32."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

    reader = GGUFReader(path)
    to = str(pathlib.Path(folder) / "f32.gguf")
    writer = GGUFWriter(to, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        value = 0 if field.name == "general.file_type" else field.contents()
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        floats = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, np.ascontiguousarray(floats))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def ours(path, folder, options):
    """Dacapo's answers, as texts."""
    asked, answered = pathlib.Path(folder) / "prompts.jsonl", pathlib.Path(folder) / "answers.jsonl"
    asked.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in enumerate(PROMPTS)))
    command = [options.dacapo, "run", path, "--device", "cpu", "--raw", "--batch", str(asked), "-o", str(answered),
               "--max-batch", "1", "--max-tokens", str(TOKENS), "--temperature", "0", "--numerics", options.numerics]
    subprocess.run(command, check=True, capture_output=True)
    answers = [json.loads(line) for line in answered.read_text().splitlines()]
    return [answer["text"] for answer in sorted(answers, key=lambda answer: answer["id"])]


def llama(path, **how):
    """llama.cpp's answers: the text after each token, and how far apart its two best tokens were."""
    model = Llama(path, n_ctx=512, n_threads=2, logits_all=True, verbose=False, **how)
    answers = []
    for prompt in PROMPTS:
        model.reset()
        model.eval(model.tokenize(prompt.encode(), add_bos=False, special=True))
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
        answers.append((pieces, gaps))
    return answers


def compare(what, texts, theirs):
    """Prints where answers differ; returns the largest gap there."""
    equal, worst = 0, 0.0
    for prompt, text, (pieces, gaps) in zip(PROMPTS, texts, theirs):
        if text == (pieces[-1] if pieces else ""):
            equal += 1
            continue
        at = next((i for i, piece in enumerate(pieces) if not text.startswith(piece)), len(pieces) - 1)
        worst = max(worst, gaps[at])
        print(f"  {prompt!r}: differs at token {at}, where llama.cpp's best two are {gaps[at]:.4f} logits apart")
    print(f"{what}: {equal} of {len(PROMPTS)} answers are equal" + (f", largest gap {worst:.4f}" if worst else ""))
    return worst


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("model")
    arguments.add_argument("--dacapo", default="target/release/dacapo")
    arguments.add_argument("--numerics", default="ggml", help="Dacapo's numerics: ggml or fast")
    arguments.add_argument("--f32", action="store_true", help="compare on the same weights written out as float32")
    arguments.add_argument("--itself", action="store_true", help="also compare llama.cpp with flash attention and without")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = written_out(options.model, folder) if options.f32 else options.model
        theirs = llama(path)
        worst = compare("ours and llama.cpp", ours(path, folder, options), theirs)
        if options.itself:
            flash = [pieces[-1] if pieces else "" for pieces, _ in llama(path, flash_attn=True)]
            compare("llama.cpp with flash attention and without", flash, theirs)
    return int(worst > TIE)


if __name__ == "__main__":
    sys.exit(main())
