//! SmolLM3: Llama's block, with every fourth layer not rotated.

use super::Family;
use crate::blocks::Dense;
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use device::op::Pairs;
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "smollm3", gguf: "smollm3", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    f.not("use_sliding_window", "")?;
    let defaults = Defaults { max_position: 32_768, tied: true, ..Defaults::default() };
    let mut config = ModelConfig::read(f, defaults)?;
    if f.is_gguf() {
        // The converter puts the rows of each head in the other order.
        config.pairs = Pairs::Neighbours;
    }
    let every = f.size("no_rope_layer_interval", "")?.unwrap_or(4).max(1);
    // 1 marks a layer that is rotated.
    let listed = f.numbers("no_rope_layers", "")?.filter(|list| !list.is_empty());
    if let Some(list) = listed.as_ref().filter(|list| list.len() != config.layers) {
        return Err(f.invalid("no_rope_layers", list.len(), format!("{} entries", config.layers)));
    }
    let rotated = (0..config.layers).map(|layer| match &listed {
        Some(list) => list[layer] != 0.0,
        None => (layer + 1) % every != 0,
    });
    config.decoder = Arc::new(Dense {
        rotated: rotated.collect(),
        windows: f.windows(None, config.layers, |_| false)?,
        ..Dense::new(&config, Rope::read_whole(f, config.head_dim)?)
    });
    Ok(config)
}
