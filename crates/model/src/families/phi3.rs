//! Phi-3, Phi-3.5 and Phi-4-mini: queries, keys and values in one tensor, gate and up in another, a rotation of part of
//! a head, and one that is stretched by a list of divisors.

use super::{Decoder, Family};
use crate::blocks::{self, Attention};
use crate::builder::{Builder, tensor};
use crate::config::{Defaults, Fields, ModelConfig, Rope, RopeScaling, small_tensor};
use device::op::Activation;
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "phi3", gguf: "phi3", encodes: false, read };

#[derive(Debug)]
struct Phi3 {
    rope: Rope,
    windows: Vec<Option<usize>>,
}

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    let mut config =
        ModelConfig::read(f, Defaults { max_position: 4_096, ..Defaults::default() })?;
    let window = f.size("sliding_window", "attention.sliding_window")?.filter(|&n| n > 0);
    config.decoder = Arc::new(Phi3 {
        rope: rope(f, &config)?,
        windows: f.windows(window, config.layers, |_| true)?,
    });
    Ok(config)
}

fn rope(f: &Fields<'_>, config: &ModelConfig) -> Result<Rope> {
    let theta = f.number("rope_theta", "rope.freq_base")?;
    let parameters = match f.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => f.object("rope_scaling")?,
    };
    let own = parameters.as_ref();
    let number = |key| own.map_or(Ok(None), |own| own.number(key, ""));
    let theta = number("rope_theta")?.or(theta).unwrap_or(10_000.0);
    let part = number("partial_rotary_factor")?.or(f.number("partial_rotary_factor", "")?);
    let rotated = match f.size("", "rope.dimension_count")? {
        Some(count) => count,
        None => (config.head_dim as f64 * part.unwrap_or(1.0)) as usize,
    };
    let scaling = long(f, own, config)?;
    Ok(Rope { theta, scaling, rotated: Some(rotated) })
}

/// The two lists of divisors, if there are any.
fn long(f: &Fields<'_>, own: Option<&Fields<'_>>, config: &ModelConfig) -> Result<RopeScaling> {
    let original = "original_max_position_embeddings";
    let list = |name: &str| {
        let numbers = own.map_or(Ok(None), |own| own.numbers(name, ""))?;
        Ok::<_, formats::Error>(numbers.map(|list| list.iter().map(|&x| x as f32).collect()))
    };
    let (short, long): (Vec<f32>, Vec<f32>) = match (f.is_gguf(), own) {
        (true, _) if f.has_tensor("rope_factors_long.weight") => (
            small_tensor(f, "rope_factors_short.weight")?,
            small_tensor(f, "rope_factors_long.weight")?,
        ),
        (false, Some(own)) => match own.text("rope_type", "")?.or(own.text("type", "")?) {
            None | Some("default") => return Ok(RopeScaling::None),
            Some("longrope" | "su") => {
                let missing = |name| own.invalid(name, "nothing", "a list of numbers");
                let short = list("short_factor")?.ok_or_else(|| missing("short_factor"))?;
                (short, list("long_factor")?.ok_or_else(|| missing("long_factor"))?)
            }
            Some(other) => return Err(f.unsupported("rope_type", other, "default, longrope")),
        },
        _ => return Ok(RopeScaling::None),
    };
    let before = match own.map_or(Ok(None), |own| own.size(original, ""))? {
        Some(before) => before,
        None => f.required(original, "rope.scaling.original_context_length")?,
    };
    if before < 2 {
        return Err(f.invalid(original, before, "at least 2"));
    }
    let stretched = config.max_position as f64 / before as f64;
    let stretched = own.map_or(Ok(None), |own| own.number("factor", ""))?.unwrap_or(stretched);
    let named = match own {
        Some(own) => own.number("attention_factor", "")?,
        None => f.number("", "rope.scaling.attn_factor")?,
    };
    // The published rule: scores keep their size when positions are closer together.
    let rule = match stretched <= 1.0 {
        true => 1.0,
        false => (1.0 + stretched.ln() / (before as f64).ln()).sqrt(),
    };
    Ok(RopeScaling::Long { short, long, original: before, scale: named.unwrap_or(rule) })
}

impl Decoder for Phi3 {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&self.rope);
        let norm = |json, gguf| tensor(json, gguf, config.hidden);
        let (q, kv, inner) = (config.q_width(), config.kv_width(), config.intermediate);
        let rotated = self.rope.rotated.unwrap_or(config.head_dim);
        let joined = tensor("self_attn.qkv_proj", "attn_qkv", q + 2 * kv);
        let x = b.embed();
        let x = blocks::layers(config, b, x, |b, layer, x| {
            let h = b.rms_norm("attn_norm", x, norm("input_layernorm", "attn_norm"));
            let sources = [
                joined.part(0, q).rotated(rotated),
                joined.part(q, kv).rotated(rotated),
                joined.part(q + kv, kv),
            ];
            let options = Attention { window: self.windows[layer], ..Attention::new(config, rope) };
            let a = blocks::attend(config, b, h, &sources, &options);
            let (a, x) = blocks::last_tokens(b, a, x);
            let o = blocks::output(config, b, a);
            let x = b.ops().add("attn_out", x, o);
            let h = b.rms_norm("mlp_norm", x, norm("post_attention_layernorm", "ffn_norm"));
            let both = tensor("mlp.gate_up_proj", "ffn_up", 2 * inner);
            let sources = [both.part(0, inner), both.part(inner, inner)];
            let d = blocks::joined_mlp(config, b, h, sources, Activation::Silu);
            b.ops().add("mlp_out", x, d)
        });
        blocks::end(config, b, x, |_, logits| logits);
    }
}
