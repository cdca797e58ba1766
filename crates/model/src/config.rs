//! A model's configuration from its files: the numbers that every decoder has, and the family's own.

mod bundled;
mod fields;
mod read;
mod rope;
mod task;

pub use fields::Fields;
pub use read::Defaults;
pub(crate) use rope::tensor as small_tensor;
pub use rope::{Rope, RopeScaling};
pub use task::{Classes, Embedding, Task};

use crate::families::{self, Decoder};
use device::op::Pairs;
use formats::checkpoint::{Checkpoint, read_capped};
use formats::dtype::DType;
use formats::{Error, Result, limits};
use std::path::Path;
use std::sync::Arc;

/// How the model's authors suggest to sample. `None` where they suggest nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct SamplingDefaults {
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

/// What an EAGLE-3 head has besides a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadConfig {
    /// Tokens that it can draft.
    pub vocab: usize,
    /// The layers of its model whose inputs it reads; `None` is the usual choice.
    pub taps: Option<Vec<u32>>,
    /// Whether its residual stream starts behind the norm of what it reads.
    pub norm_first: bool,
}

/// Everything about a decoder that is not a weight. Every number has been checked against [`limits`] and against
/// the others.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// The family's name.
    pub family: &'static str,
    /// The family's own numbers, and its program.
    pub decoder: Arc<dyn Decoder>,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key and value heads; divides `q_heads`.
    pub kv_heads: usize,
    /// Elements of one head; even.
    pub head_dim: usize,
    /// Rows of the embedding, which may be more than the tokenizer's tokens.
    pub vocab: usize,
    /// Kinds of tokens. Token `id` of kind `k` is given as `id + k · vocab`.
    pub token_types: usize,
    /// Epsilon of every norm.
    pub norm_eps: f32,
    /// Longest context the model was made for.
    pub max_position: usize,
    /// Whether the output head is the embedding.
    pub tied: bool,
    /// Which elements of a head the checkpoint's rows of queries and keys rotate together.
    pub pairs: Pairs,
    /// Whether tensors have their GGUF names.
    pub gguf: bool,
    /// What the names of its tensors in other checkpoints begin with.
    pub root: String,
    /// What is between that and the number of a layer.
    pub layer_names: &'static str,
    /// What it is for.
    pub task: Task,
    /// What it has as a head that drafts.
    pub head: Option<HeadConfig>,
    /// The names of a classifier's labels.
    pub labels: Vec<String>,
    /// Begin-of-sequence token.
    pub bos: Option<u32>,
    /// Tokens that end an answer, most usual first.
    pub eos: Vec<u32>,
    /// Padding token.
    pub pad: Option<u32>,
    /// The type the weights were trained or stored in.
    pub dtype: DType,
    /// The type of experts that the configuration names, if it is not that of other weights.
    pub expert_dtype: Option<device::DType>,
    /// Suggested sampling.
    pub sampling: SamplingDefaults,
}

impl ModelConfig {
    /// The configuration of an open checkpoint: from its metadata when it is GGUF, from
    /// `config.json` and `generation_config.json` beside it otherwise.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint.gguf() {
            Some(gguf) => families::read(&Fields::gguf(checkpoint, gguf)?, None),
            None => {
                let mut config = Self::read_folder(checkpoint.folder(), Some(checkpoint))?;
                // Checkpoints of a text part by itself have less in front, those of a model without a head nothing.
                let has = |root: &&str| checkpoint.tensors().any(|t| t.name.starts_with(*root));
                let root = [&*config.root, "model."].into_iter().find(has).unwrap_or_default();
                config.root = root.to_owned();
                Ok(config)
            }
        }
    }

    /// The configuration in the `config.json` (and `generation_config.json`) of a folder.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        Self::read_folder(folder, None)
    }

    fn read_folder(folder: &Path, checkpoint: Option<&Checkpoint>) -> Result<Self> {
        let path = folder.join("config.json");
        let config = read_capped(&path, limits::CONFIG_BYTES)?;
        let generation = folder.join("generation_config.json");
        let bytes = match generation.is_file() {
            true => Some(read_capped(&generation, limits::CONFIG_BYTES)?),
            false => None,
        };
        let generation =
            bytes.as_deref().map(|bytes| Fields::json(&generation, bytes)).transpose()?;
        let fields = Fields::json(&path, &config)?.beside(checkpoint);
        let mut config = families::read(&fields, generation.as_ref())?;
        task::apply(&mut config, folder)?;
        Ok(config)
    }

    /// The configuration in the bytes of a `config.json`, with those of a
    /// `generation_config.json` on top: its end-of-sequence list wins and it alone suggests
    /// sampling. Paths are for error messages.
    pub fn from_hf(path: &Path, config: &[u8], generation: Option<(&Path, &[u8])>) -> Result<Self> {
        let generation = generation.map(|(path, bytes)| Fields::json(path, bytes)).transpose()?;
        families::read(&Fields::json(path, config)?, generation.as_ref())
    }

    /// A published shape by name, for benchmarks with dummy weights.
    pub fn bundled(name: &str) -> Result<Self> {
        bundled::read(name)
    }

    /// The file behind [`ModelConfig::bundled`], as published.
    pub fn bundled_json(name: &str) -> Result<&'static str> {
        bundled::json(name)
    }

    /// The names [`ModelConfig::bundled`] knows.
    pub fn bundled_names() -> impl ExactSizeIterator<Item = &'static str> {
        bundled::names()
    }

    /// The names of heads that [`ModelConfig::bundled`] knows, too.
    pub fn bundled_heads() -> impl Iterator<Item = &'static str> {
        bundled::heads()
    }

    /// Width of the query projection.
    pub(crate) fn q_width(&self) -> usize {
        self.q_heads * self.head_dim
    }

    /// Width of the key projection, and of the value projection.
    pub(crate) fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Checks every number against its cap and against the others, and drops token ids that the
    /// vocabulary does not have.
    pub(crate) fn checked(mut self, file: &Path) -> Result<Self> {
        let within = |field: &str, found: usize, cap: u64| {
            if found == 0 || found as u64 > cap {
                return Err(Error::invalid(file, 0, field, found, format!("1 to {cap}")));
            }
            Ok(())
        };
        within("hidden size", self.hidden, limits::WIDTH)?;
        within("intermediate size", self.intermediate, limits::WIDTH)?;
        within("layers", self.layers, limits::LAYERS)?;
        within("query heads", self.q_heads, limits::HEADS)?;
        within("key-value heads", self.kv_heads, limits::HEADS)?;
        within("head size", self.head_dim, limits::HEAD_DIM)?;
        within("vocabulary size", self.vocab, limits::VOCAB)?;
        within("token types", self.token_types, limits::TOKEN_TYPES)?;
        within("longest position", self.max_position, limits::POSITIONS)?;
        within("query heads × head size", self.q_width(), limits::WIDTH)?;
        if !self.q_heads.is_multiple_of(self.kv_heads) {
            let allowed = format!("a divisor of the {} query heads", self.q_heads);
            return Err(Error::invalid(file, 0, "key-value heads", self.kv_heads, allowed));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::invalid(file, 0, "head size", self.head_dim, "an even number"));
        }
        if !(self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return Err(Error::invalid(file, 0, "norm epsilon", self.norm_eps, "between 0 and 1"));
        }
        let vocab = self.vocab as u64;
        let known = |id: &u32| u64::from(*id) < vocab;
        self.bos = self.bos.filter(known);
        self.pad = self.pad.filter(known);
        self.eos.retain(known);
        self.eos.truncate(limits::EOS_IDS);
        Ok(self)
    }
}
