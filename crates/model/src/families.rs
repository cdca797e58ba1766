//! Model families, one file each: the configuration fields it reads, its weights with the checkpoint tensors they
//! come from, and its program. What several families share is in `crate::blocks`.
//!
//! To add a family: write its file, and name it in the list below.

use crate::Builder;
use crate::config::{Fields, ModelConfig, Rope};
use formats::Result;
use graph::program::ValueId;
use std::fmt::Debug;

/// A model family.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// The `model_type` of `config.json`, and its name everywhere else.
    pub name: &'static str,
    /// The architecture name in GGUF files; empty if it has none of its own.
    pub gguf: &'static str,
    /// Whether every token sees those after it: it makes vectors, not text.
    pub encodes: bool,
    /// Reads a configuration.
    pub read: fn(&Fields<'_>) -> Result<ModelConfig>,
}

/// A family's part of a model: what differs from the numbers that every decoder has.
pub trait Decoder: Debug + Send + Sync {
    /// Its rotations, each of them used by some layer.
    fn ropes(&self) -> Vec<Rope>;

    /// Writes the program down.
    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>);

    /// Whether a tensor that no weight is made of may be left unread.
    fn ignores(&self, _tensor: &str) -> bool {
        false
    }

    /// The layer of the model's own that predicts further tokens, from `x` to what its norm reads, or, where it is only `fed`, as far
    /// as its keys and values. `None` if it is Llama's block.
    fn next_layer(
        &self,
        _config: &ModelConfig,
        _b: &mut Builder<'_>,
        _x: ValueId,
        _fed: bool,
    ) -> Option<ValueId> {
        None
    }

    /// Whether checkpoints store the weights of norms over the residual stream less 1.
    fn norms_less_one(&self) -> bool {
        false
    }
}

macro_rules! families {
    ($($family:ident),* $(,)?) => {
        $(mod $family;)*

        /// Every family, in the order of messages.
        const FAMILIES: &[Family] = &[$($family::FAMILY),*];
    };
}

families![
    llama,
    mistral,
    qwen2,
    qwen3,
    gemma2,
    gemma3,
    granite,
    smollm3,
    phi3,
    glm4,
    olmo2,
    cohere,
    qwen3_moe,
    qwen2_moe,
    mixtral,
    olmoe,
    granitemoe,
    granitemoeshared,
    gpt_oss,
    deepseek_v2,
    deepseek_v3,
    qwen3_next,
    qwen3_5,
    qwen3_5_moe,
    nemotron_h,
    granitemoehybrid,
    bert,
    roberta,
    xlm_roberta,
    modernbert,
    nomic_bert,
];

/// Models that see images, too: their text part, a configuration of its own, is what is read.
const WITH_IMAGES: [&str; 2] = ["qwen3_5", "qwen3_5_moe"];

/// GGUF architectures that are another one with experts.
const WITH_EXPERTS: [(&str, &str); 1] = [("nemotron_h_moe", "nemotron_h")];

/// Fields of the whole that its text part may leave out.
const COMMON: [&str; 7] = [
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
];

/// The names of all families.
pub fn names() -> impl ExactSizeIterator<Item = &'static str> {
    FAMILIES.iter().map(|family| family.name)
}

/// The names of families that make vectors only.
pub fn encoders() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().filter(|family| family.encodes).map(|family| family.name)
}

/// The configuration of a model of any family.
pub(crate) fn read(f: &Fields<'_>, generation: Option<&Fields<'_>>) -> Result<ModelConfig> {
    let text = match WITH_IMAGES.contains(&f.family()?.1) {
        true => f.object("text_config")?.map(|text| text.completed(f, &COMMON)),
        false => None,
    };
    let f = text.as_ref().unwrap_or(f);
    let (field, name) = f.family()?;
    let plain = WITH_EXPERTS.iter().find(|(with, _)| f.is_gguf() && *with == name);
    let name = plain.map_or(name, |(_, plain)| *plain);
    let of = |family: &&Family| if f.is_gguf() { family.gguf } else { family.name };
    let Some(family) = FAMILIES.iter().find(|family| of(family) == name && !name.is_empty()) else {
        let known: Vec<&str> =
            FAMILIES.iter().map(|family| of(&family)).filter(|n| !n.is_empty()).collect();
        return Err(f.unsupported(field, name, known.join(", ")));
    };
    (family.read)(f)?.finish(family, f, generation)
}
