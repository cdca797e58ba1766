//! Llama 1 to 3, and everything with its block: SmolLM2, TinyLlama, GGUF files of Mistral and Mixtral.

use super::{Family, mixtral};
use crate::blocks::Dense;
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use device::op::Pairs;
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "llama", gguf: "llama", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    let mut config = ModelConfig::read(f, Defaults { experts: true, ..Defaults::default() })?;
    let experts = f.size("", "expert_count")?.filter(|&n| n > 0);
    if f.is_gguf() {
        // The converter puts the rows of each head in the other order.
        config.pairs = Pairs::Neighbours;
    }
    config.decoder = Arc::new(Dense {
        qkv_bias: f.has_tensor("blk.0.attn_q.bias"),
        head_norms: f.has_tensor("blk.0.attn_q_norm.weight"),
        windows: vec![f.size("", "attention.sliding_window")?.filter(|&n| n > 0); config.layers],
        experts: experts.map(|_| mixtral::experts(f, &config)).transpose()?,
        ..Dense::new(&config, Rope::read_whole(f, config.head_dim)?)
    });
    Ok(config)
}
