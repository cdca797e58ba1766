#!/usr/bin/env python3
"""Compares greedy answers with llama.cpp: same GGUF, 20 prompts, 32 tokens each. A model whose attention has a window
gets four of the prompts behind a text that is longer than the window.

    pip install llama-cpp-python gguf
    python tools/compare_greedy.py MODEL.gguf [--dacapo target/release/dacapo] [--numerics fast] [--f32] [--itself]

A quantised model is multiplied with activations rounded to 8 bits, by both engines. Two sums that differ in their last
bit (the order of additions is enough) round some activation the other way, and that moves logits by tenths: llama.cpp
with and without flash attention differs from itself as much, which `--itself` shows. So Dacapo runs with `--numerics
ggml`, which rounds and adds like llama.cpp built for AVX-512; `--numerics fast` shows the default. `--f32` writes the
same weights out as float32 (exactly: a block's scale times its integers) and runs both engines on that file. The first
difference, if any, must be a tie: the exit status is 1 if, at the first place where the answers differ, llama.cpp gives
its own token more than 1e-3 logits more than ours.

llama.cpp adds up products of Q4_K, Q5_K and Q6_K weights by the number of rows that come together. So Dacapo runs one
request at a time, and both take a prompt in steps of up to 512 tokens.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import llama_cpp
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
# Tokens of a prompt that are computed together: llama.cpp's default.
STEP = 512
CONTEXT = 2048
# How many candidates of each place are kept, to look up the one that Dacapo chose.
BEST = 100


def prompts(path):
    """The prompts for a model."""
    from gguf import GGUFReader

    window = [field.contents() for name, field in GGUFReader(path).fields.items() if name.endswith(".sliding_window")]
    if not window:
        return PROMPTS
    # A line is at least eight tokens. No two texts begin alike: what one has computed does not serve the other.
    fewest = max(window) // 8 + 1
    line = lambda n: f"{PROMPTS[n % len(PROMPTS)]} number {n}."
    text = lambda n: "\n".join(line(n * 5 + i) for i in range(fewest + 20 * n))
    return PROMPTS[:-4] + [text(n) + "\n" + prompt for n, prompt in enumerate(PROMPTS[-4:])]


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


def ours(path, asking, folder, options):
    """Dacapo's answers, as texts."""
    asked, answered = pathlib.Path(folder) / "prompts.jsonl", pathlib.Path(folder) / "answers.jsonl"
    asked.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in enumerate(asking)))
    command = [options.dacapo, "run", path, "--device", "cpu", "--raw", "--batch", str(asked), "-o", str(answered),
               "--max-batch", "1", "--no-prefix-cache", "--max-tokens", str(TOKENS), "--temperature", "0",
               "--numerics", options.numerics]
    subprocess.run(command, check=True, capture_output=True)
    answers = [json.loads(line) for line in answered.read_text().splitlines()]
    return [answer["text"] for answer in sorted(answers, key=lambda answer: answer["id"])]


class Answer:
    """llama.cpp's answer: for each token its best candidates, best first, with the text that each would continue."""

    def __init__(self):
        self.text, self.places = "", []

    def least_gap(self):
        return min(best[0][1] - best[1][1] for _, best in self.places)

    def first_difference(self, text):
        """The place, the text and logit of llama.cpp's token there, and of the best token that continues `text`."""
        texts = [before for before, _ in self.places[1:]] + [self.text]
        at = next((i for i, piece in enumerate(texts) if not text.startswith(piece)), len(texts) - 1)
        before, best = self.places[at]
        rest = text[len(before):]
        other = next(((piece, logit) for piece, logit in best if piece and rest.startswith(piece)), ("", -np.inf))
        return at, best[0], other


def llama(path, asking, length=TOKENS, context=CONTEXT, **how):
    """llama.cpp's answers."""
    model = Llama(path, n_ctx=context, n_batch=STEP, n_threads=how.pop("threads", 2), verbose=False, **how)
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    answers = []
    for prompt in asking:
        model.reset()
        model.eval(model.tokenize(prompt.encode(), add_bos=True, special=True))
        answer, tokens = Answer(), []
        for _ in range(length):
            # Of the last token only: in the ordinary run the last layer computes no other.
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), (model.n_vocab(),))
            best = [int(token) for token in logits.argsort()[-BEST:][::-1]]
            if llama_cpp.llama_vocab_is_eog(vocab, best[0]):
                break
            pieces = [model.detokenize([token]).decode(errors="replace") for token in best]
            answer.places.append((answer.text, [(piece, float(logits[token])) for piece, token in zip(pieces, best)]))
            tokens.append(best[0])
            answer.text = model.detokenize(tokens).decode(errors="replace")
            model.eval([best[0]])
        answers.append(answer)
    return answers


def compare(what, asking, texts, theirs):
    """Prints where answers differ; returns the largest gap there."""
    equal, worst = 0, 0.0
    for prompt, text, answer in zip(asking, texts, theirs):
        if text == answer.text:
            equal += 1
            continue
        at, (piece, logit), (other, other_logit) = answer.first_difference(text)
        worst = max(worst, logit - other_logit)
        print(f"  {prompt[-40:]!r}: differs at token {at}; llama.cpp gives its {piece!r} {logit:.4f}, "
              f"and {other!r} {other_logit:.4f}")
    print(f"{what}: {equal} of {len(asking)} answers are equal" + (f", largest gap {worst:.4f}" if worst else ""))
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
        asking = prompts(path)
        theirs = llama(path, asking)
        worst = compare("ours and llama.cpp", asking, ours(path, asking, folder, options), theirs)
        if options.itself:
            flash = [answer.text for answer in llama(path, asking, flash_attn=True)]
            compare("llama.cpp with flash attention and without", asking, flash, theirs)
    return int(worst > TIE)


if __name__ == "__main__":
    sys.exit(main())
