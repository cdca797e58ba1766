//! Gated delta nets: layers that carry a matrix of each head from token to token instead of keeping keys and values, and
//! attention with a gated output in every few layers.

use super::experts::Experts;
use super::{Attention, gated_mlp, last_token, last_tokens, layers, output, rotate_and_attend};
use crate::Builder;
use crate::builder::{Source, tensor};
use crate::config::{Fields, ModelConfig, Rope};
use crate::families::Decoder;
use crate::weights::Cut;
use device::op::Activation;
use formats::{Result, limits};
use graph::program::{Gate, Heads, RopeId, Rule, ValueId};

/// How checkpoints store what recurrent layers make of their input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inputs {
    /// Qwen3-Next: a query, a key, values and gates of each group of heads, one group after the other.
    Grouped,
    /// Qwen3.5: a tensor for each.
    Separate,
}

/// The decoder of Qwen3-Next and Qwen3.5.
#[derive(Debug)]
pub(crate) struct DeltaNet {
    /// Which layers attend; the others are recurrent.
    pub(crate) attends: Vec<bool>,
    pub(crate) rope: Rope,
    /// Elements of a head that are rotated.
    pub(crate) rotated: usize,
    /// Heads of recurrent layers.
    pub(crate) heads: Heads,
    /// Tokens that a convolution sees.
    pub(crate) taps: usize,
    pub(crate) inputs: Inputs,
    pub(crate) experts: Option<Experts>,
}

impl DeltaNet {
    /// The fields of layers; every fourth attends where the configuration does not list them.
    pub(crate) fn read(
        f: &Fields<'_>,
        config: &ModelConfig,
        inputs: Inputs,
        experts: Option<Experts>,
    ) -> Result<DeltaNet> {
        let size = |name: &str, usual: usize, most: usize| {
            let found = f.size(name, "")?.unwrap_or(usual);
            match (1..=most).contains(&found) {
                true => Ok(found),
                false => Err(f.invalid(name, found, format!("1 to {most}"))),
            }
        };
        let wide = limits::WIDTH as usize;
        let (heads, groups) =
            (size("linear_num_value_heads", 32, wide)?, size("linear_num_key_heads", 16, wide)?);
        let (key, value) =
            (size("linear_key_head_dim", 128, 256)?, size("linear_value_head_dim", 128, wide)?);
        for (name, elements) in [("linear_key_head_dim", key), ("linear_value_head_dim", value)] {
            if !elements.is_multiple_of(8) {
                return Err(f.invalid(name, elements, "a multiple of 8"));
            }
        }
        if !heads.is_multiple_of(groups) {
            return Err(f.invalid("linear_num_key_heads", groups, format!("a part of {heads}")));
        }
        let all = 2 * groups.saturating_mul(key).saturating_add(heads.saturating_mul(value));
        if all > wide {
            return Err(f.invalid("linear_num_value_heads", heads, format!("{wide} in all")));
        }
        let taps = size("linear_conv_kernel_dim", 4, 8)?.max(2);
        let part = match f.object("rope_parameters")? {
            Some(own) => own.number("partial_rotary_factor", "")?,
            None => None,
        };
        let part = part.or(f.number("partial_rotary_factor", "")?).unwrap_or(0.25);
        let rotated = (config.head_dim as f64 * part) as usize;
        let [heads, groups, key, value] = [heads, groups, key, value].map(|n| n as u32);
        Ok(DeltaNet {
            attends: attends(f, config.layers)?,
            rope: Rope::read(f)?.first(rotated),
            rotated,
            heads: Heads { heads, groups, key, value },
            taps,
            inputs,
            experts,
        })
    }

    /// The rows that make queries, keys, values and output gates of a token, and those that make its two gates of each
    /// head.
    fn inputs(&self) -> [Vec<Source>; 2] {
        let Heads { heads, groups, key, value } = self.heads;
        let [heads, groups, key, value] = [heads, groups, key, value].map(|n| n as usize);
        if self.inputs == Inputs::Separate {
            let values = heads * value;
            let all = tensor("linear_attn.in_proj_qkv", "", 2 * groups * key + values);
            let output = tensor("linear_attn.in_proj_z", "", values);
            let gates = ["linear_attn.in_proj_b", "linear_attn.in_proj_a"];
            return [vec![all, output], gates.map(|name| tensor(name, "", heads)).into()];
        }
        let share = heads / groups;
        let each = 2 * key + 2 * share * value;
        let all = tensor("linear_attn.in_proj_qkvz", "", groups * each);
        let part = |from: usize, rows: usize| {
            (0..groups).map(move |group| all.part(group * each + from, rows))
        };
        let values_at = 2 * key;
        let x = part(0, key)
            .chain(part(key, key))
            .chain(part(values_at, share * value))
            .chain(part(values_at + share * value, share * value));
        let both = tensor("linear_attn.in_proj_ba", "", 2 * heads);
        let gates = |from: usize| (0..groups).map(move |g| both.part(g * 2 * share + from, share));
        [x.collect(), gates(0).chain(gates(share)).collect()]
    }

    /// What a recurrent layer makes of `h`, and `stream`: in the last layer of the last token of each row only.
    fn recur(
        &self,
        config: &ModelConfig,
        b: &mut Builder<'_>,
        h: ValueId,
        stream: ValueId,
    ) -> (ValueId, ValueId) {
        let Heads { heads, groups, key, value } = self.heads;
        let [heads, groups, key, value] = [heads, groups, key, value].map(|n| n as usize);
        let (keys, values) = (groups * key, heads * value);
        let [x, gates] = self.inputs();
        let x = b.linear("delta_in", h, &x, false, Cut::Whole);
        let gates = b.linear("delta_gates", h, &gates, false, Cut::Whole);
        let channels = tensor("linear_attn.conv1d", "", 2 * keys + values);
        let c = b.conv("conv", (x, 0), channels, self.taps, false);
        let vectors = (
            tensor("linear_attn.A_log", "", heads),
            tensor("linear_attn.dt_bias", "", heads),
            None,
        );
        let o = b.scan("scan", c, (gates, 0), vectors, Rule::Delta, self.heads);
        let (o, stream) = last_tokens(b, o, stream);
        let x = last_token(b, "gate_last", x);
        let norm = (tensor("linear_attn.norm", "", value), value);
        let o = b.gated_norm("scan_norm", o, (x, 2 * keys + values), norm, false);
        let source = tensor("linear_attn.out_proj", "", config.hidden);
        (b.linear("delta_out", o, &[source], false, Cut::Cols), stream)
    }

    /// Attention of `h`, each element of a head multiplied by a gate, and its output projection; and `stream` likewise.
    fn attend(
        &self,
        config: &ModelConfig,
        b: &mut Builder<'_>,
        (h, stream): (ValueId, ValueId),
        rope: RopeId,
    ) -> (ValueId, ValueId) {
        let (dim, heads) = (config.head_dim, config.q_heads);
        // Checkpoints have the gate of a head behind its query.
        let all = tensor("self_attn.q_proj", "", 2 * heads * dim);
        let part = |from: usize| (0..heads).map(move |head| all.part(head * 2 * dim + from, dim));
        let kv = config.kv_width();
        let keys = tensor("self_attn.k_proj", "", kv).rotated(self.rotated);
        let sources: Vec<Source> = part(0)
            .map(|source| source.rotated(self.rotated))
            .chain([keys, tensor("self_attn.v_proj", "", kv)])
            .collect();
        let qkv = b.linear("qkv", h, &sources, false, Cut::Whole);
        let gates: Vec<Source> = part(dim).collect();
        let options = Attention {
            head_norms: true,
            norms_less_one: true,
            rotated: self.rotated,
            ..Attention::new(config, rope)
        };
        let a = rotate_and_attend(config, b, qkv, &options);
        let (a, stream) = last_tokens(b, a, stream);
        let h = last_token(b, "gate_last", h);
        let gate = b.linear("attn_gate", h, &gates, false, Cut::Whole);
        let a = b.ops().gated("attn_gated", a, (gate, 0), Gate::Sigmoid, None, false);
        (output(config, b, a), stream)
    }
}

/// Which layers attend.
fn attends(f: &Fields<'_>, layers: usize) -> Result<Vec<bool>> {
    let Some(kinds) = f.texts("layer_types")? else {
        let every = f.size("full_attention_interval", "")?.unwrap_or(4).max(1);
        return Ok((1..=layers).map(|layer| layer.is_multiple_of(every)).collect());
    };
    if kinds.len() != layers {
        return Err(f.invalid("layer_types", kinds.len(), format!("{layers} entries")));
    }
    let attends = |(layer, kind): (usize, &&str)| match *kind {
        "full_attention" => Ok(true),
        "linear_attention" => Ok(false),
        other => {
            let known = "full_attention, linear_attention";
            Err(f.unsupported(&format!("layer_types[{layer}]"), other, known))
        }
    };
    kinds.iter().enumerate().map(attends).collect()
}

impl Decoder for DeltaNet {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    /// Layers that draft tokens, and what sees images.
    fn ignores(&self, tensor: &str) -> bool {
        ["mtp.", "model.visual."].iter().any(|root| tensor.starts_with(root))
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&self.rope);
        // Norms of the residual stream are stored less 1.
        let norm = |json| tensor(json, "", config.hidden).less_one();
        let x = b.embed();
        let x = layers(config, b, x, |b, layer, x| {
            let h = b.rms_norm("attn_norm", x, norm("input_layernorm"));
            let (o, x) = match self.attends[layer] {
                true => self.attend(config, b, (h, x), rope),
                false => self.recur(config, b, h, x),
            };
            let x = b.ops().add("attn_out", x, o);
            let h = b.rms_norm("mlp_norm", x, norm("post_attention_layernorm"));
            if let Some(experts) = self.experts.as_ref().filter(|experts| experts.layers[layer]) {
                return experts.build(b, x, h);
            }
            let d = gated_mlp(config, b, h, Activation::Silu);
            b.ops().add("mlp_out", x, d)
        });
        let h = b.rms_norm("norm", x, norm("norm"));
        b.end(h, |_, logits| logits);
    }
}
