"""The GGUF files of model families whose tensors llama.cpp's converter changes most: hybrids and DeepSeek. What is written
here was compared with what the converter writes of the same checkpoints: fields of the architecture, and tensors bit for
bit. Used by make_model_goldens.py."""

import re

import gguf
import torch

MAMBA = {"granitehybrid", "nemotron_h", "nemotron_h_moe"}
DELTA = {"qwen3next", "qwen35", "qwen35moe"}
ARCHITECTURES = MAMBA | DELTA | {"deepseek2"}


def usual_fields(w, architecture, config):
    """What all architectures have."""
    w.add_block_count(config.num_hidden_layers)
    w.add_context_length(2**20 if architecture in MAMBA else config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    if not architecture.startswith("nemotron"):
        w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        w.add_rope_freq_base(rope["rope_theta"])
    eps = getattr(config, "layer_norm_epsilon", None)
    w.add_layer_norm_rms_eps(eps if eps is not None else config.rms_norm_eps)


def chosen(w, count, config):
    w.add_expert_count(count)
    w.add_expert_used_count(config.num_experts_per_tok)


def mamba_fields(w, architecture, config):
    kinds = config.layer_types
    attends = [kind == "full_attention" for kind in kinds]
    w.add_head_count_kv([config.num_key_value_heads if yes else 0 for yes in attends])
    w.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    w.add_vocab_size(config.vocab_size)
    granite = architecture == "granitehybrid"
    heads, dim = (config.mamba_n_heads, config.mamba_d_head) if granite else (config.mamba_num_heads, config.mamba_head_dim)
    w.add_ssm_conv_kernel(config.mamba_d_conv if granite else config.conv_kernel)
    w.add_ssm_state_size(config.mamba_d_state if granite else config.ssm_state_size)
    w.add_ssm_group_count(config.mamba_n_groups if granite else config.n_groups)
    w.add_ssm_inner_size(heads * dim)
    w.add_ssm_time_step_rank(heads)
    # The converter says so of every hybrid; a file that says yes is read, too.
    w.add_rope_scaling_finetuned(granite and config.position_embedding_type == "rope")
    if granite:
        chosen(w, config.num_local_experts, config)
        w.add_attention_scale(config.attention_multiplier)
        w.add_embedding_scale(config.embedding_multiplier)
        w.add_residual_scale(config.residual_multiplier)
        w.add_logit_scale(config.logits_scaling)
        w.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        return
    w.add_layer_norm_eps(config.layer_norm_epsilon)
    w.add_key_length(config.head_dim)
    w.add_value_length(config.head_dim)
    experts = architecture == "nemotron_h_moe"
    kind, width = ("moe", config.moe_intermediate_size) if experts else ("mlp", config.intermediate_size)
    w.add_feed_forward_length([width if other == kind else 0 for other in kinds])
    if experts:
        chosen(w, config.n_routed_experts, config)
        w.add_expert_feed_forward_length(config.moe_intermediate_size)
        w.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        w.add_expert_shared_count(config.n_shared_experts)
        w.add_expert_weights_norm(config.norm_topk_prob)
        w.add_expert_weights_scale(config.routed_scaling_factor)
        w.add_expert_group_count(config.n_group)
        w.add_expert_group_used_count(config.topk_group)
        if config.moe_latent_size is not None:
            w.add_moe_latent_size(config.moe_latent_size)


def delta_fields(w, architecture, config):
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_key_length(config.head_dim)
    w.add_value_length(config.head_dim)
    w.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    w.add_ssm_state_size(config.linear_key_head_dim)
    w.add_ssm_group_count(config.linear_num_key_heads)
    w.add_ssm_time_step_rank(config.linear_num_value_heads)
    w.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    w.add_full_attention_interval(4)
    w.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if architecture != "qwen3next":
        w.add_rope_dimension_sections([11, 11, 10, 0])
    if architecture != "qwen35":
        chosen(w, config.num_experts, config)
        w.add_expert_feed_forward_length(config.moe_intermediate_size)
        w.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def latent_fields(w, config, joined):
    """`joined`: as before keys and values were taken apart."""
    rope, third = config.rope_parameters, config.model_type == "deepseek_v3"
    rotated = config.qk_rope_head_dim
    whole = config.qk_nope_head_dim + rotated
    if joined:
        w.add_head_count_kv(config.num_key_value_heads)
        w.add_key_length(whole)
        w.add_value_length(config.v_head_dim)
    else:
        w.add_head_count_kv(1)
        w.add_key_length(config.kv_lora_rank + rotated)
        w.add_value_length(config.kv_lora_rank)
        w.add_key_length_mla(whole)
        w.add_value_length_mla(config.v_head_dim)
    w.add_leading_dense_block_count(config.first_k_dense_replace)
    w.add_vocab_size(config.vocab_size)
    if config.q_lora_rank is not None:
        w.add_q_lora_rank(config.q_lora_rank)
    w.add_kv_lora_rank(config.kv_lora_rank)
    chosen(w, config.n_routed_experts, config)
    w.add_expert_feed_forward_length(config.moe_intermediate_size)
    w.add_expert_shared_count(config.n_shared_experts)
    w.add_expert_weights_scale(config.routed_scaling_factor)
    kind = gguf.ExpertGatingFuncType.SIGMOID if third else gguf.ExpertGatingFuncType.SOFTMAX
    w.add_expert_gating_func(kind)
    if third:
        w.add_expert_weights_norm(config.norm_topk_prob)
        w.add_expert_group_count(config.n_group)
        w.add_expert_group_used_count(config.topk_group)
    w.add_rope_dimension_count(rotated)
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(rope["factor"])
    w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    w.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    w.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    # Files have nothing else of the two, so the other must be the same.
    assert rope["mscale"] == rope["mscale_all_dim"]
    w.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def experts_together(state):
    """Experts of a layer in one tensor, under the names of the map."""
    merged = {}
    for key, value in state.items():
        one = re.match(r".*\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", key)
        if one:
            layer, index, which = one.groups()
            merged.setdefault(f"model.layers.{layer}.mlp.experts.{which}.weight", {})[int(index)] = value
        else:
            merged[key] = value
    return {key: torch.stack([value[i] for i in range(len(value))]) if isinstance(value, dict) else value
            for key, value in merged.items()}


def of_mamba(architecture, config, key, value):
    granite = architecture == "granitehybrid"
    if key.endswith(".A_log"):
        value = -torch.exp(value)
    if key.endswith((".A_log", ".D")):
        value = value.reshape(-1, 1)
    elif key.endswith(".dt_bias"):
        key = key.removesuffix("_bias") + ("_proj.bias" if granite else ".bias")
    elif key.endswith("conv1d.weight"):
        value = value.squeeze(1)
    elif key.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        value = value.reshape(config.mamba_n_groups if granite else config.n_groups, -1)
    elif key.endswith("e_score_correction_bias"):
        key = key.removesuffix("_bias") + ".bias"
    elif key.endswith((".q_proj.weight", ".k_proj.weight")):
        n = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
        value = value.reshape(n, 2, value.shape[0] // n // 2, -1).swapaxes(1, 2).reshape(value.shape)
    elif key.endswith("_linear.weight"):
        layer = key.split(".")[2]
        if "shared_mlp" in key:
            end = "_shexp" if config.num_local_experts else ""
        else:
            end = "_exps"
        if ".output_linear." in key:
            return [(f"blk.{layer}.ffn_down{end}.weight", value)]
        gate, up = value.chunk(2, dim=-2)
        return [(f"blk.{layer}.ffn_gate{end}.weight", gate), (f"blk.{layer}.ffn_up{end}.weight", up)]
    return [(key, value)]


def in_turns(config, value, dim, each):
    """Heads of values, which are in groups, so that groups take turns."""
    groups = config.linear_num_key_heads
    share = config.linear_num_value_heads // groups
    parts = value.unflatten(dim, (groups, share, each))
    return parts.transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()


def of_delta(architecture, config, key, value):
    heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    keys, layer = groups * key_dim, key.split(".")[2] if ".layers." in key else None
    if key.endswith("conv1d.weight"):
        value = value.squeeze(1)
    if architecture != "qwen3next" and ".linear_attn." in key:
        if key.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            value = torch.cat([value[:2 * keys], in_turns(config, value[2 * keys:], 0, value_dim)])
        elif key.endswith("in_proj_z.weight"):
            value = in_turns(config, value, 0, value_dim)
        elif key.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
            value = in_turns(config, value, 0, 1)
        elif key.endswith("out_proj.weight"):
            value = in_turns(config, value, 1, value_dim)
    if key.endswith("A_log"):
        value = -torch.exp(value)
    elif key.endswith("dt_bias"):
        key = key.removesuffix("_bias") + "_proj.bias"
    elif key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        value = value + 1
    elif key.endswith("in_proj_qkvz.weight"):
        share = heads // groups * value_dim
        q, k, v, z = value.unflatten(0, (groups, -1)).split([key_dim, key_dim, share, share], dim=1)
        qkv = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
        return [(f"blk.{layer}.attn_qkv.weight", qkv), (f"blk.{layer}.attn_gate.weight", z.flatten(0, 1))]
    return [(key, value)]


def of_latent(config, key, value, joined):
    if key.endswith("e_score_correction_bias"):
        key = key.removesuffix("_bias") + ".bias"
    if joined or not key.endswith("kv_b_proj.weight"):
        return [(key, value)]
    still, heads = config.qk_nope_head_dim, config.num_attention_heads
    k, v = value.unflatten(0, (heads, -1)).split([still, config.v_head_dim], dim=1)
    return [(key.replace("kv_b", "k_b"), k.transpose(1, 2)), (key.replace("kv_b", "v_b"), v)]


def write(path, architecture, config, state, joined=False):
    """The checkpoint as llama.cpp's converter writes it, or, `joined`, as it wrote DeepSeek before keys and values were
    taken apart."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    w = gguf.GGUFWriter(path, architecture)
    usual_fields(w, architecture, config)
    if architecture in MAMBA:
        mamba_fields(w, architecture, config)
    elif architecture in DELTA:
        delta_fields(w, architecture, config)
    else:
        latent_fields(w, config, joined)
    for key, value in experts_together(state).items():
        key = key.replace("model.language_model.", "model.")
        if architecture in MAMBA:
            changed = of_mamba(architecture, config, key, value)
        elif architecture in DELTA:
            changed = of_delta(architecture, config, key, value)
        else:
            changed = of_latent(config, key, value, joined)
        for key, value in changed:
            name = key if key.startswith("blk.") else names.get_name(key, try_suffixes=(".weight", ".bias"))
            assert name is not None, key
            w.add_tensor(name, value.contiguous().numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
