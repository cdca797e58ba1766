//! Qwen 3 with experts in all layers or in some.

use super::Family;
use crate::blocks::Dense;
use crate::blocks::experts::{self, Experts};
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "qwen3_moe", gguf: "qwen3moe", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.activation("hidden_act", &["silu"])?;
    f.not("attention_bias", "")?;
    f.not("use_sliding_window", "")?;
    let defaults = Defaults { max_position: 32_768, experts: true, ..Defaults::default() };
    let mut config = ModelConfig::read(f, defaults)?;
    let experts = experts(f, &config)?;
    config.decoder = Arc::new(Dense {
        head_norms: true,
        experts: Some(experts.renormalised(f, true)?),
        ..Dense::new(&config, Rope::read_whole(f, config.head_dim)?)
    });
    Ok(config)
}

/// The experts of Qwen 2 and 3.
pub(super) fn experts(f: &Fields<'_>, config: &ModelConfig) -> Result<Experts> {
    let inner = f.required("moe_intermediate_size", "expert_feed_forward_length")?;
    let sources = experts::numbered(inner, config.hidden);
    let all = Experts::read(f, config.layers, experts::router, sources)?;
    Ok(Experts { layers: sparse(f, config.layers)?, ..all })
}

/// Which layers have experts: every n-th one that is not listed as dense. A GGUF file has a router where there are any.
fn sparse(f: &Fields<'_>, layers: usize) -> Result<Vec<bool>> {
    if f.is_gguf() {
        let has = |layer| f.has_tensor(&format!("blk.{layer}.ffn_gate_inp.weight"));
        return Ok((0..layers).map(has).collect());
    }
    let step = f.size("decoder_sparse_step", "")?.unwrap_or(1);
    if step == 0 {
        return Err(f.invalid("decoder_sparse_step", step, "at least 1"));
    }
    let dense = f.numbers("mlp_only_layers", "")?.unwrap_or_default();
    let listed = |layer: usize| dense.contains(&(layer as f64));
    Ok((0..layers).map(|layer| (layer + 1).is_multiple_of(step) && !listed(layer)).collect())
}
