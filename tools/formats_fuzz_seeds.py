#!/usr/bin/env python3
"""Writes the seeds of fuzz/corpus: one small file for each class in fuzz/README.md, and good ones.

    tools/formats_fuzz_seeds.py

Needs nothing but Python. Seeds are named seed-*; what the fuzzer adds later is not kept in git.
"""

import json
import shutil
import struct
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "fuzz/corpus"
DATA = ROOT / "crates/formats/tests/data"
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def strings(name, values):
    return key(name, ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values)))


def tensor(name, shape, kind, offset):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(keys=(), tensors=(), data=64, version=3, key_count=None, tensor_count=None):
    counts = (len(tensors) if tensor_count is None else tensor_count,
              len(keys) if key_count is None else key_count)
    out = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return out + b"\0" * (-len(out) % 32) + b"\0" * data


def safetensors(header, data=16):
    if not isinstance(header, str):
        header = json.dumps(header, separators=(",", ":"))
    return struct.pack("<Q", len(header)) + header.encode() + b"\0" * data


ARCH = key("general.architecture", STRING, text("llama"))
ONE = tensor("a", [8], 0, 0)
MAX = 2**64 - 1

GGUF = {
    "good": gguf([ARCH], [ONE]),
    "good-v2": gguf([ARCH], [ONE], version=2),
    "truncated-magic": b"GGUF",
    "tensor-count": gguf([ARCH], [ONE], tensor_count=2**61),
    "key-count": gguf([ARCH], [ONE], key_count=2**60),
    "key-length": gguf([struct.pack("<Q", MAX) + b"k"]),
    "string-length": gguf([key("k", STRING, struct.pack("<Q", MAX))]),
    "string-10gb": gguf([key("k", STRING, struct.pack("<Q", 10**10))]),
    "array-length": gguf([key("k", ARRAY, struct.pack("<IQ", STRING, MAX // 8 + 2))]),
    "array-nested": gguf([key("k", ARRAY, struct.pack("<IQIQ", ARRAY, 1, ARRAY, 1) + b"\0" * 64)]),
    "array-type": gguf([key("k", ARRAY, struct.pack("<IQ", 77, 1))]),
    "value-type": gguf([key("k", 77, b"\0" * 8)]),
    "dimensions": gguf([ARCH], [tensor("a", [1] * 9, 0, 0)]),
    "shape-product": gguf([ARCH], [tensor("a", [2**32, 2**32], 0, 0)]),
    "zero-times-overflow": gguf([ARCH], [tensor("a", [0, 2**40, 2**40], 0, 0)]),
    "size-sum": gguf([ARCH], [tensor("a", [2**61], 0, 0), tensor("b", [2**61], 0, 32)]),
    "offset-end": gguf([ARCH], [tensor("a", [8], 0, 2**40)]),
    "offset-wraps": gguf([ARCH], [tensor("a", [8], 0, MAX - 31)]),
    "overlap": gguf([ARCH], [tensor("a", [16], 0, 0), tensor("b", [8], 0, 32)]),
    "tensor-type": gguf([ARCH], [tensor("a", [8], 2**31, 0)]),
    "partial-block": gguf([ARCH], [tensor("a", [33], 2, 0)]),
    "alignment-zero": gguf([key("general.alignment", U32, struct.pack("<I", 0))], [ONE]),
    "alignment-odd": gguf([key("general.alignment", U32, struct.pack("<I", 3))], [ONE]),
    "key-twice": gguf([ARCH, ARCH], [ONE]),
    "tensor-twice": gguf([ARCH], [ONE, tensor("a", [8], 0, 32)]),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
}

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
SAFETENSORS = {
    "good": safetensors({"__metadata__": {"format": "pt"}, "a": ENTRY}),
    "header-length": struct.pack("<Q", MAX),
    "header-10gb": struct.pack("<Q", 10**10) + b"{}",
    "offsets-end": safetensors({"a": {**ENTRY, "data_offsets": [0, 10**10]}}),
    "offsets-backwards": safetensors({"a": {**ENTRY, "data_offsets": [16, 0]}}),
    "shape-product": safetensors({"a": {**ENTRY, "shape": [2**32, 2**32]}}),
    "hole": safetensors({"a": {**ENTRY, "data_offsets": [4, 20]}}, 20),
    "overlap": safetensors({"a": ENTRY, "b": ENTRY}),
    "trailing": safetensors({"a": ENTRY}, 64),
    "name-twice": safetensors('{"a":%s,"a":%s}' % (json.dumps(ENTRY), json.dumps(ENTRY))),
    "nested": safetensors("[" * 500),
    "bloated": safetensors({str(i): {**ENTRY, "shape": [0], "data_offsets": [0, 0]} for i in range(99)}, 0),
}

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "rms_norm_eps": 1e-5,
    "eos_token_id": [1, 2], "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}
CONFIGS = {
    "good": json.dumps(CONFIG).encode() + b"\0" + b'{"temperature":0.6,"eos_token_id":[3]}',
    "heads-zero": json.dumps({**CONFIG, "num_attention_heads": 0}).encode(),
    "huge": json.dumps({**CONFIG, "hidden_size": 10**18, "num_attention_heads": 10**18}).encode(),
    "negative": json.dumps({**CONFIG, "vocab_size": -1}).encode(),
    "qwen2": json.dumps({**CONFIG, "model_type": "qwen2", "use_sliding_window": True,
                         "sliding_window": 7, "max_window_layers": 1}).encode(),
}

TEMPLATES = {
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "output": "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}{% include '/etc/passwd' %}",
    "tojson": "{{ messages | tojson(indent=2, ensure_ascii=true) }}{{ tools }}{{ strftime_now('%d %b %Y') }}",
    "generation": "{% for m in messages %}{%- generation -%}{{ m['content'] }}{% endgeneration %}{% endfor %}",
}

TOKENS = ["a", "b", "ab", "<s>"]
KINDS = key("tokenizer.ggml.token_type", ARRAY, struct.pack("<IQ4i", I32, 4, 1, 1, 1, 3))
VOCAB = [key("tokenizer.ggml.model", STRING, text("gpt2")), strings("tokenizer.ggml.tokens", TOKENS)]
TOKENIZERS = {
    "merge-longer-than-any-token": gguf(VOCAB + [strings("tokenizer.ggml.merges", ["ab ab"])], data=0),
    "token-too-long": gguf([VOCAB[0], strings("tokenizer.ggml.tokens", ["x" * 5000])], data=0),
    "kinds-too-few": gguf([VOCAB[0], strings("tokenizer.ggml.tokens", TOKENS[:2]), KINDS], data=0),
    "scores-absent": gguf([key("tokenizer.ggml.model", STRING, text("llama")), VOCAB[1]], data=0),
}


def write(target, seeds):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in seeds.items():
        (folder / f"seed-{name}").write_bytes(content if isinstance(content, bytes) else content.encode())


def main():
    for folder in CORPUS.glob("*"):
        for old in folder.glob("seed-*"):
            old.unlink()
    write("gguf", GGUF)
    write("safetensors", SAFETENSORS)
    write("checkpoint", {f"gguf-{name}": seed for name, seed in GGUF.items()})
    write("checkpoint", {f"safetensors-{name}": seed for name, seed in SAFETENSORS.items()})
    write("config", CONFIGS)
    write("index", {
        "good": json.dumps({"weight_map": {"a": "x.safetensors"}}),
        "outside": json.dumps({"weight_map": {"a": "../x.safetensors", "b": "/x.safetensors"}}),
        "itself": json.dumps({"weight_map": {"a": "model.safetensors.index.json"}}),
    })
    write("chat_template", TEMPLATES)
    for path in sorted((DATA / "templates").glob("*.jinja")):
        shutil.copy(path, CORPUS / "chat_template" / f"seed-{path.stem}")
    write("tokenizer_gguf", TOKENIZERS)
    write("tokenizer_json", {
        "merge-longer-than-any-token": '{"model":{"vocab":{"a":0,"b":1},"merges":[["a","b"]]}}',
        "huge-id": '{"model":{"vocab":{"a":4294967295}}}',
        "unigram": '{"model":{"type":"Unigram","vocab":[["a",0.0]]}}',
        "regex": '{"pre_tokenizer":{"type":"Split","pattern":{"Regex":"(a*)*b"},"behavior":"Isolated","invert":false},"model":{"vocab":{"a":0}}}',
    })
    for kind in ["llama-bpe", "llama", "smollm"]:
        shutil.copy(DATA / f"tokenizers/{kind}.gguf", CORPUS / "tokenizer_gguf" / f"seed-{kind}")
    for kind in ["llama-bpe", "qwen2", "smollm"]:
        shutil.copy(DATA / f"tokenizers/{kind}.json", CORPUS / "tokenizer_json" / f"seed-{kind}")
    pieces = json.loads((DATA / "tokenizers/pieces.json").read_text())
    write("text", {f"text-{n}": bytes([n]) + "".join(pieces[n::4]).encode() for n in range(4)})
    write("quant", {f"type-{n}": bytes([n]) + bytes(range(256)) for n in range(23)})


if __name__ == "__main__":
    main()
