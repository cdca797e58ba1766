//! Published shapes, kept as the `config.json` files they come from.

use super::{Embedding, ModelConfig, Task};
use formats::{Error, Result};
use graph::program::Pooling;
use std::path::Path;

macro_rules! bundled {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("bundled/", $name, ".json")))),*]
    };
}

const FILES: &[(&str, &str)] = bundled![
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "qwen3-next-80b-a3b",
    "qwen3.5-35b-a3b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "llama-3.2-1b",
    "llama-3.1-8b",
    "bert-base",
    "qwen3-embedding-0.6b",
];

/// Heads that draft for one of these; they are no models of their own.
const HEADS: &[(&str, &str)] = bundled!["qwen3-8b-eagle3"];

/// What sentence-transformers' files say of those that make vectors.
const VECTORS: &[(&str, Embedding)] = &[
    ("bert-base", Embedding { pooling: Pooling::Mean, unit: false }),
    ("qwen3-embedding-0.6b", Embedding { pooling: Pooling::Last, unit: true }),
];

pub(super) fn names() -> impl ExactSizeIterator<Item = &'static str> {
    FILES.iter().map(|(name, _)| *name)
}

pub(super) fn heads() -> impl Iterator<Item = &'static str> {
    HEADS.iter().map(|(name, _)| *name)
}

pub(super) fn json(name: &str) -> Result<&'static str> {
    let found = FILES.iter().chain(HEADS).find(|(known, _)| *known == name);
    found.map(|(_, json)| *json).ok_or_else(|| {
        let known = names().collect::<Vec<_>>().join(", ");
        Error::missing(Path::new(name), format!("bundled config; there are: {known}"))
    })
}

pub(super) fn read(name: &str) -> Result<ModelConfig> {
    let mut config = ModelConfig::from_hf(Path::new(name), json(name)?.as_bytes(), None)?;
    if let Some((_, embedding)) = VECTORS.iter().find(|(known, _)| *known == name) {
        config.task = Task::Embed(*embedding);
    }
    Ok(config)
}
