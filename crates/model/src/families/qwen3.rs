//! Qwen 3: Llama's block with norms on the heads of queries and keys.

use super::{Family, qwen2};
use crate::blocks::Dense;
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "qwen3", gguf: "qwen3", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    let head_dim = Some(128).filter(|_| !f.is_gguf());
    let defaults = Defaults { max_position: 32_768, head_dim, ..Defaults::default() };
    let mut config = ModelConfig::read(f, defaults)?;
    config.decoder = Arc::new(Dense {
        qkv_bias: f.has_tensor("blk.0.attn_q.bias"),
        head_norms: true,
        windows: qwen2::windows(f, config.layers)?,
        ..Dense::new(&config, Rope::read_whole(f, config.head_dim)?)
    });
    Ok(config)
}
