//! Granite 3: Llama's block with multipliers on embeddings, scores, residuals and logits.

use super::{Decoder, Family};
use crate::blocks::experts::Experts;
use crate::blocks::mamba::Mamba;
use crate::blocks::{self, Attention};
use crate::builder::{Builder, Source, tensor};
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use device::op::{Activation, Pairs};
use formats::Result;
use graph::program::{RopeId, ValueId};
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "granite", gguf: "granite", encodes: false, read };

#[derive(Debug)]
struct Granite {
    rope: Rope,
    embedding: f32,
    scores: f32,
    residual: f32,
    logits: f32,
    /// Experts in place of MLPs, multiplied by `residual`.
    experts: Option<Experts>,
    /// Layers that are recurrent.
    hybrid: Option<Hybrid>,
}

/// What differs where some layers are recurrent.
#[derive(Debug)]
pub(super) struct Hybrid {
    pub(super) mamba: Mamba,
    /// Which layers attend; the others are recurrent.
    pub(super) attends: Vec<bool>,
    /// The rotation of those that attend.
    pub(super) rope: Rope,
    /// Gate, up and down of MLPs, where there are no experts.
    pub(super) mlp: Option<[Source; 3]>,
}

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    read_with(f, Defaults::default(), |_, _| Ok(None), |_| Ok(None))
}

/// The configuration of a model with these multipliers, whose MLPs may be experts; `experts` gets that of residuals, which it
/// must apply. `hybrid` says which layers are recurrent.
pub(super) fn read_with(
    f: &Fields<'_>,
    defaults: Defaults,
    experts: impl FnOnce(&ModelConfig, f32) -> Result<Option<Experts>>,
    hybrid: impl FnOnce(&ModelConfig) -> Result<Option<Hybrid>>,
) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    let mut config = ModelConfig::read(f, defaults)?;
    if f.is_gguf() {
        // The converter puts the rows of each head in the other order.
        config.pairs = Pairs::Neighbours;
    }
    let number = |json, gguf, usual: f64| {
        let found = f.number(json, gguf)?.unwrap_or(usual);
        match found.is_finite() && found != 0.0 {
            true => Ok(found as f32),
            false => Err(f.invalid(json, found, "a finite number other than 0")),
        }
    };
    let residual = number("residual_multiplier", "residual_scale", 1.0)?;
    let experts = experts(&config, residual)?;
    let hybrid = hybrid(&config)?;
    let usual = (config.head_dim as f64).powf(-0.5);
    let rope = match &hybrid {
        Some(hybrid) => hybrid.rope.clone(),
        None => Rope::read_whole(f, config.head_dim)?,
    };
    config.decoder = Arc::new(Granite {
        rope,
        embedding: number("embedding_multiplier", "embedding_scale", 1.0)?,
        scores: number("attention_multiplier", "attention.scale", usual)?,
        residual,
        logits: number("logits_scaling", "logit_scale", 1.0)?,
        experts,
        hybrid,
    });
    Ok(config)
}

impl Granite {
    /// Attention of `h` and its output projection, or what a recurrent layer makes of it; and `x` of the same tokens.
    fn mix(
        &self,
        config: &ModelConfig,
        b: &mut Builder<'_>,
        (layer, h, x): (usize, ValueId, ValueId),
        rope: RopeId,
    ) -> (ValueId, ValueId) {
        if let Some(hybrid) = self.hybrid.as_ref().filter(|hybrid| !hybrid.attends[layer]) {
            return hybrid.mamba.build(config, b, h, x);
        }
        let options = Attention { scale: self.scores, ..Attention::new(config, rope) };
        let a = blocks::attention(config, b, h, &options);
        let (a, x) = blocks::last_tokens(b, a, x);
        (blocks::output(config, b, a), x)
    }
}

impl Decoder for Granite {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&self.rope);
        let norm = |json, gguf| tensor(json, gguf, config.hidden);
        let x = b.embed();
        let x = b.ops().scale("embed_scale", x, self.embedding);
        let x = blocks::layers(config, b, x, |b, layer, x| {
            let h = b.rms_norm("attn_norm", x, norm("input_layernorm", "attn_norm"));
            let (o, x) = self.mix(config, b, (layer, h, x), rope);
            let o = b.ops().scale("attn_scale", o, self.residual);
            let x = b.ops().add("attn_out", x, o);
            let h = b.rms_norm("mlp_norm", x, norm("post_attention_layernorm", "ffn_norm"));
            if let Some(experts) = &self.experts {
                return experts.build(b, x, h);
            }
            let d = match self.hybrid.as_ref().and_then(|hybrid| hybrid.mlp) {
                Some(sources) => blocks::mlp(b, "", h, sources, Activation::Silu),
                None => blocks::gated_mlp(config, b, h, Activation::Silu),
            };
            let d = b.ops().scale("mlp_scale", d, self.residual);
            b.ops().add("mlp_out", x, d)
        });
        blocks::end(config, b, x, |b, logits| {
            b.ops().scale("logit_scale", logits, 1.0 / self.logits)
        });
    }
}
