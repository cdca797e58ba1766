//! Mistral: Llama's block with a window. Its GGUF files call themselves `llama`.

use super::Family;
use crate::blocks::Dense;
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "mistral", gguf: "", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    let mut config =
        ModelConfig::read(f, Defaults { max_position: 131_072, ..Defaults::default() })?;
    // Without the field the window is 4096; null means no window.
    let window = match f.mentions("sliding_window") {
        true => f.size("sliding_window", "")?,
        false => Some(4_096),
    };
    config.decoder = Arc::new(Dense {
        windows: f.windows(window, config.layers, |_| true)?,
        ..Dense::new(&config, Rope::read_whole(f, config.head_dim)?)
    });
    Ok(config)
}
