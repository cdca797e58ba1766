//! The numbers that every decoder has, from `config.json` (before and since transformers 5) or GGUF metadata.

use super::{Fields, HeadConfig, ModelConfig, SamplingDefaults, Task};
use crate::families::{Decoder, Family};
use device::op::Pairs;
use formats::dtype::DType;
use formats::gguf::Gguf;
use formats::{Error, Result, limits};
use std::sync::Arc;

/// Texts of control tokens that end a turn in the families we run. GGUF stores one
/// end-of-sequence id, while chat models have two or three.
const TURN_ENDS: [&str; 9] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
];

/// A family's defaults for fields that its configs may leave out.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    /// The longest context.
    pub max_position: usize,
    /// Elements of a head; `None` is hidden size / query heads.
    pub head_dim: Option<usize>,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// The names of the norm's epsilon.
    pub norm_eps: (&'static str, &'static str),
    /// Whether the family reads experts.
    pub experts: bool,
    /// Width of the MLP; `None`: configurations say.
    pub intermediate: Option<usize>,
    /// Whether the family reads the sizes of keys and values itself.
    pub latent: bool,
}

impl Default for Defaults {
    fn default() -> Defaults {
        let norm_eps = ("rms_norm_eps", "attention.layer_norm_rms_epsilon");
        Defaults {
            max_position: 2_048,
            head_dim: None,
            tied: false,
            norm_eps,
            experts: false,
            intermediate: None,
            latent: false,
        }
    }
}

impl ModelConfig {
    /// Reads the numbers that every decoder has; the family gives the rest.
    pub fn read(f: &Fields<'_>, defaults: Defaults) -> Result<ModelConfig> {
        refuse_other_weights(f, defaults.experts)?;
        let q_heads = f.required("num_attention_heads", "attention.head_count")?;
        let hidden = f.required("hidden_size", "embedding_length")?;
        let [key, value] = match defaults.latent {
            true => [""; 2],
            false => ["attention.key_length", "attention.value_length"],
        };
        let head_dim = f.size("head_dim", key)?.or(defaults.head_dim);
        let head_dim = head_dim.unwrap_or(hidden / q_heads.max(1));
        if let Some(found) = f.size("", value)?.filter(|&n| n != head_dim) {
            let allowed = format!("{head_dim}, the head size");
            return Err(f.unsupported("attention.value_length", found, allowed));
        }
        let kv_heads = f.size_in_layers("num_key_value_heads", "attention.head_count_kv")?;
        let longest = f.size("max_position_embeddings", "context_length")?;
        let eps = f.number(defaults.norm_eps.0, defaults.norm_eps.1)?.unwrap_or(1e-6) as f32;
        let tied = match f.is_gguf() {
            true => !f.has_tensor("output.weight"),
            false => f.bool("tie_word_embeddings", "")?.unwrap_or(defaults.tied),
        };
        let config = ModelConfig {
            family: "",
            decoder: Arc::new(NoDecoder),
            hidden,
            intermediate: intermediate(f, defaults.intermediate)?,
            layers: layers(f)?,
            q_heads,
            kv_heads: kv_heads.unwrap_or(q_heads),
            head_dim,
            vocab: vocab(f)?,
            norm_eps: eps,
            max_position: longest.unwrap_or(defaults.max_position),
            tied,
            pairs: Pairs::Halves,
            token_types: 1,
            gguf: f.is_gguf(),
            root: "model.".into(),
            layer_names: "layers",
            task: Task::Generate,
            head: head(f)?,
            labels: Vec::new(),
            bos: token(f, "bos")?,
            eos: match f.metadata() {
                Some(gguf) => turn_ends(f, gguf)?,
                None => f.ids("eos_token_id")?,
            },
            pad: token(f, "pad")?,
            dtype: dtype(f)?,
            expert_dtype: None,
            sampling: f.metadata().map_or(Ok(SamplingDefaults::default()), gguf_sampling)?,
        };
        // Check these first: families allocate lists of these lengths.
        config.checked(f.file())
    }

    /// Applies a `generation_config.json` and checks everything.
    pub(crate) fn finish(
        mut self,
        family: &Family,
        f: &Fields<'_>,
        generation: Option<&Fields<'_>>,
    ) -> Result<ModelConfig> {
        // Where files call several families the same, the reader has said which.
        if self.family.is_empty() {
            self.family = family.name;
        }
        if let Some((classes, labels)) = super::task::classes(f)? {
            (self.task, self.labels) = (Task::Classify(classes), labels);
        }
        if let Some(generation) = generation {
            self.apply_generation(generation)?;
        }
        let config = self.checked(f.file())?;
        for rope in config.decoder.ropes() {
            rope.check(f.file(), config.head_dim)?;
        }
        Ok(config)
    }

    fn apply_generation(&mut self, f: &Fields<'_>) -> Result<()> {
        let eos = f.ids("eos_token_id")?;
        if !eos.is_empty() {
            self.eos = eos;
        }
        self.bos = f.ids("bos_token_id")?.first().copied().or(self.bos);
        self.pad = f.ids("pad_token_id")?.first().copied().or(self.pad);
        let float = |key| Ok::<_, Error>(f.number(key, "")?.map(|x| x as f32));
        self.sampling = SamplingDefaults {
            do_sample: f.bool("do_sample", "")?,
            temperature: float("temperature")?,
            top_p: float("top_p")?,
            top_k: f.size("top_k", "")?.map(|k| k.min(u32::MAX as usize) as u32),
            min_p: float("min_p")?,
            repetition_penalty: float("repetition_penalty")?,
        };
        Ok(())
    }
}

/// Width of the MLP.
fn intermediate(f: &Fields<'_>, usual: Option<usize>) -> Result<usize> {
    let (json, gguf) = ("intermediate_size", "feed_forward_length");
    match f.size_in_layers(json, gguf)?.or(usual) {
        Some(width) => Ok(width),
        None => f.required(json, gguf),
    }
}

/// Layers of the model: GGUF files count those that draft tokens, too, which come last.
fn layers(f: &Fields<'_>) -> Result<usize> {
    let (all, drafting) = (f.required("num_hidden_layers", "block_count")?, "nextn_predict_layers");
    let more = f.size("", drafting)?.unwrap_or(0);
    match all.checked_sub(more).filter(|&layers| layers > 0 || more == 0) {
        Some(layers) => Ok(layers),
        None => Err(f.invalid(&f.called("", drafting), more, format!("fewer than {all}"))),
    }
}

/// A placeholder until the family's own numbers are read.
#[derive(Debug)]
struct NoDecoder;

impl Decoder for NoDecoder {
    fn ropes(&self) -> Vec<super::Rope> {
        Vec::new()
    }

    fn build(&self, _: &ModelConfig, _: &mut crate::Builder<'_>) {}
}

/// The fields of an EAGLE-3 head, if it is one.
fn head(f: &Fields<'_>) -> Result<Option<HeadConfig>> {
    let Some(vocab) = f.size("draft_vocab_size", "")? else { return Ok(None) };
    if vocab == 0 || vocab as u64 > limits::VOCAB {
        return Err(f.invalid("draft_vocab_size", vocab, format!("1 to {}", limits::VOCAB)));
    }
    const TAPS: &str = "eagle_aux_hidden_state_layer_ids";
    let taps = match f.object("eagle_config")? {
        Some(own) if own.mentions(TAPS) => own.numbers(TAPS, "")?,
        _ => f.numbers(TAPS, "")?,
    };
    let layer = |id: &f64| (id.fract() == 0.0 && (0.0..1e6).contains(id)).then_some(*id as u32);
    let taps = match taps {
        None => None,
        Some(ids) => {
            let layers: Option<Vec<u32>> = ids.iter().map(layer).collect();
            let few = layers.filter(|layers| (1..=8).contains(&layers.len()));
            let wrong = || f.invalid(TAPS, format!("{ids:?}"), "1 to 8 layers");
            Some(few.ok_or_else(wrong)?)
        }
    };
    let norm_first = f.bool("norm_before_residual", "")?.unwrap_or(false);
    Ok(Some(HeadConfig { vocab, taps, norm_first }))
}

fn refuse_other_weights(f: &Fields<'_>, experts: bool) -> Result<()> {
    match f.size("", "expert_count")?.filter(|&n| n > 0 && !experts) {
        Some(count) => Err(f.unsupported("expert_count", count, "0")),
        None => Ok(()),
    }
}

/// Rows of the embedding: a GGUF file need not name the vocabulary's size.
fn vocab(f: &Fields<'_>) -> Result<usize> {
    let Some(gguf) = f.metadata() else { return f.required("vocab_size", "") };
    let embed = f.checkpoint().and_then(|checkpoint| checkpoint.get("token_embd.weight"));
    if let Some(&rows) = embed.and_then(|tensor| tensor.shape.first()) {
        return Ok(rows);
    }
    match f.size("", "vocab_size")? {
        Some(size) => Ok(size),
        None => Ok(gguf.array("tokenizer.ggml.tokens")?.map_or(0, formats::gguf::Array::len)),
    }
}

fn dtype(f: &Fields<'_>) -> Result<DType> {
    if let Some(checkpoint) = f.checkpoint() {
        return Ok(checkpoint.get("token_embd.weight").map_or(DType::F32, |tensor| tensor.dtype));
    }
    let name = match f.text("dtype", "")? {
        Some(name) => Some(name),
        None => f.text("torch_dtype", "")?,
    };
    match name {
        None | Some("float32") => Ok(DType::F32),
        Some("bfloat16") => Ok(DType::BF16),
        Some("float16") => Ok(DType::F16),
        Some(other) => Err(f.unsupported("torch_dtype", other, "float32, bfloat16, float16")),
    }
}

fn token(f: &Fields<'_>, which: &str) -> Result<Option<u32>> {
    let Some(gguf) = f.metadata() else {
        return Ok(f.ids(&format!("{which}_token_id"))?.first().copied());
    };
    let which = if which == "pad" { "padding" } else { which };
    // Writers use u32::MAX for "none".
    let id = gguf.uint(&format!("tokenizer.ggml.{which}_token_id"))?;
    Ok(id.and_then(|id| u32::try_from(id).ok()).filter(|&id| id != u32::MAX))
}

fn turn_ends(f: &Fields<'_>, gguf: &Gguf) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for which in ["eos", "eot", "eom"] {
        ids.extend(token(f, which)?);
    }
    let kinds = gguf.array("tokenizer.ggml.token_type")?;
    for (id, text) in gguf.strings("tokenizer.ggml.tokens")?.unwrap_or_default().iter().enumerate()
    {
        let control = kinds.and_then(|kinds| kinds.int(id)) == Some(3);
        if control && TURN_ENDS.contains(&text.as_str()) {
            ids.push(id as u32);
        }
    }
    let mut seen = std::collections::HashSet::new();
    ids.retain(|id| seen.insert(*id));
    Ok(ids)
}

fn gguf_sampling(gguf: &Gguf) -> Result<SamplingDefaults> {
    let float = |key: &str| {
        Ok::<_, Error>(gguf.float(&format!("general.sampling.{key}"))?.map(|x| x as f32))
    };
    Ok(SamplingDefaults {
        do_sample: None,
        temperature: float("temp")?,
        top_p: float("top_p")?,
        top_k: gguf.uint("general.sampling.top_k")?.and_then(|k| u32::try_from(k).ok()),
        min_p: float("min_p")?,
        repetition_penalty: float("penalty_repeat")?,
    })
}
