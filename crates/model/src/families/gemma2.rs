//! Gemma 2: scaled embeddings, norms before and after attention and MLP, GELU, a window in every other layer, soft
//! caps on scores and logits. Gemma 3 has the same block with other options.

use super::{Decoder, Family};
use crate::blocks::{self, Attention};
use crate::builder::{Builder, Source, tensor};
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use device::op::Activation;
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "gemma2", gguf: "gemma2", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    let mut config = base(f, Defaults { max_position: 8_192, ..DEFAULTS })?;
    let window = f.size("sliding_window", "attention.sliding_window")?.or(Some(4_096));
    let rope = Rope::read_whole(f, config.head_dim)?;
    let cap = |json, gguf, usual: f64| {
        // Without the field the default cap applies; null means no cap.
        let said = f.is_gguf() || f.mentions(json);
        Ok::<_, formats::Error>(match f.number(json, gguf)? {
            None if said => None,
            None => Some(usual as f32),
            Some(cap) => Some(cap as f32),
        })
    };
    config.decoder = Arc::new(Gemma {
        windows: f.windows(window, config.layers, |layer| layer.is_multiple_of(2))?,
        windowed_rope: rope.clone(),
        rope,
        head_norms: false,
        scale: scale(f, &config, 46)?,
        score_cap: cap("attn_logit_softcapping", "attn_logit_softcapping", 50.0)?,
        logit_cap: cap("final_logit_softcapping", "final_logit_softcapping", 30.0)?,
    });
    Ok(config)
}

/// What the configs of both Gemmas may leave out.
pub(super) const DEFAULTS: Defaults = Defaults {
    max_position: 131_072,
    head_dim: Some(256),
    tied: true,
    norm_eps: ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    experts: false,
    intermediate: None,
    latent: false,
};

/// The numbers that every decoder has, for both Gemmas.
pub(super) fn base(f: &Fields<'_>, defaults: Defaults) -> Result<ModelConfig> {
    let activations = ["gelu_pytorch_tanh"];
    f.activation("hidden_activation", &activations)?;
    f.not("attention_bias", "")?;
    ModelConfig::read(f, defaults)
}

/// The factor of scores. GGUF files do not store it; it derives from hidden size / heads in the largest model, from the
/// head's size in the others.
pub(super) fn scale(f: &Fields<'_>, config: &ModelConfig, largest: usize) -> Result<f32> {
    let own = match f.is_gguf() && config.layers == largest {
        true => config.hidden as f64 / config.q_heads as f64,
        false if f.is_gguf() => config.head_dim as f64,
        false => f.number("query_pre_attn_scalar", "")?.unwrap_or(256.0),
    };
    if !(own.is_finite() && own > 0.0) {
        return Err(f.invalid("query_pre_attn_scalar", own, "a finite number above 0"));
    }
    Ok(own.powf(-0.5) as f32)
}

/// The decoder of Gemma 2 and 3.
#[derive(Debug)]
pub(super) struct Gemma {
    /// How far back each layer looks; `None` is the whole context.
    pub(super) windows: Vec<Option<usize>>,
    /// The rotation of layers that see the whole context.
    pub(super) rope: Rope,
    /// The rotation of layers that have a window.
    pub(super) windowed_rope: Rope,
    /// Norms over the elements of each query and key head.
    pub(super) head_norms: bool,
    /// The factor of scores.
    pub(super) scale: f32,
    /// Scores stay below this.
    pub(super) score_cap: Option<f32>,
    /// Logits stay below this.
    pub(super) logit_cap: Option<f32>,
}

impl Decoder for Gemma {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone(), self.windowed_rope.clone()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let (whole, windowed) = (b.rope(&self.rope), b.rope(&self.windowed_rope));
        // Checkpoints in float32 and bfloat16 have weights less 1; so has the last norm.
        let norm = |json, gguf| -> Source { tensor(json, gguf, config.hidden).less_one() };
        let x = b.embed();
        let x = b.ops().scale("embed_scale", x, (config.hidden as f32).sqrt());
        let x = blocks::layers(config, b, x, |b, layer, x| {
            let h = b.rms_norm("attn_norm", x, norm("input_layernorm", "attn_norm"));
            let window = self.windows[layer];
            let options = Attention {
                head_norms: self.head_norms,
                norms_less_one: true,
                scaled_queries: self.head_norms,
                window,
                scale: self.scale,
                score_cap: self.score_cap,
                ..Attention::new(config, if window.is_some() { windowed } else { whole })
            };
            let a = blocks::attention(config, b, h, &options);
            let (o, x) = blocks::project(config, b, a, x);
            let after = norm("post_attention_layernorm", "post_attention_norm");
            let o = b.rms_norm("attn_post_norm", o, after);
            let x = b.ops().add("attn_out", x, o);
            let h = b.rms_norm("mlp_norm", x, norm("pre_feedforward_layernorm", "ffn_norm"));
            let d = blocks::gated_mlp(config, b, h, Activation::GeluTanh);
            let after = norm("post_feedforward_layernorm", "post_ffw_norm");
            let d = b.rms_norm("mlp_post_norm", d, after);
            b.ops().add("mlp_out", x, d)
        });
        let h = b.rms_norm("norm", x, norm("norm", "output_norm"));
        b.end(h, |b, logits| match self.logit_cap {
            Some(cap) => b.ops().soft_cap("logit_cap", logits, 1.0, cap),
            None => logits,
        });
    }
}
