#!/usr/bin/env python3
"""Makes tiny random checkpoints for every model family and option, with the logits that
`transformers` computes for them (CPU, float32), under crates/model/tests/goldens/.

    python -m venv .venv && .venv/bin/pip install torch transformers safetensors gguf
    .venv/bin/python tools/make_model_goldens.py [CASE...]

Each case is a folder: config.json, model.safetensors (float32), golden.safetensors with
`tokens` (u32) and `logits` (tokens × vocab, float32), newer ones also with `hidden` states and what bfloat16 changes
of the logits in transformers (`bf16_error`). Those with experts have what each layer's router chose (`choices`: layers
with experts × tokens × top, best first), and what bfloat16 changes of logits (`bf16_forced`) and of router logits
(`bf16_router`) when the same experts are chosen as in float32. For families with a GGUF architecture of their own there is also
model.gguf, with the names of the `gguf` package and what its converter does to rows and norms. Seeds are fixed, so a
rerun gives the same files.

Models with experts are saved by `transformers` under the names of published checkpoints. One of them is also
stored as quantised GGUF files (model-q4_0.gguf, model-q8_0.gguf), with what `transformers` computes from the
dequantised weights (golden-q4_0.safetensors, …). `router.safetensors`
beside the folder has inputs of DeepSeek-V3's router and what it chooses.
"""

import copy
import json
import pathlib
import re
import sys
import tempfile
from unittest import mock

import gguf
import gguf_forms
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CohereConfig, CohereForCausalLM, DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig,
    Glm4Config, Glm4ForCausalLM, GptOssConfig, GptOssForCausalLM, GraniteConfig, GraniteForCausalLM, GraniteMoeConfig, GraniteMoeForCausalLM,
    GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM,
    LlamaConfig, LlamaForCausalLM, NemotronHConfig, NemotronHForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig,
    Qwen3NextForCausalLM, MistralConfig, MistralForCausalLM, MixtralConfig, MixtralForCausalLM, Olmo2Config,
    Olmo2ForCausalLM, OlmoeConfig, OlmoeForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM,
    Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM,
    SmolLM3Config, SmolLM3ForCausalLM,
)
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

OUT = pathlib.Path(__file__).resolve().parent.parent / "crates/model/tests/goldens"
BASE = dict(
    vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=32)
LATENT = dict(
    hidden_size=32, intermediate_size=32, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=8,
    rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.7,
        original_max_position_embeddings=32))
# As in all published models: GGUF files cannot say otherwise.
SAME_SCALES = dict(rope_parameters=LATENT["rope_parameters"] | dict(mscale=0.7))
DELTA = dict(
    hidden_size=48, intermediate_size=32, num_hidden_layers=3, head_dim=16,
    layer_types=["linear_attention", "linear_attention", "full_attention"], linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=8, linear_conv_kernel_dim=4,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))
MAMBA = dict(
    hidden_size=32, mamba_n_heads=8, mamba_n_groups=1, mamba_d_state=16, mamba_d_head=8, mamba_d_conv=4,
    mamba_expand=2, mamba_chunk_size=16, embedding_multiplier=2.0, attention_multiplier=0.3, residual_multiplier=0.6,
    logits_scaling=3.0)
NEMOTRON_EXPERTS = dict(
    hidden_size=32, intermediate_size=48, head_dim=16, num_hidden_layers=4, mamba_num_heads=4, mamba_head_dim=8,
    ssm_state_size=16, n_groups=2, conv_kernel=4, chunk_size=16, moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=40)
VISION = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, temporal_patch_size=1, out_hidden_size=48,
    num_position_embeddings=16)
GPT_OSS = dict(
    head_dim=16, intermediate_size=32, sliding_window=8, tie_word_embeddings=False,
    rope_parameters=dict(
        rope_type="yarn", rope_theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
        original_max_position_embeddings=32))


def qwen35_with_images(attn_implementation, **text):
    """The configuration of a model that sees images, too; some fields of its text part stand beside that part."""
    tied = text.pop("tie_word_embeddings")
    text["rope_parameters"] = text["rope_parameters"] | dict(mrope_section=[2, 1, 1], mrope_interleaved=True)
    return Qwen3_5MoeConfig(text_config=text, vision_config=VISION, tie_word_embeddings=tied, attn_implementation=attn_implementation)


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
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, dict(
        head_dim=32, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True,
        tie_word_embeddings=False)),
    # Experts in layer 1 only: layer 3 is named as dense, the others are by the step.
    "qwen3-moe-mixed": (Qwen3MoeConfig, Qwen3MoeForCausalLM, dict(
        num_hidden_layers=4, head_dim=16, num_experts=36, num_experts_per_tok=8, moe_intermediate_size=8,
        norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[3], tie_word_embeddings=True)),
    "qwen2-moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, dict(
        num_experts=10, num_experts_per_tok=4, moe_intermediate_size=24, shared_expert_intermediate_size=40,
        norm_topk_prob=False, tie_word_embeddings=False)),
    "qwen2-moe-mixed": (Qwen2MoeConfig, Qwen2MoeForCausalLM, dict(
        num_experts=7, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=48,
        norm_topk_prob=True, mlp_only_layers=[0], tie_word_embeddings=True)),
    "mixtral": (MixtralConfig, MixtralForCausalLM, dict(
        intermediate_size=32, num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=False)),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, dict(
        intermediate_size=16, num_experts=16, num_experts_per_tok=4, norm_topk_prob=False, pad_token_id=0,
        tie_word_embeddings=False)),
    "granite-moe": (GraniteMoeConfig, GraniteMoeForCausalLM, dict(
        intermediate_size=16, num_local_experts=40, num_experts_per_tok=8, embedding_multiplier=3.0,
        attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0, tie_word_embeddings=True)),
    "granite-moe-shared": (GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM, dict(
        intermediate_size=16, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=40,
        embedding_multiplier=2.0, attention_multiplier=0.3, residual_multiplier=0.6, logits_scaling=3.0,
        tie_word_embeddings=False)),
    "deepseek-v2": (DeepseekV2Config, DeepseekV2ForCausalLM, dict(
        **LATENT | SAME_SCALES, q_lora_rank=None, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=8,
        n_shared_experts=2, first_k_dense_replace=1, tie_word_embeddings=True)),
    "deepseek-v2-groups": (DeepseekV2Config, DeepseekV2ForCausalLM, dict(
        **LATENT, num_hidden_layers=1, q_lora_rank=24, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=8,
        n_shared_experts=1, first_k_dense_replace=0, n_group=4, topk_group=2, topk_method="group_limited_greedy",
        routed_scaling_factor=2.5, tie_word_embeddings=False)),
    "deepseek-v3": (DeepseekV3Config, DeepseekV3ForCausalLM, dict(
        **LATENT | SAME_SCALES, num_hidden_layers=1, q_lora_rank=16, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=8, n_shared_experts=1, first_k_dense_replace=0, n_group=4, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=1.5, tie_word_embeddings=True)),
    "qwen3-next": (Qwen3NextConfig, Qwen3NextForCausalLM, dict(
        **DELTA, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=16,
        tie_word_embeddings=False)),
    # The last layer is recurrent.
    "qwen3-next-last": (Qwen3NextConfig, Qwen3NextForCausalLM, {
        **DELTA, "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"],
        "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3, "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
        "mlp_only_layers": [0], "tie_word_embeddings": True}),
    "nemotron-h": (NemotronHConfig, NemotronHForCausalLM, dict(
        hidden_size=32, intermediate_size=48, head_dim=16, num_hidden_layers=5, mamba_num_heads=6, mamba_head_dim=8,
        ssm_state_size=16, n_groups=2, conv_kernel=4, chunk_size=16,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"])),
    "granite-hybrid": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, dict(
        **MAMBA, num_hidden_layers=3, intermediate_size=16, num_local_experts=5, num_experts_per_tok=2,
        shared_intermediate_size=40, layer_types=["linear_attention", "full_attention", "linear_attention"],
        tie_word_embeddings=True)),
    "granite-hybrid-dense": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, dict(
        **MAMBA, intermediate_size=16, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=24,
        layer_types=["linear_attention", "full_attention"], position_embedding_type="rope",
        tie_word_embeddings=False)),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM, dict(
        **GPT_OSS, num_hidden_layers=3, num_local_experts=6, num_experts_per_tok=2)),
    # The text part of a checkpoint by itself; the last layer is recurrent.
    "qwen3-5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {
        **DELTA, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "tie_word_embeddings": True}),
    "qwen3-5-moe": (qwen35_with_images, Qwen3_5MoeForConditionalGeneration, dict(
        **DELTA, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=16,
        tie_word_embeddings=False)),
    "qwen3-5-moe-text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {
        **DELTA, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
        "tie_word_embeddings": True}),
    "nemotron-h-moe": (NemotronHConfig, NemotronHForCausalLM, dict(
        **NEMOTRON_EXPERTS, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=8,
        num_experts_per_tok=3, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5)),
    # Experts of shorter vectors.
    "nemotron-h-latent": (NemotronHConfig, NemotronHForCausalLM, dict(
        **NEMOTRON_EXPERTS, layers_block_type=["moe", "full_attention", "linear_attention"], n_routed_experts=6,
        num_experts_per_tok=2, n_group=2, topk_group=2, moe_latent_size=16, norm_topk_prob=False,
        routed_scaling_factor=1.5)),
}
# Published with tensors of all experts of a layer, though transformers saves one for each.
JOINED = {"qwen3-5-moe"}
TOKENS = 40
# Architectures whose converter puts the two halves of each query and key head side by side.
PERMUTED = {"llama", "granite", "smollm3", "granitemoe"}
# Architectures whose converter adds 1 to the weights of norms.
PLUS_ONE = {"gemma2", "gemma3"}
GGUF = {
    "gemma2": "gemma2", "gemma3": "gemma3", "granite": "granite", "smollm3": "smollm3", "phi3": "phi3",
    "phi3-long": "phi3", "glm4": "glm4", "olmo2": "olmo2", "cohere": "command-r", "qwen3-moe": "qwen3moe",
    "qwen2-moe": "qwen2moe", "mixtral": "llama", "olmoe": "olmoe", "granite-moe": "granitemoe",
    "granite-moe-shared": "granitemoe", "gpt-oss": "gpt-oss", "deepseek-v2": "deepseek2", "deepseek-v3": "deepseek2",
    "qwen3-next": "qwen3next", "nemotron-h": "nemotron_h", "nemotron-h-moe": "nemotron_h_moe",
    "nemotron-h-latent": "nemotron_h_moe",
    "granite-hybrid": "granitehybrid", "granite-hybrid-dense": "granitehybrid", "qwen3-5": "qwen35",
    "qwen3-5-moe-text": "qwen35moe",
}
# Cases with a second GGUF file in an older form: model-old.gguf.
OLD_GGUF = {"deepseek-v2"}
# Cases whose hidden states and bfloat16 error are stored, beside those with GGUF files.
MEASURED = set(GGUF) | {"qwen3-moe-mixed", "qwen2-moe-mixed", "deepseek-v2-groups", "qwen3-5-moe", "qwen3-next-last"}
QUANTISED = {
    "qwen3-moe": {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0},
    "gpt-oss": {"mxfp4": gguf.GGMLQuantizationType.MXFP4},
}


def expert_count(config):
    config = config.get_text_config()
    return getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0


def published(model):
    """The tensors under the names of published checkpoints, which for experts are not those of the module."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(pathlib.Path(folder) / "model.safetensors")


def stacked(architecture, config, state):
    """Experts as llama.cpp's converter stores them: one tensor for all of a layer."""
    merged = {}
    for key, value in state.items():
        one = re.match(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", key)
        if one:
            prefix, index, which = one.groups()
            layer = prefix.split(".")[2]
            name = f"{prefix}.experts.{which}.weight"
            if architecture == "llama":
                name = f"layers.{layer}.feed_forward.experts.{which}.weight"
            merged.setdefault(name, {})[int(index)] = value
        elif key.endswith("block_sparse_moe.input_linear.weight"):
            layer = key.split(".")[2]
            gate, up = value.split(config.intermediate_size, dim=1)
            merged[f"blk.{layer}.ffn_gate_exps.weight"] = gate
            merged[f"blk.{layer}.ffn_up_exps.weight"] = up
        elif key.endswith("shared_mlp.input_linear.weight"):
            layer = key.split(".")[2]
            gate, up = value.split(config.shared_intermediate_size, dim=0)
            merged[f"blk.{layer}.ffn_gate_shexp.weight"] = gate
            merged[f"blk.{layer}.ffn_up_shexp.weight"] = up
        elif ".mlp.experts." in key and architecture == "gpt-oss":
            # Gate and up take turns, and matrices are turned.
            layer, which = key.split(".")[2], key.rsplit(".", 1)[1]
            kind = "bias" if which.endswith("_bias") else "weight"
            value = value if kind == "bias" else value.transpose(1, 2)
            if which.startswith("gate_up_proj"):
                merged[f"blk.{layer}.ffn_gate_exps.{kind}"] = value[:, ::2]
                merged[f"blk.{layer}.ffn_up_exps.{kind}"] = value[:, 1::2]
            else:
                merged[f"blk.{layer}.ffn_down_exps.{kind}"] = value
        elif key.endswith("shared_expert_gate.weight"):
            merged[key] = value[0]
        else:
            merged[key] = value
    return {key: torch.stack([value[i] for i in range(len(value))]) if isinstance(value, dict) else value
            for key, value in merged.items()}


def write_gguf(path, architecture, config, state, quantised=None):
    """The checkpoint as llama.cpp's converter would write it. With `quantised` matrices but the router are of that
    type; returns what they then hold."""
    if architecture in gguf_forms.ARCHITECTURES:
        return gguf_forms.write(path, architecture, config, state)
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
    if expert_count(config):
        w.add_expert_count(expert_count(config))
        w.add_expert_used_count(config.num_experts_per_tok)
        state = stacked(architecture, config, state)
    if getattr(config, "moe_intermediate_size", None):
        w.add_expert_feed_forward_length(config.moe_intermediate_size)
    shared = getattr(config, "shared_expert_intermediate_size", getattr(config, "shared_intermediate_size", None))
    if shared:
        w.add_expert_shared_feed_forward_length(shared)
    if getattr(config, "sliding_window", None):
        w.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        w.add_attn_logit_softcapping(config.attn_logit_softcapping)
        w.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "gemma3":
        w.add_uint32("gemma3.attention.sliding_window_pattern", 3)
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(full["factor"])
    if architecture in ("granite", "granitemoe"):
        w.add_attention_scale(config.attention_multiplier)
        w.add_embedding_scale(config.embedding_multiplier)
        w.add_residual_scale(config.residual_multiplier)
        w.add_logit_scale(config.logits_scaling)
    if rope.get("rope_type") == "longrope":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for which in ["short", "long"]:
            factors = torch.tensor(rope[f"{which}_factor"], dtype=torch.float32)
            w.add_tensor(f"rope_factors_{which}.weight", factors.numpy())
    if architecture == "gpt-oss":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        w.add_expert_feed_forward_length(config.intermediate_size)
    held = {}
    for key, value in state.items():
        key += ".weight" if key.endswith("sinks") else ""
        name = key if key.startswith("blk.") else names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        if architecture in PERMUTED and (".q_proj." in key or ".k_proj." in key):
            n = heads if ".q_proj." in key else kv_heads
            value = value.reshape(n, 2, dim // 2, -1).swapaxes(1, 2).reshape(value.shape)
        if architecture in PLUS_ONE and "norm" in key:
            value = value + 1
        value = value.contiguous().numpy()
        # Of gpt-oss the matrices of experts only.
        takes = "_exps.weight" in name if architecture == "gpt-oss" else value.ndim > 1 and "ffn_gate_inp" not in name
        if quantised is not None and takes:
            stored = gguf.quants.quantize(value, quantised)
            held[key] = torch.from_numpy(gguf.quants.dequantize(stored, quantised).reshape(value.shape).copy())
            w.add_tensor(name, stored, raw_dtype=quantised)
        else:
            w.add_tensor(name, value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return held


def set_weights(model, held):
    """Puts weights, experts stacked, back into the module, which has gate and up in one tensor."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for key, value in held.items():
            if key.startswith("blk."):
                _, layer, which, _ = key.split(".")
                experts = f"model.layers.{layer}.mlp.experts."
                if which == "ffn_down_exps":
                    parameters[experts + "down_proj"].copy_(value.transpose(1, 2))
                else:
                    parameters[experts + "gate_up_proj"][:, :, int(which == "ffn_up_exps")::2].copy_(value.transpose(1, 2))
                continue
            prefix, _, which = key.removesuffix(".weight").rpartition(".")
            if prefix.endswith(".experts") and which != "down_proj":
                both = parameters[f"{prefix}.gate_up_proj"]
                half = both.shape[1] // 2
                both[:, :half].copy_(value) if which == "gate_proj" else both[:, half:].copy_(value)
            else:
                parameters[key.removesuffix(".weight") if prefix.endswith(".experts") else key].copy_(value)


def write_quantised(folder, name, config, model, state, tokens):
    """The case in quantised GGUF files, each with what transformers computes from its weights."""
    for label, kind in QUANTISED[name].items():
        held = write_gguf(folder / f"model-{label}.gguf", GGUF[name], config, state, kind)
        rounded = copy.deepcopy(model)
        set_weights(rounded, held)
        with torch.no_grad():
            logits = rounded(tokens).logits[0]
        golden = {"tokens": tokens[0].to(torch.int32), "logits": logits.float().contiguous()}
        save_file(golden, folder / f"golden-{label}.safetensors")


def in_bf16(model):
    """The model in bfloat16, with rotations in float32."""
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    for (_, buffer), (_, exact) in zip(rounded.named_buffers(), model.named_buffers()):
        buffer.data = exact.clone()
    return rounded


def bf16_logits(model, tokens):
    """What transformers itself computes in bfloat16."""
    with torch.no_grad():
        return in_bf16(model)(tokens).logits[0].float()


def routers_of(model):
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def routed(model, tokens, forced=None):
    """The model's logits, those of its routers, and the experts they choose: by themselves, or `forced`."""
    router_logits, chosen, topk = [], [], torch.topk

    def choose(scores, k, dim=-1, **options):
        if scores.shape[-1] != expert_count(model.config):
            return topk(scores, k, dim=dim)  # groups of experts
        ids = topk(scores, k, dim=dim).indices if forced is None else forced[len(chosen)]
        chosen.append(ids)
        return scores.gather(-1, ids), ids

    def before(router, inputs):
        x = inputs[0].float().reshape(-1, inputs[0].shape[-1])
        bias = getattr(router, "bias", None)
        router_logits.append(x @ router.weight.float().t() + (0.0 if bias is None else bias.float()))

    routers = routers_of(model)
    hooks = [router.register_forward_pre_hook(before) for router in routers]
    with torch.no_grad(), mock.patch("torch.topk", choose), mock.patch("torch.Tensor.topk", choose):
        logits = model(tokens).logits[0].float()
    [hook.remove() for hook in hooks]
    assert len(chosen) == len(routers) > 0
    return logits, torch.stack(router_logits), torch.stack(chosen)


def decisions(model, tokens):
    """What the routers choose, and what bfloat16 changes when they choose the same."""
    logits, scores, choices = routed(model, tokens)
    rounded_logits, rounded_scores, _ = routed(in_bf16(model), tokens, choices)
    return {
        "choices": choices.to(torch.int32).contiguous(),
        "bf16_forced": (rounded_logits - logits).abs().max().reshape(1),
        "bf16_router": (rounded_scores - scores).abs().max().reshape(1),
    }


def main():
    for index, (name, (config_class, model_class, options)) in enumerate(CASES.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        torch.manual_seed(1000 + index)
        config = config_class(**{**BASE, **options}, attn_implementation="eager")
        model = model_class(config).eval().float()
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "conv1d" in key:
                    value.copy_(0.5 * torch.randn_like(value))
                elif key.endswith("A_log"):
                    # Half-lives of a few tokens to a few dozen.
                    value.copy_(torch.randn_like(value) - 2)
                elif "norm" in key and config.model_type.startswith(("qwen3_next", "qwen3_5")) and "linear_attn" not in key and "visual" not in key:
                    value.copy_(0.3 * torch.randn_like(value))  # what is added to 1
                elif "norm" in key:
                    value.copy_(1 + 0.3 * torch.randn_like(value))
                elif key.endswith("sinks"):
                    value.copy_(torch.randn_like(value))
                elif re.search(r"((mlp|mixer)\.gate|router)\.weight$", key):
                    # Wider than other weights: few tokens are nearly undecided between experts.
                    value.copy_(0.25 * torch.randn_like(value))
                else:
                    value.copy_(0.15 * torch.randn_like(value))
        for key, value in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                value.copy_(0.1 * torch.randn_like(value))
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
        weights = published(model) if expert_count(config) and name not in JOINED else model.state_dict()
        state = {k: v.contiguous() for k, v in weights.items()
                 if not (config.tie_word_embeddings and k == "lm_head.weight")}
        save_file(state, folder / "model.safetensors")
        golden = {"tokens": tokens[0].to(torch.int32), "logits": logits.float().contiguous()}
        if name in MEASURED:
            # Their logits are not always the head of these.
            golden["hidden"] = hidden.float().contiguous()
            golden["bf16_error"] = (bf16_logits(model, tokens) - logits).abs().max().reshape(1)
        if routers_of(model):
            golden |= decisions(model, tokens)
        save_file(golden, folder / "golden.safetensors")
        if name in GGUF:
            write_gguf(folder / "model.gguf", GGUF[name], config, state)
        if name in OLD_GGUF:
            gguf_forms.write(folder / "model-old.gguf", GGUF[name], config, state, joined=True)
        if name in QUANTISED:
            write_quantised(folder, name, config, model, state, tokens)
        print(f"{name}: max |logit| {logits.abs().max():.2f}")


def as_mxfp4(weights):
    """Rows of matrices in blocks of 32: two of the nearest elements to a byte, and the exponents of blocks."""
    parts = weights.unflatten(-1, (-1, 32))
    exponent = parts.abs().amax(-1, keepdim=True).clamp(min=2.0**-100).log2().floor() - 2
    values = torch.tensor(FP4_VALUES)
    codes = (parts / 2**exponent).unsqueeze(-1).sub(values).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponent.squeeze(-1) + 127).to(torch.uint8)


def write_mxfp4():
    """gpt-oss as published: experts in MXFP4, everything else in bfloat16. Weights are what transformers dequantises. The
    limit is so low that some gates reach it, which GGUF files could not say."""
    torch.manual_seed(2100)
    config = GptOssConfig(**{
        **BASE, **GPT_OSS, "num_hidden_layers": 2, "num_local_experts": 5, "num_experts_per_tok": 3,
        "intermediate_size": 64, "swiglu_limit": 1.5}, attn_implementation="eager")
    model = GptOssForCausalLM(config).eval().float()
    state = {}
    with torch.no_grad():
        for key, value in model.named_parameters():
            wide = 1.0 if key.endswith("sinks") else 0.25 if key.endswith("router.weight") else 0.15
            value.copy_((1 + 0.3 * torch.randn_like(value) if "norm" in key else wide * torch.randn_like(value)).bfloat16())
            if key.endswith(("gate_up_proj", "down_proj")):
                blocks, scales = as_mxfp4(value.transpose(1, 2))
                value.copy_(convert_moe_packed_tensors(blocks, scales))
                state |= {f"{key}_blocks": blocks.contiguous(), f"{key}_scales": scales.contiguous()}
            else:
                state[key] = value.bfloat16().contiguous()
    tokens = torch.randint(3, BASE["vocab_size"], (1, TOKENS))
    with torch.no_grad():
        logits = model(tokens).logits[0]
        hidden = model.model(tokens).last_hidden_state[0]
    folder = OUT / "gpt-oss-mxfp4"
    folder.mkdir(parents=True, exist_ok=True)
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    described = config.to_dict() | dict(
        architectures=["GptOssForCausalLM"], dtype="bfloat16",
        quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=ignored))
    (folder / "config.json").write_text(json.dumps(described, indent=1, sort_keys=True, default=str) + "\n")
    save_file(state, folder / "model.safetensors")
    golden = {"tokens": tokens[0].to(torch.int32), "logits": logits.float().contiguous(), "hidden": hidden.float().contiguous()}
    golden["bf16_error"] = (bf16_logits(model, tokens) - logits).abs().max().reshape(1)
    save_file(golden | decisions(model, tokens), folder / "golden.safetensors")
    print(f"gpt-oss-mxfp4: max |logit| {logits.abs().max():.2f}")


def write_router():
    """What DeepSeek-V3's router chooses, with options of it and of its relatives."""
    torch.manual_seed(2000)
    options = [  # experts, top, groups, kept, renormalised, scaling
        (64, 8, 8, 4, True, 2.5), (48, 6, 1, 1, True, 1.0), (40, 5, 4, 2, False, 1.5), (256, 8, 8, 4, True, 2.5)]
    golden = {}
    for case, (experts, top, groups, kept, renormalise, scaling) in enumerate(options):
        config = DeepseekV3Config(
            hidden_size=32, n_routed_experts=experts, num_experts_per_tok=top, n_group=groups, topk_group=kept,
            norm_topk_prob=renormalise, routed_scaling_factor=scaling)
        router = DeepseekV3TopkRouter(config).eval()
        with torch.no_grad():
            router.weight.copy_(0.3 * torch.randn_like(router.weight))
            router.e_score_correction_bias.copy_(0.2 * torch.randn(experts))
            x = torch.randn(50, 32)
            logits, weights, ids = router(x)
        # Theirs are in no stated order; ours are by score, best first.
        score = logits.sigmoid().gather(1, ids) + router.e_score_correction_bias[ids]
        order = score.argsort(dim=1, descending=True)
        options = torch.tensor([experts, top, groups, kept, renormalise, scaling])
        for key, value in dict(options=options, x=x, w=router.weight.data, bias=router.e_score_correction_bias,
                               ids=ids.gather(1, order), weights=weights.gather(1, order)).items():
            golden[f"{case}.{key}"] = value.float().contiguous()
    save_file(golden, OUT.parent / "router.safetensors")


if __name__ == "__main__":
    main()
    if not sys.argv[1:] or "router" in sys.argv[1:]:
        write_router()
    if not sys.argv[1:] or "gpt-oss-mxfp4" in sys.argv[1:]:
        write_mxfp4()
