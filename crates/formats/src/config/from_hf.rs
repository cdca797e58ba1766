//! `config.json` and `generation_config.json` as Hugging Face writes them, before and since
//! transformers 5 (`rope_parameters`, `dtype`).

use super::{Family, ModelConfig, Rope, RopeScaling, SamplingDefaults};
use crate::dtype::DType;
use crate::safetensors::json_error;
use crate::{Error, Result, limits};
use serde_json::{Map, Value};
use std::path::Path;

pub(super) fn read(
    path: &Path,
    config: &[u8],
    generation: Option<(&Path, &[u8])>,
) -> Result<ModelConfig> {
    let fields = Fields::parse(path, config)?;
    let family = family(&fields)?;
    refuse_what_we_do_not_do(&fields, family)?;

    let q_heads = fields.required("num_attention_heads")?;
    let hidden = fields.required("hidden_size")?;
    let layers = fields.required("num_hidden_layers")?;
    let (sliding_window, full_attention_layers) = sliding_window(&fields, family, layers)?;
    let mut model = ModelConfig {
        family,
        hidden,
        intermediate: fields.required("intermediate_size")?,
        layers,
        q_heads,
        kv_heads: fields.size("num_key_value_heads")?.unwrap_or(q_heads),
        head_dim: match fields.size("head_dim")? {
            Some(size) => size,
            None if family == Family::Qwen3 => 128,
            None => hidden / q_heads.max(1),
        },
        vocab: fields.required("vocab_size")?,
        rms_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        rope: rope(&fields)?,
        max_position: fields.size("max_position_embeddings")?.unwrap_or(match family {
            Family::Llama => 2_048,
            Family::Mistral => 131_072,
            Family::Qwen2 | Family::Qwen3 => 32_768,
        }),
        tied: fields.bool("tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: family == Family::Qwen2,
        qk_norm: family == Family::Qwen3,
        sliding_window,
        full_attention_layers,
        bos: fields.ids("bos_token_id")?.first().copied(),
        eos: fields.ids("eos_token_id")?,
        pad: fields.ids("pad_token_id")?.first().copied(),
        dtype: dtype(&fields)?,
        sampling: SamplingDefaults::default(),
    };
    if let Some((path, bytes)) = generation {
        apply_generation(&mut model, &Fields::parse(path, bytes)?)?;
    }
    model.checked(path)
}

fn apply_generation(model: &mut ModelConfig, fields: &Fields<'_>) -> Result<()> {
    let eos = fields.ids("eos_token_id")?;
    if !eos.is_empty() {
        model.eos = eos;
    }
    model.bos = fields.ids("bos_token_id")?.first().copied().or(model.bos);
    model.pad = fields.ids("pad_token_id")?.first().copied().or(model.pad);
    let float = |key| Ok::<_, Error>(fields.number(key)?.map(|x| x as f32));
    model.sampling = SamplingDefaults {
        do_sample: fields.bool("do_sample")?,
        temperature: float("temperature")?,
        top_p: float("top_p")?,
        top_k: fields.size("top_k")?.map(|k| k.min(u32::MAX as usize) as u32),
        min_p: float("min_p")?,
        repetition_penalty: float("repetition_penalty")?,
    };
    Ok(())
}

fn family(fields: &Fields<'_>) -> Result<Family> {
    let known = "llama, mistral, qwen2, qwen3";
    let Some(name) = fields.str("model_type")? else {
        return Err(fields.refuse("model_type", "nothing", known));
    };
    Family::parse(name).ok_or_else(|| Error::unsupported(fields.file, "model_type", name, known))
}

fn refuse_what_we_do_not_do(fields: &Fields<'_>, family: Family) -> Result<()> {
    let refuse = |field: &str, found: &dyn std::fmt::Display, allowed: &str| {
        Err(Error::unsupported(fields.file, field, found, allowed))
    };
    if let Some(act) = fields.str("hidden_act")?
        && act != "silu"
    {
        return refuse("hidden_act", &act, "silu");
    }
    if family != Family::Qwen2 && fields.bool("attention_bias")? == Some(true) {
        return refuse("attention_bias", &true, "false");
    }
    if fields.bool("mlp_bias")? == Some(true) {
        return refuse("mlp_bias", &true, "false");
    }
    if let Some(part) = fields.number("partial_rotary_factor")?
        && part != 1.0
    {
        return refuse("partial_rotary_factor", &part, "1");
    }
    if let Some(quantised) = fields.object("quantization_config")? {
        let method = quantised.str("quant_method")?.unwrap_or("unnamed");
        return refuse("quantization_config", &method, "GGUF quantisation, or none");
    }
    Ok(())
}

/// The window and the number of first layers that do not use it.
fn sliding_window(
    fields: &Fields<'_>,
    family: Family,
    layers: usize,
) -> Result<(Option<usize>, usize)> {
    let window = fields.size("sliding_window")?;
    let (window, full) = match family {
        Family::Llama => (None, 0),
        // A Mistral config that says nothing means 4096; one that says null means none.
        Family::Mistral if !fields.has("sliding_window") => (Some(4_096), 0),
        Family::Mistral => (window, 0),
        Family::Qwen2 | Family::Qwen3 if fields.bool("use_sliding_window")? == Some(true) => {
            (window, fields.size("max_window_layers")?.unwrap_or(28).min(layers))
        }
        Family::Qwen2 | Family::Qwen3 => (None, 0),
    };
    let Some(types) = fields.get("layer_types").and_then(Value::as_array) else {
        return Ok((window, full));
    };
    // Newer configs list the kind of every layer. What the list says must be what we would do.
    for (layer, kind) in types.iter().enumerate() {
        let ours =
            if window.is_some() && layer >= full { "sliding_attention" } else { "full_attention" };
        if kind.as_str() != Some(ours) {
            let field = format!("layer_types[{layer}]");
            return Err(Error::unsupported(fields.file, field, kind, ours));
        }
    }
    Ok((window, full))
}

fn rope(fields: &Fields<'_>) -> Result<Rope> {
    let parameters = fields.object("rope_parameters")?;
    let scaling = match &parameters {
        Some(parameters) => Some(parameters.clone()),
        None => fields.object("rope_scaling")?,
    };
    let theta = match &parameters {
        Some(parameters) => parameters.number("rope_theta")?,
        None => None,
    };
    let theta = match theta {
        Some(theta) => theta,
        None => fields.number("rope_theta")?.unwrap_or(10_000.0),
    };
    let Some(scaling) = scaling else { return Ok(Rope { theta, scaling: RopeScaling::None }) };
    let kind = match scaling.str("rope_type")? {
        Some(kind) => Some(kind),
        None => scaling.str("type")?,
    };
    let required =
        |key: &str| scaling.number(key)?.ok_or_else(|| scaling.refuse(key, "nothing", "a number"));
    let scaling = match kind {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: required("factor")? },
        Some("llama3") => RopeScaling::Llama3 {
            factor: required("factor")?,
            low: required("low_freq_factor")?,
            high: required("high_freq_factor")?,
            original: scaling.required("original_max_position_embeddings")?,
        },
        Some(other) => {
            let allowed = "default, linear, llama3";
            return Err(Error::unsupported(fields.file, "rope_type", other, allowed));
        }
    };
    Ok(Rope { theta, scaling })
}

fn dtype(fields: &Fields<'_>) -> Result<DType> {
    let name = match fields.str("dtype")? {
        Some(name) => Some(name),
        None => fields.str("torch_dtype")?,
    };
    match name {
        None | Some("float32") => Ok(DType::F32),
        Some("bfloat16") => Ok(DType::BF16),
        Some("float16") => Ok(DType::F16),
        Some(other) => {
            Err(Error::unsupported(fields.file, "torch_dtype", other, "float32, bfloat16, float16"))
        }
    }
}

/// A JSON object whose fields are read by type, with null the same as absent.
#[derive(Clone)]
pub(super) struct Fields<'a> {
    file: &'a Path,
    map: Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn parse(file: &'a Path, bytes: &[u8]) -> Result<Self> {
        let map = serde_json::from_slice(bytes)
            .map_err(|error| json_error(file, 0, "config", bytes, &error))?;
        Ok(Self { file, map })
    }

    fn refuse(&self, key: &str, found: impl std::fmt::Display, allowed: &str) -> Error {
        Error::invalid(self.file, 0, key, found, allowed)
    }

    fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn typed<'v, T>(
        &'v self,
        key: &str,
        allowed: &str,
        read: impl Fn(&'v Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.refuse(key, value, allowed))
    }

    fn size(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    fn required(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.refuse(key, "nothing", "a whole number"))
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", Value::as_str)
    }

    fn object(&self, key: &str) -> Result<Option<Fields<'a>>> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields { file: self.file, map: map.clone() }))
    }

    /// One token id or a list of them; negative ids, which old configs use for "none", are left
    /// out.
    fn ids(&self, key: &str) -> Result<Vec<u32>> {
        let one = |value: &Value| value.as_i64().map(|n| u32::try_from(n).ok());
        let ids = self.typed(key, "a token id or a list of them", |value| match value {
            Value::Array(list) if list.len() <= limits::EOS_IDS => {
                list.iter().map(one).collect::<Option<Vec<_>>>()
            }
            other => one(other).map(|id| vec![id]),
        })?;
        Ok(ids.into_iter().flatten().flatten().collect())
    }
}
