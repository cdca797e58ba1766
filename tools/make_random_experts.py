#!/usr/bin/env python3
"""Writes a GGUF file of a Qwen3-MoE model with random weights, for measuring speed. The vocabulary is another file's.

    pip install gguf
    python tools/make_random_experts.py OUT.gguf --vocab SmolLM2-135M-Instruct.Q4_1.gguf [--type q4_k] [--layers 16] ...

Blocks of quantised matrices are drawn as they are stored: uniform numbers of four bits with one scale, so that rows of
weights have the norm 1 and activations stay in range. The router is of float32, so tokens spread over all experts.
"""

import argparse

import gguf
import numpy as np

arguments = argparse.ArgumentParser()
arguments.add_argument("out")
arguments.add_argument("--vocab", required=True, help="a GGUF file whose tokenizer is copied")
arguments.add_argument("--type", choices=["q4_0", "q4_k"], default="q4_0")
arguments.add_argument("--layers", type=int, default=16)
arguments.add_argument("--hidden", type=int, default=1024)
arguments.add_argument("--experts", type=int, default=64)
arguments.add_argument("--top", type=int, default=8)
arguments.add_argument("--inner", type=int, default=384, help="of an expert; a multiple of 256 for q4_k")
arguments.add_argument("--heads", type=int, default=16)
arguments.add_argument("--kv-heads", type=int, default=4)
arguments.add_argument("--head", type=int, default=64)
options = arguments.parse_args()
rng = np.random.default_rng(1)
TYPE = gguf.GGMLQuantizationType[options.type.upper()]


def blocks(cols, count):
    """`count` blocks of a matrix whose rows have `cols` elements."""
    # Numbers from 0 to 15 around 7.5 have the variance 21.25.
    scale = 1 / np.sqrt(21.25 * cols)
    half = lambda value: np.frombuffer(np.float16(value).tobytes(), np.uint8)
    if options.type == "q4_0":
        out = rng.integers(0, 256, (count, 18), np.uint8)
        out[:, :2] = half(scale)
        return out
    # 256 numbers: scale · 32 · number − minimum · 32, in each of eight parts, whose factors 32 take six bits.
    out = rng.integers(0, 256, (count, 144), np.uint8)
    out[:, :2], out[:, 2:4] = half(scale / 32), half(scale * 7.5 / 32)
    out[:, 4:12], out[:, 12:16] = 0xA0, 0x00
    return out


def matrix(writer, name, *shape):
    size, _ = gguf.GGML_QUANT_SIZES[TYPE]
    count = int(np.prod(shape)) // size
    data = blocks(shape[-1], count)
    writer.add_tensor(name, data.reshape(*shape[:-1], -1), raw_dtype=TYPE)


def copy_vocabulary(writer, path):
    """Copies every field of the tokenizer; returns the number of tokens."""
    reader = gguf.GGUFReader(path)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer.") and "chat_template" not in name:
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    return len(reader.fields["tokenizer.ggml.tokens"].data)


def main():
    writer = gguf.GGUFWriter(options.out, "qwen3moe")
    vocab = copy_vocabulary(writer, options.vocab)
    hidden, experts, inner, head = options.hidden, options.experts, options.inner, options.head
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(options.layers)
    writer.add_feed_forward_length(inner)
    writer.add_expert_feed_forward_length(inner)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(options.top)
    writer.add_head_count(options.heads)
    writer.add_head_count_kv(options.kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    ones = lambda count: np.ones(count, np.float32)
    matrix(writer, "token_embd.weight", vocab, hidden)
    matrix(writer, "output.weight", vocab, hidden)
    writer.add_tensor("output_norm.weight", ones(hidden))
    for layer in range(options.layers):
        name = lambda part: f"blk.{layer}.{part}.weight"
        for norm, count in (("attn", hidden), ("ffn", hidden), ("attn_q", head), ("attn_k", head)):
            writer.add_tensor(name(f"{norm}_norm"), ones(count))
        matrix(writer, name("attn_q"), options.heads * head, hidden)
        matrix(writer, name("attn_k"), options.kv_heads * head, hidden)
        matrix(writer, name("attn_v"), options.kv_heads * head, hidden)
        matrix(writer, name("attn_output"), hidden, options.heads * head)
        router = rng.standard_normal((experts, hidden), np.float32) / np.float32(np.sqrt(hidden))
        writer.add_tensor(name("ffn_gate_inp"), router)
        matrix(writer, name("ffn_gate_exps"), experts, inner, hidden)
        matrix(writer, name("ffn_up_exps"), experts, inner, hidden)
        matrix(writer, name("ffn_down_exps"), experts, hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
