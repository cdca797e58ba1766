//! Qwen 1.5 and 2 with experts, and one that every token goes through, weighed by a sigmoid.

use super::{Family, qwen3_moe};
use crate::blocks::Dense;
use crate::blocks::experts::{Experts, Shared, SharedWeight};
use crate::builder::tensor;
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use formats::{Result, limits};
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "qwen2_moe", gguf: "qwen2moe", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.activation("hidden_act", &["silu"])?;
    f.not("use_sliding_window", "")?;
    let defaults = Defaults { max_position: 32_768, experts: true, ..Defaults::default() };
    let mut config = ModelConfig::read(f, defaults)?;
    let all = qwen3_moe::experts(f, &config)?.renormalised(f, false)?;
    let experts = Experts { shared: Some(shared(f, &config)?), ..all };
    config.decoder = Arc::new(Dense {
        qkv_bias: f.bool("qkv_bias", "")?.unwrap_or(true),
        experts: Some(experts),
        ..Dense::new(&config, Rope::read_whole(f, config.head_dim)?)
    });
    Ok(config)
}

/// An expert that every token goes through, weighed by a sigmoid.
pub(super) fn shared(f: &Fields<'_>, config: &ModelConfig) -> Result<Shared> {
    let (json, gguf) = ("shared_expert_intermediate_size", "expert_shared_feed_forward_length");
    let inner = f.required(json, gguf)?;
    if !(1..=limits::WIDTH as usize).contains(&inner) {
        return Err(f.invalid(json, inner, format!("1 to {}", limits::WIDTH)));
    }
    let sources = [
        tensor("mlp.shared_expert.gate_proj", "ffn_gate_shexp", inner),
        tensor("mlp.shared_expert.up_proj", "ffn_up_shexp", inner),
        tensor("mlp.shared_expert.down_proj", "ffn_down_shexp", config.hidden),
    ];
    let gate = tensor("mlp.shared_expert_gate", "ffn_gate_inp_shexp", config.hidden);
    Ok(Shared { sources, weight: SharedWeight::Sigmoid(gate) })
}
