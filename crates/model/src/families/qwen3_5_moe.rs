//! Qwen3.5 with experts in every layer, which have tensors of their own or tensors of all of a layer.

use super::{Family, qwen2_moe, qwen3_5, qwen3_next};
use crate::blocks::delta::{DeltaNet, Inputs};
use crate::blocks::experts::{self, Experts};
use crate::builder::{Source, tensor};
use crate::config::{Defaults, Fields, ModelConfig};
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family =
    Family { name: "qwen3_5_moe_text", gguf: "qwen35moe", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    let inner = f.required("moe_intermediate_size", "expert_feed_forward_length")?;
    // No layer has an MLP instead of experts.
    let defaults = Defaults { intermediate: Some(inner), ..qwen3_next::defaults() };
    let mut config = ModelConfig::read(f, defaults)?;
    let sources = match f.has_ending(JOINED) {
        _ if f.is_gguf() => experts::numbered(inner, config.hidden),
        Some(false) => experts::numbered(inner, config.hidden),
        Some(true) | None => joined(inner, config.hidden),
    };
    let all = Experts::read(f, config.layers, experts::router, sources)?;
    let all = Experts { shared: Some(qwen2_moe::shared(f, &config)?), ..all };
    config.root = qwen3_5::ROOT.into();
    config.decoder = Arc::new(DeltaNet::read(f, &config, Inputs::Separate, Some(all))?);
    Ok(config)
}

const JOINED: &str = "mlp.experts.gate_up_proj";

/// Gate, up and down of an expert in tensors of all experts of a layer.
fn joined(inner: usize, hidden: usize) -> [Source; 3] {
    let both = tensor(JOINED, "", 2 * inner).bare();
    let down = tensor("mlp.experts.down_proj", "", hidden).bare();
    [both.part(0, inner), both.part(inner, inner), down]
}
