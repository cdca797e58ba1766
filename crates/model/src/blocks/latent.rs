//! Latent attention (MLA): of every token a latent is kept, which the keys and values of all heads are made of, and one
//! rotated key that all heads share.
//!
//! The program never makes keys and values: queries are taken into the space of latents with the matrix that makes
//! keys, and values are made of what attention makes of latents.

use super::experts::Experts;
use super::{end, gated_mlp, is_behind, last_tokens, layers, output};
use crate::Builder;
use crate::builder::tensor;
use crate::config::{Fields, ModelConfig, Rope};
use crate::families::Decoder;
use crate::weights::Cut;
use device::op::{Activation, Pairs};
use formats::{Result, limits};
use graph::program::{Cache, RopeId, ValueId};

/// The name of the rank of queries in GGUF metadata.
const Q_RANK: &str = "attention.q_lora_rank";
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
    /// Whether the rows that make keys and values of latents are in tensors of their own, those of keys turned.
    pub(crate) apart: bool,
    pub(crate) experts: Experts,
}

impl Latent {
    /// The fields of attention; heads of `config` become those of queries.
    pub(crate) fn read(
        f: &Fields<'_>,
        config: &mut ModelConfig,
        experts: Experts,
    ) -> Result<Latent> {
        let fit = |found: usize, name: &str, most: u64| {
            // Kernels load eight elements at once.
            match (1..=most as usize).contains(&found) && found.is_multiple_of(8) {
                true => Ok(found),
                false => Err(f.invalid(name, found, format!("a multiple of 8 up to {most}"))),
            }
        };
        let size = |json: &str, gguf: &str, most: u64| {
            fit(f.required(json, gguf)?, &f.called(json, gguf), most)
        };
        let q_rank = f.size("q_lora_rank", Q_RANK)?.filter(|&rank| rank > 0 || !f.is_gguf());
        let q_rank = q_rank.map(|_| size("q_lora_rank", Q_RANK, limits::WIDTH)).transpose()?;
        let rank = size("kv_lora_rank", "attention.kv_lora_rank", limits::WIDTH)?;
        let rotated = size("qk_rope_head_dim", "rope.dimension_count", limits::HEAD_DIM)?;
        // Files from before keys and values were taken apart have their sizes in the usual fields.
        let [whole, values] = match f.size("", "attention.key_length_mla")? {
            Some(_) => ["attention.key_length_mla", "attention.value_length_mla"],
            None => ["attention.key_length", "attention.value_length"],
        };
        let still = match f.is_gguf() {
            true => {
                let all = size("", whole, limits::HEAD_DIM)?;
                fit(all.saturating_sub(rotated), &f.called("", whole), limits::HEAD_DIM)?
            }
            false => size("qk_nope_head_dim", "", limits::HEAD_DIM)?,
        };
        let value = size("v_head_dim", values, limits::HEAD_DIM)?;
        for width in [still + rotated, still + value, rank + rotated] {
            if width.saturating_mul(config.q_heads) as u64 > limits::WIDTH {
                let allowed = format!("{} in all heads", limits::WIDTH);
                return Err(f.invalid("elements of a head", width, allowed));
            }
        }
        config.head_dim = still + rotated;
        // GGUF files say that all heads share one latent; keys and values that are made of it are of each head.
        config.kv_heads = config.q_heads;
        let rope = Rope::read(f)?;
        let spread = rope.score_scale();
        let scale = ((still + rotated) as f32).powf(-0.5) * spread * spread;
        let neighbours = f.bool("rope_interleave", "")?.unwrap_or(true);
        let pairs = if neighbours { Pairs::Neighbours } else { Pairs::Halves };
        let apart = f.has_tensor("blk.0.attn_k_b.weight");
        Ok(Latent { q_rank, rank, still, rotated, value, scale, rope, pairs, apart, experts })
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
        let kv = tensor("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", rank + rotated);
        let (q, kv) = match self.q_rank {
            None => {
                let sources = [tensor("self_attn.q_proj", "attn_q", q_width), kv];
                let both = b.linear("q_kv", h, &sources, false, Cut::Whole);
                (both, (both, q_width as u32))
            }
            Some(q_rank) => {
                let sources = [tensor("self_attn.q_a_proj", "attn_q_a", q_rank)];
                let q = b.linear("q_a", h, &sources, false, Cut::Whole);
                let norm = tensor("self_attn.q_a_layernorm", "attn_q_a_norm", q_rank);
                let (norm, _) = b.head_norm("q_a_norm", norm);
                let q = b.ops().rms_norm("q_a_norm", q, norm, EPS);
                let sources = [tensor("self_attn.q_b_proj", "attn_q_b", q_width)];
                let q = b.linear("q_b", q, &sources, false, Cut::Rows);
                (q, (b.linear("kv_a", h, &[kv], false, Cut::Whole), 0))
            }
        };
        let dtype = b.ops().shape().kv_dtype;
        b.ops().cache(Cache::Latent { latent: rank as u32, rotated: rotated as u32, dtype });
        let (heads, each) = (config.q_heads, still + rotated);
        let q = match self.apart {
            true => {
                let k_b = tensor("", "attn_k_b", heads * rank).folded(heads);
                b.head_linear("absorb", q, k_b, (0..rank, rank, still), each, false)
            }
            false => {
                let all = still + value;
                let kv_b = tensor("self_attn.kv_b_proj", "attn_kv_b", heads * all);
                b.head_linear("absorb", q, kv_b, (0..still, all, rank), each, true)
            }
        };
        let norm = tensor("self_attn.kv_a_layernorm", "attn_kv_a_norm", rank);
        let (norm, _) = b.head_norm("kv_norm", norm);
        let q = b.ops().latent_kv("latent", q, kv, (norm, EPS), rope, self.pairs);
        b.ops().latent_attention("attn", q, self.scale)
    }

    /// The values of each head, of what attention made.
    fn values(&self, config: &ModelConfig, b: &mut Builder<'_>, a: ValueId) -> ValueId {
        let Latent { rank, still, value, .. } = *self;
        let heads = config.q_heads;
        let (source, rows) = match self.apart {
            true => (tensor("", "attn_v_b", heads * value).folded(heads), (0..value, value, rank)),
            false => {
                let all = still + value;
                let kv_b = tensor("self_attn.kv_b_proj", "attn_kv_b", heads * all);
                (kv_b, (still..all, all, rank))
            }
        };
        b.head_linear("values", a, source, rows, rank, false)
    }
}

impl Decoder for Latent {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    /// Layers behind the last draft tokens.
    fn ignores(&self, tensor: &str) -> bool {
        is_behind(tensor, self.experts.layers.len())
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope_of(&self.rope, self.rotated);
        let norm = |json, gguf| tensor(json, gguf, config.hidden);
        let x = b.embed();
        let x = layers(config, b, x, |b, layer, x| {
            let h = b.rms_norm("attn_norm", x, norm("input_layernorm", "attn_norm"));
            let a = self.attend(config, b, h, rope);
            let (a, x) = last_tokens(b, a, x);
            let v = self.values(config, b, a);
            let o = output(config, b, v);
            let x = b.ops().add("attn_out", x, o);
            let h = b.rms_norm("mlp_norm", x, norm("post_attention_layernorm", "ffn_norm"));
            if self.experts.layers[layer] {
                return self.experts.build(b, x, h);
            }
            let d = gated_mlp(config, b, h, Activation::Silu);
            b.ops().add("mlp_out", x, d)
        });
        end(config, b, x, |_, logits| logits);
    }
}
