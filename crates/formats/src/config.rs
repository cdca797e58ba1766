//! The shape of a dense decoder, from `config.json`, GGUF metadata or a bundled file.

mod bundled;
mod from_gguf;
mod from_hf;
mod rope;

use crate::checkpoint::{Checkpoint, read_capped};
use crate::dtype::DType;
use crate::{Error, Result, limits};
pub use rope::{Rope, RopeScaling};
use std::path::Path;

/// The model families that Dacapo builds programs for. SmolLM2 is a Llama.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

impl Family {
    /// The `model_type` of Hugging Face configs.
    pub fn name(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
        }
    }

    /// The family of that [`Family::name`].
    pub fn parse(name: &str) -> Option<Self> {
        [Family::Llama, Family::Mistral, Family::Qwen2, Family::Qwen3]
            .into_iter()
            .find(|family| family.name() == name)
    }
}

/// How the model's authors suggest to sample. `None` where they say nothing.
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

/// Everything about a dense decoder that is not a weight. Every number has been checked against
/// [`limits`] and against the others.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which program builder this is for.
    pub family: Family,
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
    /// Epsilon of every RMS norm.
    pub rms_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Longest context the model was made for.
    pub max_position: usize,
    /// Whether the output head is the embedding.
    pub tied: bool,
    /// Whether query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether queries and keys are normed per head.
    pub qk_norm: bool,
    /// How far back windowed layers look, in tokens.
    pub sliding_window: Option<usize>,
    /// The first layers that ignore `sliding_window`; see [`ModelConfig::window`].
    pub full_attention_layers: usize,
    /// Begin-of-sequence token.
    pub bos: Option<u32>,
    /// Tokens that end an answer, most usual first.
    pub eos: Vec<u32>,
    /// Padding token.
    pub pad: Option<u32>,
    /// The type the weights were trained or stored in.
    pub dtype: DType,
    /// Suggested sampling.
    pub sampling: SamplingDefaults,
}

impl ModelConfig {
    /// The configuration of an open checkpoint: from its metadata when it is GGUF, from
    /// `config.json` and `generation_config.json` beside it otherwise.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint.gguf() {
            Some(_) => from_gguf::read(checkpoint),
            None => Self::from_folder(checkpoint.folder()),
        }
    }

    /// The configuration in the `config.json` (and `generation_config.json`) of a folder.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let config = read_capped(&path, limits::CONFIG_BYTES)?;
        let generation = folder.join("generation_config.json");
        if !generation.is_file() {
            return Self::from_hf(&path, &config, None);
        }
        let bytes = read_capped(&generation, limits::CONFIG_BYTES)?;
        Self::from_hf(&path, &config, Some((&generation, &bytes)))
    }

    /// The configuration in the bytes of a `config.json`, with those of a
    /// `generation_config.json` on top: its end-of-sequence list wins and it alone suggests
    /// sampling. Paths are for error messages.
    pub fn from_hf(path: &Path, config: &[u8], generation: Option<(&Path, &[u8])>) -> Result<Self> {
        from_hf::read(path, config, generation)
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

    /// How far back `layer` looks; `None` is the whole context.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window.filter(|_| layer >= self.full_attention_layers)
    }

    /// Width of the query projection.
    pub fn q_width(&self) -> usize {
        self.q_heads * self.head_dim
    }

    /// Width of the key projection, and of the value projection.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Checks every number against its cap and against the others, and drops token ids that the
    /// vocabulary does not have.
    fn checked(mut self, file: &Path) -> Result<Self> {
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
        within("longest position", self.max_position, limits::POSITIONS)?;
        within("query heads × head size", self.q_width(), limits::WIDTH)?;
        if let Some(window) = self.sliding_window {
            within("sliding window", window, limits::POSITIONS)?;
        }
        if !self.q_heads.is_multiple_of(self.kv_heads) {
            let allowed = format!("a divisor of the {} query heads", self.q_heads);
            return Err(Error::invalid(file, 0, "key-value heads", self.kv_heads, allowed));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::invalid(file, 0, "head size", self.head_dim, "an even number"));
        }
        if !(self.rms_eps > 0.0 && self.rms_eps < 1.0) {
            return Err(Error::invalid(file, 0, "norm epsilon", self.rms_eps, "between 0 and 1"));
        }
        self.rope.check(file, self.head_dim)?;
        let vocab = self.vocab as u64;
        let known = |id: &u32| u64::from(*id) < vocab;
        self.bos = self.bos.filter(known);
        self.pad = self.pad.filter(known);
        self.eos.retain(known);
        self.eos.truncate(limits::EOS_IDS);
        Ok(self)
    }
}
