//! Qwen 2 and 2.5: Llama's block with a bias on queries, keys and values.

use super::Family;
use crate::blocks::Dense;
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "qwen2", gguf: "qwen2", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.activation("hidden_act", &["silu"])?;
    let mut config =
        ModelConfig::read(f, Defaults { max_position: 32_768, ..Defaults::default() })?;
    config.decoder = Arc::new(Dense {
        qkv_bias: true,
        head_norms: f.has_tensor("blk.0.attn_q_norm.weight"),
        windows: windows(f, config.layers)?,
        ..Dense::new(&config, Rope::read_whole(f, config.head_dim)?)
    });
    Ok(config)
}

/// The window of each layer: Qwen's configs name one that is used only if `use_sliding_window` is true, and never in
/// the first layers.
pub(super) fn windows(f: &Fields<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    let used = f.is_gguf() || f.bool("use_sliding_window", "")? == Some(true);
    let window = f.size("sliding_window", "attention.sliding_window")?.filter(|&n| used && n > 0);
    let full = match f.is_gguf() {
        true => 0,
        false => f.size("max_window_layers", "")?.unwrap_or(28),
    };
    f.windows(window, layers, |layer| layer >= full)
}
