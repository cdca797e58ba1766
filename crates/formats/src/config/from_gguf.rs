//! GGUF metadata of the `llama`, `qwen2` and `qwen3` architectures.

use super::{Family, ModelConfig, Rope, RopeScaling, SamplingDefaults};
use crate::checkpoint::Checkpoint;
use crate::dtype::DType;
use crate::gguf::Gguf;
use crate::tensor_names::Role;
use crate::{Error, Result};

/// Texts of control tokens that end a turn in the families we run. GGUF stores one
/// end-of-sequence id, while chat models have two or three.
const TURN_ENDS: [&str; 7] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<end_of_turn>",
];

pub(super) fn read(checkpoint: &Checkpoint) -> Result<ModelConfig> {
    let gguf = checkpoint.gguf().expect("the caller has seen the header");
    let file = gguf.file();
    let architecture = gguf.str("general.architecture")?.unwrap_or("nothing");
    let family = match architecture {
        "llama" => Family::Llama,
        "qwen2" => Family::Qwen2,
        "qwen3" => Family::Qwen3,
        other => {
            let allowed = "llama, qwen2, qwen3";
            return Err(Error::unsupported(file, "general.architecture", other, allowed));
        }
    };
    let keys = Keys { gguf, architecture };
    if let Some(experts) = keys.size("expert_count")?.filter(|&n| n > 0) {
        return Err(Error::unsupported(file, "expert_count", experts, "0"));
    }

    let (hidden, q_heads) =
        (keys.required("embedding_length")?, keys.required("attention.head_count")?);
    let head_dim = keys.size("attention.key_length")?.unwrap_or(hidden / q_heads.max(1));
    for key in ["attention.value_length", "rope.dimension_count"] {
        if let Some(found) = keys.size(key)?.filter(|&n| n != head_dim) {
            return Err(Error::unsupported(file, key, found, format!("{head_dim}, the head size")));
        }
    }
    let has = |role: Role| checkpoint.get(&role.gguf_name()).is_some();
    let embed = checkpoint.get(&Role::Embed.gguf_name());
    ModelConfig {
        family,
        hidden,
        intermediate: keys.required("feed_forward_length")?,
        layers: keys.required("block_count")?,
        q_heads,
        kv_heads: keys.size("attention.head_count_kv")?.unwrap_or(q_heads),
        head_dim,
        vocab: match embed.and_then(|tensor| tensor.shape.first()) {
            Some(&rows) => rows,
            None => keys.vocab()?,
        },
        rms_eps: keys.float("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-6) as f32,
        rope: rope(checkpoint, &keys, head_dim)?,
        max_position: keys.required("context_length")?,
        tied: !has(Role::LmHead),
        qkv_bias: family == Family::Qwen2 || has(Role::QBias(0)),
        qk_norm: family == Family::Qwen3 || has(Role::QNorm(0)),
        sliding_window: keys.size("attention.sliding_window")?.filter(|&n| n > 0),
        full_attention_layers: 0,
        bos: token(gguf, "bos")?,
        eos: turn_ends(gguf)?,
        pad: token(gguf, "padding")?,
        dtype: embed.map_or(DType::F32, |tensor| tensor.dtype),
        sampling: sampling(gguf)?,
    }
    .checked(file)
}

fn rope(checkpoint: &Checkpoint, keys: &Keys<'_>, head_dim: usize) -> Result<Rope> {
    let theta = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
    let factor = match keys.float("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => keys.float("rope.scale_linear")?,
    };
    let kind = keys.str("rope.scaling.type")?;
    let scaling = match (kind, factor) {
        // Llama 3.1: the converter writes the divisors it computed as a tensor.
        (None | Some("none"), _) if checkpoint.get("rope_freqs.weight").is_some() => {
            let info = checkpoint.get("rope_freqs.weight").filter(|t| t.elements() == head_dim / 2);
            let Some(info) = info else {
                let allowed = format!("{} elements", head_dim / 2);
                return Err(Error::invalid(
                    keys.gguf.file(),
                    0,
                    "rope_freqs.weight",
                    "another",
                    allowed,
                ));
            };
            RopeScaling::Divisors(checkpoint.read_f32(&info.name)?)
        }
        (Some("linear"), Some(factor)) | (None, Some(factor)) if factor != 1.0 => {
            RopeScaling::Linear { factor }
        }
        (None | Some("none" | "linear"), _) => RopeScaling::None,
        (Some(other), _) => {
            let field = "rope.scaling.type";
            return Err(Error::unsupported(keys.gguf.file(), field, other, "none, linear"));
        }
    };
    Ok(Rope { theta, scaling })
}

fn token(gguf: &Gguf, which: &str) -> Result<Option<u32>> {
    // Writers use u32::MAX for "none".
    let id = gguf.uint(&format!("tokenizer.ggml.{which}_token_id"))?;
    Ok(id.and_then(|id| u32::try_from(id).ok()).filter(|&id| id != u32::MAX))
}

fn turn_ends(gguf: &Gguf) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for which in ["eos", "eot", "eom"] {
        ids.extend(token(gguf, which)?);
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

fn sampling(gguf: &Gguf) -> Result<SamplingDefaults> {
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

/// Metadata keys under the architecture's name.
struct Keys<'a> {
    gguf: &'a Gguf,
    architecture: &'a str,
}

impl<'a> Keys<'a> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn size(&self, key: &str) -> Result<Option<usize>> {
        Ok(self.gguf.uint(&self.name(key))?.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
    }

    fn required(&self, key: &str) -> Result<usize> {
        let missing = || self.gguf.refuse(&self.name(key), "nothing", "a whole number");
        self.size(key)?.ok_or_else(missing)
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        self.gguf.float(&self.name(key))
    }

    fn str(&self, key: &str) -> Result<Option<&'a str>> {
        self.gguf.str(&self.name(key))
    }

    fn vocab(&self) -> Result<usize> {
        if let Some(size) = self.size("vocab_size")? {
            return Ok(size);
        }
        Ok(self.gguf.array("tokenizer.ggml.tokens")?.map_or(0, crate::gguf::Array::len))
    }
}
