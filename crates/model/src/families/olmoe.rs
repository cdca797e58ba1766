//! OLMoE: Llama's block with experts, and norms over all queries and over all keys of a token.

use super::{Decoder, Family};
use crate::blocks;
use crate::blocks::experts::{self, Experts};
use crate::builder::{Builder, tensor};
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "olmoe", gguf: "olmoe", encodes: false, read };

#[derive(Debug)]
struct Olmoe {
    rope: Rope,
    experts: Experts,
}

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.activation("hidden_act", &["silu"])?;
    f.not("attention_bias", "")?;
    if let Some(limit) = f.number("clip_qkv", "attention.clamp_kqv")?.filter(|&limit| limit > 0.0) {
        return Err(f.unsupported("clip_qkv", limit, "null"));
    }
    let defaults = Defaults { max_position: 4_096, experts: true, ..Defaults::default() };
    let mut config = ModelConfig::read(f, defaults)?;
    let inner = f.size("", "expert_feed_forward_length")?.filter(|&n| n > 0);
    let sources = experts::numbered(inner.unwrap_or(config.intermediate), config.hidden);
    let experts = Experts::read(f, config.layers, experts::router, sources)?;
    config.decoder = Arc::new(Olmoe {
        rope: Rope::read_whole(f, config.head_dim)?,
        experts: experts.renormalised(f, false)?,
    });
    Ok(config)
}

impl Decoder for Olmoe {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&self.rope);
        let norm = |json, gguf| tensor(json, gguf, config.hidden);
        let x = b.embed();
        let x = blocks::layers(config, b, x, |b, _, x| {
            let h = b.rms_norm("attn_norm", x, norm("input_layernorm", "attn_norm"));
            let a = blocks::attend_with_wide_norms(config, b, h, rope);
            let (a, x) = blocks::last_tokens(b, a, x);
            let o = blocks::output(config, b, a);
            let x = b.ops().add("attn_out", x, o);
            let h = b.rms_norm("mlp_norm", x, norm("post_attention_layernorm", "ffn_norm"));
            self.experts.build(b, x, h)
        });
        let h = b.rms_norm("norm", x, norm("norm", "output_norm"));
        b.end(h, |_, logits| logits);
    }
}
