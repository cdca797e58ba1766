//! OLMo 2: no norms before attention and MLP, but after them; norms over all queries and over all keys of a token.

use super::{Decoder, Family};
use crate::blocks;
use crate::builder::{Builder, tensor};
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use device::op::Activation;
use formats::Result;
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "olmo2", gguf: "olmo2", encodes: false, read };

#[derive(Debug)]
struct Olmo2 {
    rope: Rope,
}

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    let mut config = ModelConfig::read(f, Defaults::default())?;
    config.decoder = Arc::new(Olmo2 { rope: Rope::read_whole(f, config.head_dim)? });
    Ok(config)
}

impl Decoder for Olmo2 {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&self.rope);
        let norm = |json, gguf| tensor(json, gguf, config.hidden);
        let x = b.embed();
        let x = blocks::layers(config, b, x, |b, _, x| {
            let a = blocks::attend_with_wide_norms(config, b, x, rope);
            let (a, x) = blocks::last_tokens(b, a, x);
            let o = blocks::output(config, b, a);
            let after = norm("post_attention_layernorm", "post_attention_norm");
            let o = b.rms_norm("attn_post_norm", o, after);
            let x = b.ops().add("attn_out", x, o);
            let d = blocks::gated_mlp(config, b, x, Activation::Silu);
            let after = norm("post_feedforward_layernorm", "post_ffw_norm");
            let d = b.rms_norm("mlp_post_norm", d, after);
            b.ops().add("mlp_out", x, d)
        });
        blocks::end(config, b, x, |_, logits| logits);
    }
}
