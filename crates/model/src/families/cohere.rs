//! Command-R: attention and MLP side by side over one LayerNorm, neighbours rotated together, scaled logits.

use super::{Decoder, Family};
use crate::blocks::{self, Attention};
use crate::builder::{Builder, tensor};
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use device::op::{Activation, Pairs};
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "cohere", gguf: "command-r", encodes: false, read };

#[derive(Debug)]
struct Cohere {
    rope: Rope,
    logit_scale: f32,
}

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    f.not("use_qk_norm", "")?;
    let norm_eps = ("layer_norm_eps", "attention.layer_norm_epsilon");
    let defaults =
        Defaults { max_position: 8_192, tied: true, norm_eps, ..Defaults::default() };
    let mut config = ModelConfig::read(f, defaults)?;
    config.pairs = Pairs::Neighbours;
    config.decoder = Arc::new(Cohere {
        rope: Rope::read_whole(f, config.head_dim)?,
        logit_scale: f.number("logit_scale", "logit_scale")?.unwrap_or(0.0625) as f32,
    });
    Ok(config)
}

impl Decoder for Cohere {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&self.rope);
        let norm = |json, gguf| tensor(json, gguf, config.hidden);
        let x = b.embed();
        let x = blocks::layers(config, b, x, |b, _, x| {
            let h = b.layer_norm("norm", x, norm("input_layernorm", "attn_norm"));
            let a = blocks::attention(config, b, h, &Attention::new(config, rope));
            let ((a, x), h) = (blocks::last_tokens(b, a, x), blocks::last_token(b, "mlp_in", h));
            let o = blocks::output(config, b, a);
            let x = b.ops().add("attn_out", x, o);
            let d = blocks::gated_mlp(config, b, h, Activation::Silu);
            b.ops().add("mlp_out", x, d)
        });
        let h = b.layer_norm("norm", x, norm("norm", "output_norm"));
        b.end(h, |b, logits| b.ops().scale("logit_scale", logits, self.logit_scale));
    }
}
