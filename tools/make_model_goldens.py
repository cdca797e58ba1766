#!/usr/bin/env python3
"""Makes tiny random checkpoints for every model family and option, with the logits that
`transformers` computes for them (CPU, float32), under crates/model/tests/goldens/.

    python -m venv .venv && .venv/bin/pip install torch transformers safetensors
    .venv/bin/python tools/make_model_goldens.py [CASE...]

Each case is a folder: config.json, model.safetensors (float32), golden.safetensors with
`tokens` (u32) and `logits` (tokens × vocab, float32). Seeds are fixed, so a rerun gives the same files.
"""

import json
import pathlib
import sys

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
        num_hidden_layers=3, head_dim=16, sliding_window=8, query_pre_attn_scalar=24, pad_token_id=0,
        attn_logit_softcapping=5.0, final_logit_softcapping=7.0)),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, dict(
        num_hidden_layers=4, head_dim=32, sliding_window=8, query_pre_attn_scalar=24, pad_token_id=0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=10000.0)))),
    "granite": (GraniteConfig, GraniteForCausalLM, dict(
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0,
        tie_word_embeddings=True)),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, dict(
        num_hidden_layers=4, no_rope_layer_interval=2, tie_word_embeddings=True, pad_token_id=0)),
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
        folder = OUT / name
        folder.mkdir(parents=True, exist_ok=True)
        described = config.to_dict()
        described["architectures"] = [model_class.__name__]
        described["dtype"] = "float32"
        (folder / "config.json").write_text(json.dumps(described, indent=1, sort_keys=True, default=str) + "\n")
        state = {k: v.contiguous() for k, v in model.state_dict().items()
                 if not (config.tie_word_embeddings and k == "lm_head.weight")}
        save_file(state, folder / "model.safetensors")
        save_file({"tokens": tokens[0].to(torch.int32), "logits": logits.float().contiguous()},
                  folder / "golden.safetensors")
        print(f"{name}: max |logit| {logits.abs().max():.2f}")


if __name__ == "__main__":
    main()
