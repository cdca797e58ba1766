//! Qwen3.5: the layers of Qwen3-Next with an MLP, and a tensor for each input of recurrent layers.

use super::{Family, qwen3_next};
use crate::blocks::delta::{DeltaNet, Inputs};
use crate::config::{Fields, ModelConfig};
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "qwen3_5_text", gguf: "qwen35", encodes: false, read };

/// What is in front of the names of the text part of a model that sees images, too.
pub(super) const ROOT: &str = "model.language_model.";

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    let mut config = ModelConfig::read(f, qwen3_next::defaults())?;
    config.root = ROOT.into();
    config.decoder = Arc::new(DeltaNet::read(f, &config, Inputs::Separate, None)?);
    Ok(config)
}
