#!/usr/bin/env python3
"""Writes a GGUF file of a dense Qwen3 model with random weights, for measuring speed. Needs numpy alone.

    python3 tools/make_random_gguf.py OUT.gguf [--mix q4_k_m|q8_0|q4_0|...] [--layers 36 --hidden 4096 ...]

The default shape is Qwen3-8B's. `q4_k_m` is the mix that llama.cpp makes: q4_k, and q6_k for the head, and for v and down
of half of the layers. Blocks are drawn as they are stored, with scales such that rows of weights have the norm 1. Tokens are
the 256 bytes and names without a meaning.
"""

import argparse
import struct

import numpy as np

# GGUF's number of a type, elements and bytes of a block.
TYPES = {"f32": (0, 1, 4), "q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22), "q5_1": (7, 32, 24),
         "q8_0": (8, 32, 34), "q4_k": (12, 256, 144), "q5_k": (13, 256, 176), "q6_k": (14, 256, 210)}

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("out")
arguments.add_argument("--mix", choices=["q4_k_m", *(name for name in TYPES if name != "f32")], default="q4_k_m")
arguments.add_argument("--layers", type=int, default=36)
arguments.add_argument("--hidden", type=int, default=4096)
arguments.add_argument("--inner", type=int, default=12288)
arguments.add_argument("--heads", type=int, default=32)
arguments.add_argument("--kv-heads", type=int, default=8)
arguments.add_argument("--head", type=int, default=128)
arguments.add_argument("--vocab", type=int, default=151936)
options = arguments.parse_args()
rng = np.random.default_rng(1)


def half(value):
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def blocks(kind, cols, count):
    """`count` blocks of a matrix whose rows have `cols` elements."""
    _, elements, size = TYPES[kind]
    out = np.frombuffer(rng.bytes(count * size), np.uint8).reshape(count, size).copy()
    numbers = {"q4": 16, "q5": 32, "q6": 64, "q8": 256}[kind[:2]]
    scale = 1 / np.sqrt((numbers**2 - 1) / 12 * cols)
    if kind in ("q4_k", "q5_k"):
        # scale · 32 · number − minimum · 32 in each of eight parts, whose factors 32 take six bits.
        out[:, :2], out[:, 2:4] = half(scale / 32), half(scale * (numbers - 1) / 64)
        out[:, 4:12], out[:, 12:16] = 0xA0, 0x00
    elif kind == "q6_k":
        out[:, 192:208], out[:, 208:] = 32, half(scale / 32)
    else:
        out[:, :2] = half(scale)
        if kind in ("q4_1", "q5_1"):
            out[:, 2:4] = half(-scale * (numbers - 1) / 2)
    return out


def text(value):
    value = value.encode()
    return struct.pack("<Q", len(value)) + value


def field(name, value):
    """A key and its value: an integer, a float, a text, or a list of one of them."""
    def kind_of(value):
        return 4 if isinstance(value, int) else 6 if isinstance(value, float) else 8

    def plain(value):
        return text(value) if isinstance(value, str) else struct.pack("<I" if isinstance(value, int) else "<f", value)

    if not isinstance(value, list):
        return text(name) + struct.pack("<I", kind_of(value)) + plain(value)
    kind = kind_of(value[0]) if value else 8
    return text(name) + struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(plain, value))


def byte_tokens():
    """A character for each byte, as in GPT-2's vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    names = {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def more_bits(layer):
    eighth = options.layers // 8
    return layer < eighth or layer >= 7 * options.layers // 8 or (layer - eighth) % 3 == 2


def tensors():
    """Names, types and shapes in order."""
    q, kv, hidden = options.heads * options.head, options.kv_heads * options.head, options.hidden
    mixed = options.mix == "q4_k_m"
    low, high = ("q4_k", "q6_k") if mixed else (options.mix, options.mix)
    yield "token_embd.weight", low, (options.vocab, hidden)
    yield "output.weight", high, (options.vocab, hidden)
    yield "output_norm.weight", "f32", (hidden,)
    for layer in range(options.layers):
        best = high if more_bits(layer) else low
        for name, kind, shape in (
            ("attn_norm", "f32", (hidden,)), ("ffn_norm", "f32", (hidden,)),
            ("attn_q_norm", "f32", (options.head,)), ("attn_k_norm", "f32", (options.head,)),
            ("attn_q", low, (q, hidden)), ("attn_k", low, (kv, hidden)), ("attn_v", best, (kv, hidden)),
            ("attn_output", low, (hidden, q)), ("ffn_gate", low, (options.inner, hidden)),
            ("ffn_up", low, (options.inner, hidden)), ("ffn_down", best, (hidden, options.inner)),
        ):
            yield f"blk.{layer}.{name}.weight", kind, shape


def main():
    names = [f"unused{at}" for at in range(options.vocab - 257)]
    fields = {
        "general.architecture": "qwen3", "general.name": f"random {options.mix}", "general.alignment": 32,
        "qwen3.context_length": 40960, "qwen3.embedding_length": options.hidden, "qwen3.block_count": options.layers,
        "qwen3.feed_forward_length": options.inner, "qwen3.attention.head_count": options.heads,
        "qwen3.attention.head_count_kv": options.kv_heads, "qwen3.attention.key_length": options.head,
        "qwen3.attention.value_length": options.head, "qwen3.rope.freq_base": 1e6,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*byte_tokens(), "<|end|>", *names],
        "tokenizer.ggml.token_type": [1] * 256 + [3] + [1] * len(names), "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 256,
    }
    header, at = b"", 0
    for name, kind, shape in tensors():
        number, elements, size = TYPES[kind]
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, at)
        at += (int(np.prod(shape)) // elements * size + 31) // 32 * 32
    count = sum(1 for _ in tensors())
    start = b"GGUF" + struct.pack("<IQQ", 3, count, len(fields))
    start += b"".join(field(name, value) for name, value in fields.items()) + header
    with open(options.out, "wb") as out:
        out.write(start + bytes(-len(start) % 32))
        for _, kind, shape in tensors():
            if kind == "f32":
                data = np.ones(shape, np.float32).tobytes()
            else:
                _, elements, _ = TYPES[kind]
                data = blocks(kind, shape[-1], int(np.prod(shape)) // elements).tobytes()
            out.write(data + bytes(-len(data) % 32))
    print(f"{options.out}: {at / 1e9:.2f} GB of weights")


main()
