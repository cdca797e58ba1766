//! Mixtral: Llama's block with experts in every layer. Its GGUF files call themselves `llama`.

use super::Family;
use crate::blocks::Dense;
use crate::blocks::experts::Experts;
use crate::builder::{Source, tensor};
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "mixtral", gguf: "", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.activation("hidden_act", &["silu"])?;
    let defaults = Defaults { max_position: 131_072, experts: true, ..Defaults::default() };
    let mut config = ModelConfig::read(f, defaults)?;
    let window = f.size("sliding_window", "")?;
    config.decoder = Arc::new(Dense {
        windows: f.windows(window, config.layers, |_| true)?,
        experts: Some(experts(f, &config)?),
        ..Dense::new(&config, Rope::read_whole(f, config.head_dim)?)
    });
    Ok(config)
}

/// Its experts, which are as wide as an MLP would be.
pub(super) fn experts(f: &Fields<'_>, config: &ModelConfig) -> Result<Experts> {
    let inner = f.size("", "expert_feed_forward_length")?.filter(|&n| n > 0);
    let inner = inner.unwrap_or(config.intermediate);
    let sources = [
        tensor("block_sparse_moe.experts.{}.w1", "ffn_gate_exps", inner),
        tensor("block_sparse_moe.experts.{}.w3", "ffn_up_exps", inner),
        tensor("block_sparse_moe.experts.{}.w2", "ffn_down_exps", config.hidden),
    ];
    Experts::read(f, config.layers, router, sources)
}

fn router(experts: usize) -> Source {
    tensor("block_sparse_moe.gate", "ffn_gate_inp", experts)
}
