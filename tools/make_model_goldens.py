#!/usr/bin/env python3
"""Makes tiny random checkpoints for every model family and option, with the logits that
`transformers` computes for them (CPU, float32), under crates/model/tests/goldens/.

    python -m venv .venv && .venv/bin/pip install torch transformers safetensors gguf
    .venv/bin/python tools/make_model_goldens.py [CASE...]

Each case is a folder: config.json, model.safetensors (float32), golden.safetensors with
`tokens` (u32) and `logits` (tokens × vocab, float32), newer ones also with `hidden` states and what bfloat16 changes
of the logits in transformers (`bf16_error`); for families with a GGUF architecture of their own also
model.gguf, with the names of the `gguf` package and what its converter does to rows and norms. Seeds are fixed, so a
rerun gives the same files.
"""

import copy
import json
import pathlib
import sys

import gguf
import torch
from safetensors.torch import save_file
from transformers import (
    CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig,
    Glm4Config, Glm4ForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM,
    MistralConfig, MistralForCausalLM, Olmo2Config, Olmo2ForCausalLM, Phi3Config, Phi3ForCausalLM,
    Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM,
)

OUT = pathlib.Path(__file__).resolve().parent.parent / "crates/model/tests/goldens"
BASE = dict(
    vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=32)
CASES = {
    "llama": (LlamaConfig, LlamaForCausalLM, dict(tie_word_embeddings=False)),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, dict(tie_word_embeddings=True)),
    "llama-mha": (LlamaConfig, LlamaForCausalLM, dict(num_key_value_heads=4, tie_word_embeddings=False)),
    "llama-mqa": (LlamaConfig, LlamaForCausalLM, dict(num_key_value_heads=1, tie_word_embeddings=False)),
    "llama-llama3-rope": (LlamaConfig, LlamaForCausalLM, dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama-linear-rope": (LlamaConfig, LlamaForCausalLM, dict(
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0), tie_word_embeddings=False)),
    "smollm2": (LlamaConfig, LlamaForCausalLM, dict(
        hidden_size=48, intermediate_size=128, num_attention_heads=3, num_key_value_heads=1,
        rope_parameters=dict(rope_type="default", rope_theta=100000.0), tie_word_embeddings=True)),
    "mistral-window": (MistralConfig, MistralForCausalLM, dict(sliding_window=8, head_dim=16, tie_word_embeddings=False)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict(tie_word_embeddings=True)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=32, tie_word_embeddings=False)),
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=16, tie_word_embeddings=True)),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, dict(
        num_hidden_layers=3, head_dim=16, sliding_window=8, query_pre_attn_scalar=16, pad_token_id=0,
        attn_logit_softcapping=5.0, final_logit_softcapping=7.0)),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, dict(
        num_hidden_layers=4, head_dim=32, sliding_window=8, query_pre_attn_scalar=32, pad_token_id=0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=10000.0)))),
    "granite": (GraniteConfig, GraniteForCausalLM, dict(
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0,
        tie_word_embeddings=True)),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, dict(
        num_hidden_layers=5, no_rope_layer_interval=4, tie_word_embeddings=True, pad_token_id=0)),
    "phi3": (Phi3Config, Phi3ForCausalLM, dict(
        pad_token_id=0, original_max_position_embeddings=256, sliding_window=8, tie_word_embeddings=False)),
    "phi3-long": (Phi3Config, Phi3ForCausalLM, dict(
        pad_token_id=0, original_max_position_embeddings=16, sliding_window=None, tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
            original_max_position_embeddings=16,
            short_factor=[1.0 + 0.1 * i for i in range(6)], long_factor=[1.5 + 0.7 * i for i in range(6)]))),
    "glm4": (Glm4Config, Glm4ForCausalLM, dict(
        head_dim=16, attention_bias=True, pad_token_id=0, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, dict(pad_token_id=0, tie_word_embeddings=False)),
    "cohere": (CohereConfig, CohereForCausalLM, dict(
        pad_token_id=0, logit_scale=0.25, layer_norm_eps=1e-5, tie_word_embeddings=True)),
}
TOKENS = 40
# Architectures whose converter puts the two halves of each query and key head side by side.
PERMUTED = {"llama", "granite", "smollm3"}
# Architectures whose converter adds 1 to the weights of norms.
PLUS_ONE = {"gemma2", "gemma3"}
GGUF = {
    "gemma2": "gemma2", "gemma3": "gemma3", "granite": "granite", "smollm3": "smollm3", "phi3": "phi3",
    "phi3-long": "phi3", "glm4": "glm4", "olmo2": "olmo2", "cohere": "command-r",
}


def write_gguf(path, architecture, config, state):
    """The checkpoint as llama.cpp's converter would write it."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    w = gguf.GGUFWriter(path, architecture)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters or {}
    full = rope.get("full_attention", rope)
    part = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(dim)
    w.add_value_length(dim)
    w.add_rope_freq_base(full.get("rope_theta", 10000.0))
    w.add_rope_dimension_count(int(dim * part))
    if architecture == "command-r":
        w.add_layer_norm_eps(config.layer_norm_eps)
        w.add_logit_scale(config.logit_scale)
    else:
        w.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        w.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        w.add_attn_logit_softcapping(config.attn_logit_softcapping)
        w.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "gemma3":
        w.add_uint32("gemma3.attention.sliding_window_pattern", 3)
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(full["factor"])
    if architecture == "granite":
        w.add_attention_scale(config.attention_multiplier)
        w.add_embedding_scale(config.embedding_multiplier)
        w.add_residual_scale(config.residual_multiplier)
        w.add_logit_scale(config.logits_scaling)
    if rope.get("rope_type") == "longrope":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for which in ["short", "long"]:
            factors = torch.tensor(rope[f"{which}_factor"], dtype=torch.float32)
            w.add_tensor(f"rope_factors_{which}.weight", factors.numpy())
    for key, value in state.items():
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if architecture in PERMUTED and (".q_proj." in key or ".k_proj." in key):
            n = heads if ".q_proj." in key else kv_heads
            value = value.reshape(n, 2, dim // 2, -1).swapaxes(1, 2).reshape(value.shape)
        if architecture in PLUS_ONE and "norm" in key:
            value = value + 1
        w.add_tensor(name, value.contiguous().numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def bf16_logits(model, tokens):
    """What transformers itself computes in bfloat16, with rotations in float32."""
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    for (_, buffer), (_, exact) in zip(rounded.named_buffers(), model.named_buffers()):
        buffer.data = exact.clone()
    with torch.no_grad():
        return rounded(tokens).logits[0].float()


def main():
    for index, (name, (config_class, model_class, options)) in enumerate(CASES.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        torch.manual_seed(1000 + index)
        config = config_class(**{**BASE, **options}, attn_implementation="eager")
        model = model_class(config).eval().float()
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "norm" in key:
                    value.copy_(1 + 0.3 * torch.randn_like(value))
                else:
                    value.copy_(0.15 * torch.randn_like(value))
        tokens = torch.randint(3, BASE["vocab_size"], (1, TOKENS))
        with torch.no_grad():
            logits = model(tokens).logits[0]
            hidden = model.model(tokens).last_hidden_state[0]
        folder = OUT / name
        folder.mkdir(parents=True, exist_ok=True)
        described = config.to_dict()
        described["architectures"] = [model_class.__name__]
        described["dtype"] = "float32"
        (folder / "config.json").write_text(json.dumps(described, indent=1, sort_keys=True, default=str) + "\n")
        state = {k: v.contiguous() for k, v in model.state_dict().items()
                 if not (config.tie_word_embeddings and k == "lm_head.weight")}
        save_file(state, folder / "model.safetensors")
        golden = {"tokens": tokens[0].to(torch.int32), "logits": logits.float().contiguous()}
        if name in GGUF:
            # Their logits are not always the head of these.
            golden["hidden"] = hidden.float().contiguous()
            golden["bf16_error"] = (bf16_logits(model, tokens) - logits).abs().max().reshape(1)
        save_file(golden, folder / "golden.safetensors")
        if name in GGUF:
            write_gguf(folder / "model.gguf", GGUF[name], config, state)
        print(f"{name}: max |logit| {logits.abs().max():.2f}")


if __name__ == "__main__":
    main()
