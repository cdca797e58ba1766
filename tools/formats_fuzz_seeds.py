#!/usr/bin/env python3
"""Writes the seeds of fuzz/corpus: one small file for each class in fuzz/README.md, and good ones.

    tools/formats_fuzz_seeds.py

Needs only Python. Seeds are named seed-*; files that the fuzzer adds are not committed.
"""

import json
import math
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



def doubling(step):
    return "{% set s = 'xxxxxxxxxxxxxxxx' %}" + step * 40 + "{{ s }}"


# One for each kind of attack in crates/formats/tests/sources.
RENDERS = {
    "not": "{{ " + "not " * 2_000 + "x }}",
    "elif": "{% if a %}" + "{% elif a %}" * 1_100 + "{% endif %}",
    "attributes": "{{ x" + ".x" * 2_000 + " }}",
    "filters": "{{ x" + "|string" * 2_000 + " }}",
    "minus": "{{ " + "- " * 2_000 + "1 }}",
    "brackets": "{{ " + "(" * 2_000 + "1" + ")" * 2_000 + " }}",
    "concat": "{{ 1" + "~1" * 2_000 + " }}",
    "if-else": "{{ 1" + " if x else 1" * 1_000 + " }}",
    "targets": "{% set " + "(" * 2_000 + "a" + ")" * 2_000 + " = 1 %}",
    "blocks": "{% if x %}" * 200,
    "double-tilde": doubling("{% set s = s ~ s %}"),
    "double-plus": doubling("{% set s = s + s %}"),
    "double-replace": doubling("{% set s = s|replace('x', 'xx') %}"),
    "double-join": doubling("{% set s = s.join(['', '', '']) %}"),
    "double-format": doubling("{% set s = '%s%s'|format(s, s) %}"),
    "double-str-format": doubling("{% set s = '{}{}'.format(s, s) %}"),
    "double-capture": doubling("{% set s %}{{ s }}{{ s }}{% endset %}"),
    "double-macro": doubling("{% macro m(a) %}{{ a }}{{ a }}{% endmacro %}{% set s = m(s) %}"),
    "double-list": doubling("{% set s = [s, s] %}"),
    "double-chain": doubling("{% set s = s|chain(s) %}"),
    "indent": "{{ 'a\nb'|indent(100000000000) }}",
    "replace": "{{ ('x' * 9999)|replace('x', 'x' * 9999) }}",
    "format-wide": "{{ '%1000000000d'|format(1) }}{{ '%*d' % (1000000000, 1) }}",
    "str-format-wide": "{{ '{:{}}'.format(1, 1000000000) }}",
    "repeat": "{{ 'x' * 10 ** 9 }}{{ [1] * 10 ** 9 }}{{ (1,) * 10 ** 9 }}",
    "range": "{{ range(0, -10 ** 9, -1)|list }}",
    "power": "{{ 9 ** 9 ** 9 }}{{ 2 ** -1 }}",
    "batch": "{{ [1]|batch(10 ** 11, 0)|list }}{{ [1]|slice(10 ** 11)|list }}",
    "tojson": "{{ messages|tojson(indent='x' * 9999, separators=(',', ':')) }}",
    "sorting": "{% set l = range(9999)|list %}{% for a in l %}{% set m = l|sort(reverse=true) %}{% endfor %}",
    "nesting": "{% set n = namespace(l=[]) %}{% for a in range(999) %}{% set n.l = [n.l] %}{% endfor %}{{ n.l }}",
    "circle": "{% set n = namespace() %}{% set n.n = [n] %}{{ n == n }}",
    "loop-recursive": "{% for x in [[1, [2]]] recursive %}{{ x if x is number else loop(x) }}{{ loop.depth }}{% endfor %}",
    "caller": "{% macro m() %}{{ caller(1) }}{% endmacro %}{% call(a) m() %}{{ a }}{% endcall %}",
    "slices": "{{ 'abcdef'[1:5:2] }}{{ [1, 2, 3][::-1] }}{{ messages[-1:] }}",
    "groups": "{% for g, l in messages|groupby('role') %}{{ g }}{{ l|length }}{% endfor %}{{ {'b': 1, 'a': 2}|dictsort }}",
    "methods": "{{ ' a b '.split() }}{{ 'a,b'.rsplit(',', 1) }}{{ 'a'.strip('a') }}{{ 'x'.startswith(('x', 'y')) }}",
    "messages": "{% for m in messages %}{{ m.role }}{% endfor %}{{ x }}\0" + '[{"role":"user","content":"hi"}]\0{"x":{"y":[1,2.5,null]}}',
    "deep-messages": "{{ messages }}\0" + "[" * 100 + "]" * 100,
    "width": "{{ 'x'|indent(w, true) }}{{ 'x' * w }}\0[]\0" + '{"w":100000000000}',
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


def tokenizer_json(added=(), **parts):
    letters = {c: n for n, c in enumerate("abcdefghijklmnopqrstuvwxyz ĠĊ▁")}
    added = [{"id": len(letters) + n, "content": content, "single_word": n % 2 == 1, "lstrip": n % 3 == 1,
              "rstrip": n % 3 == 2, "normalized": n % 4 == 3, "special": n % 2 == 0}
             for n, content in enumerate(added)]
    model = {"type": "BPE", "vocab": letters, "merges": []}
    return json.dumps({"added_tokens": added, "model": model, **parts}, ensure_ascii=False).encode()


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def replacement(pattern, content):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def chain(name, *steps):
    return {"type": "Sequence", name: list(steps)}


USES = {
    "added-long": tokenizer_json(["x" * 5_000]) + b"\0hi",
    "added-many": tokenizer_json([f"<{n}>" for n in range(500)]) + b"\0a <7> b<8>c",
    "added-alike": tokenizer_json(["ab", "abc", "b", "bcd", "abcd"]) + b"\0abcd ab  bcd abcabcd",
    "two-replacements": tokenizer_json(normalizer=chain("normalizers", *[replacement(".", "a" * 20_000)] * 2)) + b"\0hi",
    "replacements": tokenizer_json(normalizer=chain("normalizers", *[replacement("", "aa")] * 30)) + b"\0hi",
    "normalisers": tokenizer_json(normalizer=chain("normalizers", {"type": "NFKC"}, {"type": "Lowercase"},
                                  {"type": "Strip", "strip_left": True, "strip_right": True},
                                  {"type": "Prepend", "prepend": "▁"})) + "\0 Äﬁ K ".encode(),
    "look-ahead": tokenizer_json(pre_tokenizer=split("(?:(?=.*x)a)*")) + b"\0" + b"a" * 2_000,
    "reads-on": tokenizer_json(pre_tokenizer=split(".*x|a")) + b"\0" + b"a" * 20_000,
    "many-states": tokenizer_json(pre_tokenizer=split("[ab]*a[ab]{13}c|a|b")) + b"\0" + b"abba" * 2_000,
    "spaces": tokenizer_json(pre_tokenizer=split(r" ?\w+|\s+(?!\S)|\s+", "MergedWithNext", True)) + b"\0a   b \n c  ",
    "steps": tokenizer_json(pre_tokenizer=chain("pretokenizers", {"type": "Digits", "individual_digits": False},
                            {"type": "Punctuation", "behavior": "MergedWithPrevious"},
                            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
                            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True})) + b"\0a, 12b. c",
    "one-word": tokenizer_json() + b"\0" + b"ab" * 9_000,
}


def order_of(*groups):
    """A GPTQ weight of eight rows and as many columns as there are groups named."""
    cols = len(groups)
    sizes = {"qweight": ("I32", [cols // 8, 8]), "qzeros": ("I32", [cols // 32, 1]), "scales": ("F16", [cols // 32, 8]),
             "g_idx": ("I32", [cols])}
    header, data = {}, 0
    for end, (dtype, shape) in sizes.items():
        size = math.prod(shape) * (4 if dtype == "I32" else 2)
        header[f"a.{end}"] = {"dtype": dtype, "shape": shape, "data_offsets": [data, data + size]}
        data += size
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}}
    file = safetensors(header, data - 4 * cols) + struct.pack(f"<{cols}i", *groups)
    return json.dumps(config).encode() + b"\0" + file


def expression(pattern):
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [f"re:{pattern}"],
              "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}}
    entry = {"dtype": "I32", "shape": [1, 1], "data_offsets": [0, 4]}
    name = "ab" * 200 + ".weight_packed"
    return json.dumps({"quantization_config": config}).encode() + b"\0" + safetensors({name: entry}, 4)


SCALED = {
    "order-good": order_of(*[n % 2 for n in range(64)]),
    "order-outside": order_of(*[0] * 63, 2**31 - 1),
    "order-negative": order_of(*[0] * 63, -1),
    "order-uneven": order_of(*[1] * 64),
    "look-ahead": expression("(?!x).*"),
    "many-states": expression("[ab]*a[ab]{13}c"),
    "nested-repeats": expression("((((a{99}){99}){99}){99}){99}"),
}


def scaled_folders():
    """The small ones of the quantised checkpoints that tests read."""
    seeds = {}
    for folder in sorted((DATA / "scaled").iterdir()):
        tensors = (folder / "model.safetensors").read_bytes()
        if len(tensors) < 6_000:
            seeds[folder.name] = (folder / "config.json").read_bytes() + b"\0" + tensors
    return seeds


def write(target, seeds):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in seeds.items():
        (folder / f"seed-{name}").write_bytes(content if isinstance(content, bytes) else content.encode())


OURS = ["gguf", "safetensors", "checkpoint", "config", "index", "chat_template", "template_render",
        "tokenizer_gguf", "tokenizer_json", "tokenizer_use", "text", "quant", "scaled"]


def main():
    # Other targets have their own seeds.
    for target in OURS:
        for old in (CORPUS / target).glob("seed-*"):
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
    write("template_render", {**TEMPLATES, **RENDERS})
    for path in sorted((DATA / "templates").glob("*.jinja")):
        shutil.copy(path, CORPUS / "template_render" / f"seed-{path.stem}")
    write("tokenizer_use", USES)
    write("tokenizer_gguf", TOKENIZERS)
    write("tokenizer_json", {
        "merge-longer-than-any-token": '{"model":{"vocab":{"a":0,"b":1},"merges":[["a","b"]]}}',
        "huge-id": '{"model":{"vocab":{"a":4294967295}}}',
        "unigram": '{"model":{"type":"Unigram","vocab":[["a",0.0]]}}',
        "regex": '{"pre_tokenizer":{"type":"Split","pattern":{"Regex":"(a*)*b"},"behavior":"Isolated","invert":false},"model":{"vocab":{"a":0}}}',
    })
    pieces = json.loads((DATA / "tokenizers/pieces.json").read_text())
    for kind in ["llama-bpe.json", "qwen2.json", "llama.gguf", "smollm.gguf"]:
        file = (DATA / "tokenizers" / kind).read_bytes()
        write("tokenizer_use", {kind: file + b"\0" + "".join(pieces[::3]).replace("\0", "").encode()})
    for kind in ["llama-bpe", "llama", "smollm"]:
        shutil.copy(DATA / f"tokenizers/{kind}.gguf", CORPUS / "tokenizer_gguf" / f"seed-{kind}")
    for kind in ["llama-bpe", "qwen2", "smollm"]:
        shutil.copy(DATA / f"tokenizers/{kind}.json", CORPUS / "tokenizer_json" / f"seed-{kind}")
    write("text", {f"text-{n}": bytes([n]) + "".join(pieces[n::4]).encode() for n in range(4)})
    write("quant", {f"type-{n}": bytes([n]) + bytes(range(256)) for n in range(25)})
    write("scaled", {**SCALED, **scaled_folders()})


if __name__ == "__main__":
    main()
