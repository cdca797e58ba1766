//! Qwen3-Next: gated delta nets, attention with a gated output in every fourth layer, experts with a shared one.

use super::{Family, qwen2_moe, qwen3_moe};
use crate::blocks::delta::{DeltaNet, Inputs};
use crate::blocks::experts::Experts;
use crate::config::{Defaults, Fields, ModelConfig};
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "qwen3_next", gguf: "qwen3next", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    let mut config = ModelConfig::read(f, defaults())?;
    let mut experts = qwen3_moe::experts(f, &config)?;
    experts.routing.renormalise = f.bool("norm_topk_prob", "")?.unwrap_or(true);
    let experts = Experts { shared: Some(qwen2_moe::shared(f, &config)?), ..experts };
    // Older GGUF files have the tensors of published checkpoints.
    let is_joined = (0..config.layers).any(|layer| f.has_tensor(&joined(layer)));
    let inputs = match f.is_gguf() && !is_joined {
        true => Inputs::GroupedGates,
        false => Inputs::Grouped,
    };
    config.decoder = Arc::new(DeltaNet::read(f, &config, inputs, Some(experts))?);
    Ok(config)
}

/// The tensor of everything that a recurrent layer makes of its input, in GGUF files that have one.
fn joined(layer: usize) -> String {
    format!("blk.{layer}.ssm_in.weight")
}

/// What configurations leave out.
pub(super) fn defaults() -> Defaults {
    Defaults { max_position: 32_768, experts: true, head_dim: Some(256), ..Defaults::default() }
}
