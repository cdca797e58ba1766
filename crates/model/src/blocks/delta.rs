//! Gated delta nets: layers that carry a matrix of each head from token to token instead of keeping keys and values, and
//! attention with a gated output in every few layers.

use super::experts::Experts;
use super::mamba::inner_of_head;
use super::{
    Attention, gated_mlp, is_behind, last_token, last_tokens, layers, output, rotate_and_attend,
};
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
    /// The same in GGUF files: queries, keys and values of all groups, output gates of all groups, and the gates of each
    /// group.
    GroupedGates,
    /// Qwen3.5: a tensor for each. The converter to GGUF lets groups take turns.
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
        let attends = attends(f, config.layers)?;
        if !attends.contains(&true) {
            return Err(f.unsupported("layers", "no attention", "some layers that attend"));
        }
        let rotated = rotated(f, config.head_dim)?;
        Ok(DeltaNet {
            attends,
            rope: Rope::read(f)?.first(rotated),
            rotated,
            heads: heads(f, inputs)?,
            taps: sized(f, ("linear_conv_kernel_dim", "ssm.conv_kernel"), 4, 8)?.max(2),
            inputs,
            experts,
        })
    }

    /// The rows that make queries, keys, values and output gates of a token, and those that make its two gates of each
    /// head.
    fn inputs(&self) -> [Vec<Source>; 2] {
        let Heads { heads, groups, key, value, .. } = self.heads;
        let [heads, groups, key, value] = [heads, groups, key, value].map(|n| n as usize);
        let share = heads / groups;
        let both = tensor("linear_attn.in_proj_ba", "ssm_ba", 2 * heads);
        let gates = |from: usize| (0..groups).map(move |g| both.part(g * 2 * share + from, share));
        let gates: Vec<Source> = match self.inputs {
            Inputs::Separate => vec![
                tensor("linear_attn.in_proj_b", "ssm_beta", heads),
                tensor("linear_attn.in_proj_a", "ssm_alpha", heads),
            ],
            Inputs::Grouped | Inputs::GroupedGates => gates(0).chain(gates(share)).collect(),
        };
        if self.inputs != Inputs::Grouped {
            let (values, name) = (heads * value, "linear_attn.in_proj_qkv");
            let all = tensor(name, "attn_qkv", 2 * groups * key + values);
            return [vec![all, tensor("linear_attn.in_proj_z", "attn_gate", values)], gates];
        }
        let each = 2 * key + 2 * share * value;
        let all = tensor("linear_attn.in_proj_qkvz", "ssm_in", groups * each);
        let part = |from: usize, rows: usize| {
            (0..groups).map(move |group| all.part(group * each + from, rows))
        };
        let values_at = 2 * key;
        let x = part(0, key)
            .chain(part(key, key))
            .chain(part(values_at, share * value))
            .chain(part(values_at + share * value, share * value));
        [x.collect(), gates]
    }

    /// What a recurrent layer makes of `h`, and `stream`: in the last layer of the last token of each row only.
    fn recur(
        &self,
        config: &ModelConfig,
        b: &mut Builder<'_>,
        h: ValueId,
        stream: ValueId,
    ) -> (ValueId, ValueId) {
        let Heads { heads, groups, key, value, .. } = self.heads;
        let [heads, groups, key, value] = [heads, groups, key, value].map(|n| n as usize);
        let (keys, values) = (groups * key, heads * value);
        let [x, gates] = self.inputs();
        let x = b.linear("delta_in", h, &x, false, Cut::Whole);
        let gates = b.linear("delta_gates", h, &gates, false, Cut::Whole);
        let channels = tensor("linear_attn.conv1d", "ssm_conv1d", 2 * keys + values);
        let c = b.conv("conv", (x, 0), channels, self.taps, false);
        let vectors = (
            tensor("linear_attn.A_log", "ssm_a", heads).decay(),
            tensor("linear_attn.dt_bias", "ssm_dt.bias", heads),
            None,
        );
        let o = b.scan("scan", c, (gates, 0), vectors, Rule::Delta, self.heads);
        let (o, stream) = last_tokens(b, o, stream);
        let x = last_token(b, "gate_last", x);
        let norm = (tensor("linear_attn.norm", "ssm_norm", value), value);
        let o = b.gated_norm("scan_norm", o, (x, 2 * keys + values), norm, false);
        let source = tensor("linear_attn.out_proj", "ssm_out", config.hidden);
        (b.linear("delta_out", o, &[source], false, Cut::Cols), stream)
    }

    /// The rows that make queries, or with `gates` the gates behind them: checkpoints have the gate of a head behind its query.
    fn queries(&self, config: &ModelConfig, gates: bool) -> Vec<Source> {
        let (dim, heads) = (config.head_dim, config.q_heads);
        let all = tensor("self_attn.q_proj", "attn_q", 2 * heads * dim);
        let from = if gates { dim } else { 0 };
        (0..heads).map(|head| all.part(head * 2 * dim + from, dim)).collect()
    }

    /// Attention of `h`, without gates.
    fn attention(
        &self,
        config: &ModelConfig,
        b: &mut Builder<'_>,
        h: ValueId,
        rope: RopeId,
    ) -> ValueId {
        let kv = config.kv_width();
        let keys = tensor("self_attn.k_proj", "attn_k", kv).rotated(self.rotated);
        let queries = self.queries(config, false).into_iter();
        let sources: Vec<Source> = queries
            .map(|source| source.rotated(self.rotated))
            .chain([keys, tensor("self_attn.v_proj", "attn_v", kv)])
            .collect();
        let qkv = b.linear("qkv", h, &sources, false, Cut::Whole);
        let options = Attention {
            head_norms: true,
            norms_less_one: true,
            rotated: self.rotated,
            ..Attention::new(config, rope)
        };
        rotate_and_attend(config, b, qkv, &options)
    }

    /// Each element of `a` multiplied by its gate, which `h` makes, and the output projection.
    fn gated(&self, config: &ModelConfig, b: &mut Builder<'_>, a: ValueId, h: ValueId) -> ValueId {
        let gate = b.linear("attn_gate", h, &self.queries(config, true), false, Cut::Whole);
        let a = b.ops().gated("attn_gated", a, (gate, 0), Gate::Sigmoid, None, false);
        output(config, b, a)
    }

    /// Attention of `h` and its output projection, and `stream`: in the last layer of the last token of each row only.
    fn attend(
        &self,
        config: &ModelConfig,
        b: &mut Builder<'_>,
        (h, stream): (ValueId, ValueId),
        rope: RopeId,
    ) -> (ValueId, ValueId) {
        let a = self.attention(config, b, h, rope);
        let (a, stream) = last_tokens(b, a, stream);
        let h = last_token(b, "gate_last", h);
        (self.gated(config, b, a, h), stream)
    }

    /// What comes after attention or recurrence; `experts` in place of an MLP.
    fn after(
        &self,
        config: &ModelConfig,
        b: &mut Builder<'_>,
        x: ValueId,
        experts: Option<&Experts>,
    ) -> ValueId {
        let h = b.rms_norm(
            "mlp_norm",
            x,
            norm(config, "post_attention_layernorm", "post_attention_norm"),
        );
        if let Some(experts) = experts {
            return experts.build(b, x, h);
        }
        let d = gated_mlp(config, b, h, Activation::Silu);
        b.ops().add("mlp_out", x, d)
    }
}

/// The weight of a norm of the residual stream, which is stored less 1.
fn norm(config: &ModelConfig, json: &'static str, gguf: &'static str) -> Source {
    tensor(json, gguf, config.hidden).less_one()
}

/// A number from 1 to `most` by its two names.
fn sized(f: &Fields<'_>, (json, gguf): (&str, &str), usual: usize, most: usize) -> Result<usize> {
    let found = match f.is_gguf() {
        true => f.required(json, gguf)?,
        false => f.size(json, gguf)?.unwrap_or(usual),
    };
    match (1..=most).contains(&found) {
        true => Ok(found),
        false => Err(f.invalid(&f.called(json, gguf), found, format!("1 to {most}"))),
    }
}

/// The heads of recurrent layers.
fn heads(f: &Fields<'_>, inputs: Inputs) -> Result<Heads> {
    let wide = limits::WIDTH as usize;
    let value_heads = ("linear_num_value_heads", "ssm.time_step_rank");
    let key_heads = ("linear_num_key_heads", "ssm.group_count");
    let key_dim = ("linear_key_head_dim", "ssm.state_size");
    let value_dim = ("linear_value_head_dim", "ssm.inner_size");
    let (heads, groups) = (sized(f, value_heads, 32, wide)?, sized(f, key_heads, 16, wide)?);
    let key = sized(f, key_dim, 128, 256)?;
    let value = match f.is_gguf() {
        true => inner_of_head(f, heads)?,
        false => sized(f, value_dim, 128, wide)?,
    };
    for ((json, gguf), elements) in [(key_dim, key), (value_dim, value)] {
        if elements == 0 || !elements.is_multiple_of(8) {
            return Err(f.invalid(&f.called(json, gguf), elements, "a multiple of 8"));
        }
    }
    if !heads.is_multiple_of(groups) {
        let name = f.called(key_heads.0, key_heads.1);
        return Err(f.invalid(&name, groups, format!("a part of {heads}")));
    }
    let all = 2 * groups.saturating_mul(key).saturating_add(heads.saturating_mul(value));
    if all > wide {
        let name = f.called(value_heads.0, value_heads.1);
        return Err(f.invalid(&name, heads, format!("{wide} in all")));
    }
    let turns = f.is_gguf() && inputs == Inputs::Separate;
    let [heads, groups, key, value] = [heads, groups, key, value].map(|n| n as u32);
    Ok(Heads { heads, groups, turns, key, value })
}

/// Elements of a head that are rotated.
fn rotated(f: &Fields<'_>, head_dim: usize) -> Result<usize> {
    if let Some(rotated) = f.size("", "rope.dimension_count")? {
        return Ok(rotated);
    }
    let part = match f.object("rope_parameters")? {
        Some(own) => own.number("partial_rotary_factor", "")?,
        None => None,
    };
    let part = part.or(f.number("partial_rotary_factor", "")?).unwrap_or(0.25);
    Ok((head_dim as f64 * part) as usize)
}

/// Which layers attend: in a GGUF file those with a matrix for queries alone.
fn attends(f: &Fields<'_>, layers: usize) -> Result<Vec<bool>> {
    if f.is_gguf() {
        let has = |layer| f.has_tensor(&format!("blk.{layer}.attn_q.weight"));
        return Ok((0..layers).map(has).collect());
    }
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
            || is_behind(tensor, self.attends.len())
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&self.rope);
        let x = b.embed();
        let x = layers(config, b, x, |b, layer, x| {
            let h = b.rms_norm("attn_norm", x, norm(config, "input_layernorm", "attn_norm"));
            let (o, x) = match self.attends[layer] {
                true => self.attend(config, b, (h, x), rope),
                false => self.recur(config, b, h, x),
            };
            let x = b.ops().add("attn_out", x, o);
            let experts = self.experts.as_ref().filter(|experts| experts.layers[layer]);
            self.after(config, b, x, experts)
        });
        let h = b.rms_norm("norm", x, norm(config, "norm", "output_norm"));
        b.end(h, |_, logits| logits);
    }

    /// It attends, and has experts where other layers do.
    fn next_layer(
        &self,
        config: &ModelConfig,
        b: &mut Builder<'_>,
        x: ValueId,
        fed: bool,
    ) -> Option<ValueId> {
        let rope = b.rope(&self.rope);
        let h = b.rms_norm("attn_norm", x, norm(config, "input_layernorm", ""));
        let a = self.attention(config, b, h, rope);
        if fed {
            return Some(a);
        }
        let o = self.gated(config, b, a, h);
        let x = b.ops().add("attn_out", x, o);
        Some(self.after(config, b, x, self.experts.as_ref()))
    }

    fn norms_less_one(&self) -> bool {
        true
    }
}
