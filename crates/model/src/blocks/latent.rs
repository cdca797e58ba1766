//! Latent attention (MLA): of every token a latent is kept, which the keys and values of all heads are made of, and one
//! rotated key that all heads share.
//!
//! The program never makes keys and values: queries are taken into the space of latents with the matrix that makes
//! keys, and values are made of what attention makes of latents.

use super::experts::Experts;
use super::{end, gated_mlp, last_tokens, layers, output};
use crate::Builder;
use crate::builder::tensor;
use crate::config::{Fields, ModelConfig, Rope};
use crate::families::Decoder;
use crate::weights::Cut;
use device::op::{Activation, Pairs};
use formats::{Result, limits};
use graph::program::{Cache, RopeId, ValueId};

/// The epsilon of the norms of latents, whatever the model's is.
const EPS: f32 = 1e-6;

/// Attention as DeepSeek V2 and V3 have it, with MLPs and experts.
#[derive(Debug)]
pub(crate) struct Latent {
    /// Elements of the latent that queries are made of; `None`: they are made of the residual stream.
    pub(crate) q_rank: Option<usize>,
    /// Elements of the latent that is kept.
    pub(crate) rank: usize,
    /// Elements of a query and key that are not rotated.
    pub(crate) still: usize,
    /// Elements that are.
    pub(crate) rotated: usize,
    /// Elements of a value.
    pub(crate) value: usize,
    /// Multiplies scores.
    pub(crate) scale: f32,
    pub(crate) rope: Rope,
    /// Which elements are rotated together.
    pub(crate) pairs: Pairs,
    pub(crate) experts: Experts,
}

impl Latent {
    /// The fields of attention; heads of `config` become those of queries.
    pub(crate) fn read(
        f: &Fields<'_>,
        config: &mut ModelConfig,
        experts: Experts,
    ) -> Result<Latent> {
        let size = |name: &str, most: u64| {
            let found = f.required(name, "")?;
            // Kernels load eight elements at once.
            match (1..=most as usize).contains(&found) && found.is_multiple_of(8) {
                true => Ok(found),
                false => Err(f.invalid(name, found, format!("a multiple of 8 up to {most}"))),
            }
        };
        let q_rank = f.size("q_lora_rank", "")?;
        let q_rank = q_rank.map(|_| size("q_lora_rank", limits::WIDTH)).transpose()?;
        let rank = size("kv_lora_rank", limits::WIDTH)?;
        let still = size("qk_nope_head_dim", limits::HEAD_DIM)?;
        let rotated = size("qk_rope_head_dim", limits::HEAD_DIM)?;
        let value = size("v_head_dim", limits::HEAD_DIM)?;
        for width in [still + rotated, still + value, rank + rotated] {
            if width.saturating_mul(config.q_heads) as u64 > limits::WIDTH {
                let allowed = format!("{} in all heads", limits::WIDTH);
                return Err(f.invalid("elements of a head", width, allowed));
            }
        }
        config.head_dim = still + rotated;
        let rope = Rope::read(f)?;
        let spread = rope.score_scale();
        let scale = ((still + rotated) as f32).powf(-0.5) * spread * spread;
        let neighbours = f.bool("rope_interleave", "")?.unwrap_or(true);
        let pairs = if neighbours { Pairs::Neighbours } else { Pairs::Halves };
        Ok(Latent { q_rank, rank, still, rotated, value, scale, rope, pairs, experts })
    }

    /// Attention of `h`: of each head a sum of latents.
    fn attend(
        &self,
        config: &ModelConfig,
        b: &mut Builder<'_>,
        h: ValueId,
        rope: RopeId,
    ) -> ValueId {
        let Latent { rank, still, rotated, value, .. } = *self;
        let q_width = config.q_heads * (still + rotated);
        let kv = tensor("self_attn.kv_a_proj_with_mqa", "", rank + rotated);
        let (q, kv) = match self.q_rank {
            None => {
                let sources = [tensor("self_attn.q_proj", "", q_width), kv];
                let both = b.linear("q_kv", h, &sources, false, Cut::Whole);
                (both, (both, q_width as u32))
            }
            Some(q_rank) => {
                let sources = [tensor("self_attn.q_a_proj", "", q_rank)];
                let q = b.linear("q_a", h, &sources, false, Cut::Whole);
                let (norm, _) =
                    b.head_norm("q_a_norm", tensor("self_attn.q_a_layernorm", "", q_rank));
                let q = b.ops().rms_norm("q_a_norm", q, norm, EPS);
                let sources = [tensor("self_attn.q_b_proj", "", q_width)];
                let q = b.linear("q_b", q, &sources, false, Cut::Rows);
                (q, (b.linear("kv_a", h, &[kv], false, Cut::Whole), 0))
            }
        };
        let dtype = b.ops().shape().kv_dtype;
        b.ops().cache(Cache::Latent { latent: rank as u32, rotated: rotated as u32, dtype });
        let all = still + value;
        let kv_b = tensor("self_attn.kv_b_proj", "", config.q_heads * all);
        let q = b.head_linear("absorb", q, kv_b, (0..still, all, rank), still + rotated, true);
        let (norm, _) = b.head_norm("kv_norm", tensor("self_attn.kv_a_layernorm", "", rank));
        let q = b.ops().latent_kv("latent", q, kv, (norm, EPS), rope, self.pairs);
        b.ops().latent_attention("attn", q, self.scale)
    }

    /// The values of each head, of what attention made.
    fn values(&self, config: &ModelConfig, b: &mut Builder<'_>, a: ValueId) -> ValueId {
        let all = self.still + self.value;
        let kv_b = tensor("self_attn.kv_b_proj", "", config.q_heads * all);
        b.head_linear("values", a, kv_b, (self.still..all, all, self.rank), self.rank, false)
    }
}

impl Decoder for Latent {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    /// Layers behind the last draft tokens.
    fn ignores(&self, tensor: &str) -> bool {
        let layer = tensor.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let number = layer.and_then(|(number, _)| number.parse::<usize>().ok());
        number.is_some_and(|number| number >= self.experts.layers.len())
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope_of(&self.rope, self.rotated);
        let norm = |json| tensor(json, "", config.hidden);
        let x = b.embed();
        let x = layers(config, b, x, |b, layer, x| {
            let h = b.rms_norm("attn_norm", x, norm("input_layernorm"));
            let a = self.attend(config, b, h, rope);
            let (a, x) = last_tokens(b, a, x);
            let v = self.values(config, b, a);
            let o = output(config, b, v);
            let x = b.ops().add("attn_out", x, o);
            let h = b.rms_norm("mlp_norm", x, norm("post_attention_layernorm"));
            if self.experts.layers[layer] {
                return self.experts.build(b, x, h);
            }
            let d = gated_mlp(config, b, h, Activation::Silu);
            b.ops().add("mlp_out", x, d)
        });
        end(config, b, x, |_, logits| logits);
    }
}
