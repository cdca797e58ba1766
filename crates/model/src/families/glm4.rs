//! GLM-4 (0414): half of each head rotated, neighbours together; norms before and after attention and MLP; a bias on
//! queries, keys and values.

use super::{Decoder, Family};
use crate::blocks::{self, Attention};
use crate::builder::{Builder, tensor};
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use device::op::{Activation, Pairs};
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "glm4", gguf: "glm4", encodes: false, read };

#[derive(Debug)]
struct Glm4 {
    rope: Rope,
    rotated: usize,
    qkv_bias: bool,
}

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.activation("hidden_act", &["silu"])?;
    let head_dim = Some(128).filter(|_| !f.is_gguf());
    let defaults = Defaults { max_position: 131_072, head_dim, ..Defaults::default() };
    let mut config = ModelConfig::read(f, defaults)?;
    config.pairs = Pairs::Neighbours;
    let part = match f.object("rope_parameters")? {
        Some(own) => own.number("partial_rotary_factor", "")?,
        None => None,
    };
    let part = part.or(f.number("partial_rotary_factor", "")?).unwrap_or(0.5);
    let rotated = f.size("", "rope.dimension_count")?;
    let rotated = rotated.unwrap_or((config.head_dim as f64 * part) as usize);
    let qkv_bias = match f.is_gguf() {
        true => f.has_tensor("blk.0.attn_q.bias"),
        false => f.bool("attention_bias", "")?.unwrap_or(false),
    };
    config.decoder = Arc::new(Glm4 { rope: Rope::read(f)?.first(rotated), rotated, qkv_bias });
    Ok(config)
}

impl Decoder for Glm4 {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&self.rope);
        let (rotated, qkv_bias, inner) = (self.rotated, self.qkv_bias, config.intermediate);
        let norm = |json, gguf| tensor(json, gguf, config.hidden);
        let x = b.embed();
        let x = blocks::layers(config, b, x, |b, _, x| {
            let h = b.rms_norm("attn_norm", x, norm("input_layernorm", "attn_norm"));
            let options = Attention { rotated, qkv_bias, ..Attention::new(config, rope) };
            let a = blocks::attention(config, b, h, &options);
            let (a, x) = blocks::last_tokens(b, a, x);
            let o = blocks::output(config, b, a);
            let after = norm("post_self_attn_layernorm", "post_attention_norm");
            let o = b.rms_norm("attn_post_norm", o, after);
            let x = b.ops().add("attn_out", x, o);
            let h = b.rms_norm("mlp_norm", x, norm("post_attention_layernorm", "ffn_norm"));
            let both = tensor("mlp.gate_up_proj", "ffn_up", 2 * inner);
            let sources = [both.part(0, inner), both.part(inner, inner)];
            let d = blocks::joined_mlp(config, b, h, sources, Activation::Silu);
            let d = b.rms_norm("mlp_post_norm", d, norm("post_mlp_layernorm", "post_ffw_norm"));
            b.ops().add("mlp_out", x, d)
        });
        blocks::end(config, b, x, |_, logits| logits);
    }
}
