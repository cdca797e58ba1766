//! Gemma 3 (text): Gemma 2's block with norms on heads instead of a cap on scores, and five windowed layers, with a
//! rotation of their own, for each that sees the whole context.

use super::Family;
use super::gemma2::{DEFAULTS, Gemma, base, scale};
use crate::config::{Fields, ModelConfig, Rope};
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "gemma3_text", gguf: "gemma3", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    let mut config = base(f, DEFAULTS)?;
    for cap in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(found) = f.number(cap, cap)? {
            return Err(f.unsupported(cap, found, "none"));
        }
    }
    let window = f.size("sliding_window", "attention.sliding_window")?.or(Some(4_096));
    let every = f.size("sliding_window_pattern", "attention.sliding_window_pattern")?;
    let every = every.or(f.size("_sliding_window_pattern", "")?).unwrap_or(6).max(1);
    let (rope, windowed_rope) = ropes(f)?;
    config.decoder = Arc::new(Gemma {
        windows: f.windows(window, config.layers, |layer| (layer + 1) % every != 0)?,
        rope,
        windowed_rope,
        head_norms: true,
        scale: scale(f, &config, 62)?,
        score_cap: None,
        logit_cap: None,
    });
    Ok(config)
}

/// The rotation of layers that see the whole context, and of those that do not; only the first is ever stretched.
fn ropes(f: &Fields<'_>) -> Result<(Rope, Rope)> {
    if let Some(each) = f.object("rope_parameters")? {
        // Since transformers 5 there is one set for each kind of layer.
        let of = |kind, theta| match each.object(kind)? {
            Some(own) => Rope::of(&own, Some(theta)),
            None => Ok(Rope::plain(theta)),
        };
        return Ok((of("full_attention", 1e6)?, of("sliding_attention", 1e4)?));
    }
    let theta = f.number("rope_theta", "rope.freq_base")?.unwrap_or(1e6);
    let whole = Rope { theta, ..Rope::read(f)? };
    let local = f.number("rope_local_base_freq", "rope.freq_base_swa")?.unwrap_or(1e4);
    Ok((whole, Rope::plain(local)))
}
