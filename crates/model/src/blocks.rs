//! Parts of decoders that several families share.

pub(crate) mod delta;
pub(crate) mod experts;
pub(crate) mod latent;
pub(crate) mod mamba;

use crate::Builder;
use crate::builder::{Source, tensor};
use crate::config::{ModelConfig, Rope};
use crate::families::Decoder;
use crate::weights::Cut;
use device::op::Activation;
use experts::Experts;
use graph::program::{RopeId, ValueId, WeightRef};

/// Llama's block with the options that Mistral, Mixtral, Qwen 2, Qwen 3 and SmolLM3 differ in.
#[derive(Debug)]
pub(crate) struct Dense {
    pub(crate) rope: Rope,
    /// Which layers are rotated.
    pub(crate) rotated: Vec<bool>,
    /// A bias on queries, keys and values.
    pub(crate) qkv_bias: bool,
    /// Norms over the elements of each query and key head.
    pub(crate) head_norms: bool,
    /// How far back each layer looks; `None` is the whole context.
    pub(crate) windows: Vec<Option<usize>>,
    /// Experts in place of MLPs.
    pub(crate) experts: Option<Experts>,
}

impl Dense {
    /// Every layer rotated, the whole context, no norms on heads, no bias.
    pub(crate) fn new(config: &ModelConfig, rope: Rope) -> Dense {
        let (rotated, windows) = (vec![true; config.layers], vec![None; config.layers]);
        Dense { rope, rotated, qkv_bias: false, head_norms: false, windows, experts: None }
    }
}

impl Decoder for Dense {
    fn ropes(&self) -> Vec<Rope> {
        let still = self.rotated.contains(&false).then(Rope::still);
        [self.rope.clone()].into_iter().chain(still).collect()
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let ropes: Vec<RopeId> = self.ropes().iter().map(|rope| b.rope(rope)).collect();
        let norm = |json, gguf| tensor(json, gguf, config.hidden);
        let x = b.embed();
        let x = layers(config, b, x, |b, layer, x| {
            let h = b.rms_norm("attn_norm", x, norm("input_layernorm", "attn_norm"));
            let options = Attention {
                qkv_bias: self.qkv_bias,
                head_norms: self.head_norms,
                window: self.windows[layer],
                ..Attention::new(config, ropes[usize::from(!self.rotated[layer])])
            };
            let a = attention(config, b, h, &options);
            let (a, x) = last_tokens(b, a, x);
            let o = output(config, b, a);
            let x = b.ops().add("attn_out", x, o);
            let h = b.rms_norm("mlp_norm", x, norm("post_attention_layernorm", "ffn_norm"));
            if let Some(experts) = self.experts.as_ref().filter(|experts| experts.layers[layer]) {
                return experts.build(b, x, h);
            }
            let d = gated_mlp(config, b, h, Activation::Silu);
            b.ops().add("mlp_out", x, d)
        });
        end(config, b, x, |_, logits| logits);
    }
}

/// Every layer, each over what the one before it made.
pub(crate) fn layers(
    config: &ModelConfig,
    b: &mut Builder<'_>,
    mut x: ValueId,
    layer: impl Fn(&mut Builder<'_>, usize, ValueId) -> ValueId,
) -> ValueId {
    for index in 0..config.layers {
        x = b.layer(index, |b| layer(b, index, x));
    }
    x
}

/// Whether a tensor is of a layer behind the model's own: one that drafts tokens.
pub(crate) fn is_behind(tensor: &str, layers: usize) -> bool {
    let rest = ["blk.", "model.layers."].iter().find_map(|root| tensor.strip_prefix(root));
    let number = rest.and_then(|rest| rest.split_once('.'));
    let number = number.and_then(|(number, _)| number.parse::<usize>().ok());
    number.is_some_and(|layer| layer >= layers)
}

/// The last norm, and the end of the program.
pub(crate) fn end(
    config: &ModelConfig,
    b: &mut Builder<'_>,
    x: ValueId,
    adjust: impl FnOnce(&mut Builder<'_>, ValueId) -> ValueId,
) {
    let h = b.rms_norm("norm", x, tensor("norm", "output_norm", config.hidden));
    b.end(h, adjust);
}

/// How a layer attends.
pub(crate) struct Attention {
    pub(crate) qkv_bias: bool,
    pub(crate) head_norms: bool,
    /// Whether llama.cpp multiplies queries by `scale` instead of scores; there must be head norms.
    pub(crate) scaled_queries: bool,
    /// Whether checkpoints store the weights of head norms less 1.
    pub(crate) norms_less_one: bool,
    pub(crate) rope: RopeId,
    /// Elements of a head that are rotated.
    pub(crate) rotated: usize,
    pub(crate) window: Option<usize>,
    pub(crate) scale: f32,
    /// Scores stay below this.
    pub(crate) score_cap: Option<f32>,
    /// A learned score for each query head; without a cap.
    pub(crate) sinks: Option<Source>,
}

impl Attention {
    /// Whole heads rotated, the whole context, no norms, no bias.
    pub(crate) fn new(config: &ModelConfig, rope: RopeId) -> Attention {
        Attention {
            qkv_bias: false,
            head_norms: false,
            scaled_queries: false,
            norms_less_one: false,
            rope,
            rotated: config.head_dim,
            window: None,
            scale: (config.head_dim as f32).powf(-0.5),
            score_cap: None,
            sinks: None,
        }
    }
}

/// Attention of `h`, without the output projection.
pub(crate) fn attention(
    config: &ModelConfig,
    b: &mut Builder<'_>,
    h: ValueId,
    options: &Attention,
) -> ValueId {
    attend(config, b, h, &qkv_sources(config, options.rotated), options)
}

/// Queries, keys and values in tensors of their own; the first `rotated` elements of a head are rotated.
pub(crate) fn qkv_sources(config: &ModelConfig, rotated: usize) -> [Source; 3] {
    let (q, kv) = (config.q_width(), config.kv_width());
    [
        tensor("self_attn.q_proj", "attn_q", q).rotated(rotated),
        tensor("self_attn.k_proj", "attn_k", kv).rotated(rotated),
        tensor("self_attn.v_proj", "attn_v", kv),
    ]
}

/// The same, with queries, keys and values from `sources`.
pub(crate) fn attend(
    config: &ModelConfig,
    b: &mut Builder<'_>,
    h: ValueId,
    sources: &[Source; 3],
    options: &Attention,
) -> ValueId {
    let qkv = b.linear("qkv", h, sources, options.qkv_bias, Cut::Rows);
    rotate_and_attend(config, b, qkv, options)
}

/// Attention of joined queries, keys and values that are not yet rotated.
pub(crate) fn rotate_and_attend(
    config: &ModelConfig,
    b: &mut Builder<'_>,
    qkv: ValueId,
    options: &Attention,
) -> ValueId {
    // Where llama.cpp scales queries instead of scores and rounds them afterwards, the queries' norm scales
    // them here.
    let (factor, scale) = match options.scaled_queries && b.is_ggml() {
        true => (options.scale, 1.0),
        false => (1.0, options.scale),
    };
    let mut norm = |name, json, gguf, factor| -> Option<(WeightRef, f32)> {
        let mut source = tensor(json, gguf, config.head_dim).rotated(options.rotated).times(factor);
        if options.norms_less_one {
            source = source.less_one();
        }
        options.head_norms.then(|| b.head_norm(name, source))
    };
    let q_norm = norm("q_norm", "self_attn.q_norm", "attn_q_norm", factor);
    let k_norm = norm("k_norm", "self_attn.k_norm", "attn_k_norm", 1.0);
    let qkv = b.rope_kv("rope", qkv, q_norm, k_norm, options.rope);
    let window = options.window.map(|window| window as u32);
    if let Some(sinks) = options.sinks {
        let sinks = b.sinks(sinks);
        return b.ops().attention_with_sinks("attn", qkv, sinks, scale, window);
    }
    b.ops().attention_capped("attn", qkv, scale, options.score_cap, window)
}

/// Attention of `h`, without the output projection, with a norm over all queries of a token and one over all keys.
pub(crate) fn attend_with_wide_norms(
    config: &ModelConfig,
    b: &mut Builder<'_>,
    h: ValueId,
    rope: RopeId,
) -> ValueId {
    let (q, kv, dim) = (config.q_width(), config.kv_width(), config.head_dim);
    let qkv = b.linear("qkv", h, &qkv_sources(config, dim), false, Cut::Rows);
    let q_norm = tensor("self_attn.q_norm", "attn_q_norm", q).rotated(dim);
    let k_norm = tensor("self_attn.k_norm", "attn_k_norm", kv).rotated(dim);
    let qkv = b.rms_norm_columns("q_norm", qkv, 0, q_norm);
    let qkv = b.rms_norm_columns("k_norm", qkv, q, k_norm);
    rotate_and_attend(config, b, qkv, &Attention::new(config, rope))
}

/// After the last layer's KV write only the last token of each row matters: it is gathered there.
pub(crate) fn last_tokens(b: &mut Builder<'_>, a: ValueId, x: ValueId) -> (ValueId, ValueId) {
    (last_token(b, "attn_last", a), last_token(b, "last", x))
}

/// In the last layer, the last token of each row of `x`.
pub(crate) fn last_token(b: &mut Builder<'_>, name: &str, x: ValueId) -> ValueId {
    if b.in_last_layer() { b.ops().gather_last(name, x) } else { x }
}

/// The output projection of attention, and `x`: in the last layer of the last token of each row only. llama.cpp projects
/// every token there, and the order of its sums depends on how many there are.
pub(crate) fn project(
    config: &ModelConfig,
    b: &mut Builder<'_>,
    a: ValueId,
    x: ValueId,
) -> (ValueId, ValueId) {
    if b.is_ggml() {
        let o = output(config, b, a);
        return last_tokens(b, o, x);
    }
    let (a, x) = last_tokens(b, a, x);
    (output(config, b, a), x)
}

/// The output projection of attention.
pub(crate) fn output(config: &ModelConfig, b: &mut Builder<'_>, a: ValueId) -> ValueId {
    output_with(config, b, a, false)
}

/// The same, with a bias if it has one.
pub(crate) fn output_with(
    config: &ModelConfig,
    b: &mut Builder<'_>,
    a: ValueId,
    bias: bool,
) -> ValueId {
    b.linear("o", a, &[tensor("self_attn.o_proj", "attn_output", config.hidden)], bias, Cut::Cols)
}

/// down(act(gate(h)) · up(h))
pub(crate) fn gated_mlp(
    config: &ModelConfig,
    b: &mut Builder<'_>,
    h: ValueId,
    act: Activation,
) -> ValueId {
    let inner = config.intermediate;
    let sources =
        [tensor("mlp.gate_proj", "ffn_gate", inner), tensor("mlp.up_proj", "ffn_up", inner)];
    joined_mlp(config, b, h, sources, act)
}

/// The same, with gate and up from `sources`.
pub(crate) fn joined_mlp(
    config: &ModelConfig,
    b: &mut Builder<'_>,
    h: ValueId,
    [gate, up]: [Source; 2],
    act: Activation,
) -> ValueId {
    mlp(b, "", h, [gate, up, tensor("mlp.down_proj", "ffn_down", config.hidden)], act)
}

/// The same with gate, up and down from `sources`; names of steps and weights have `prefix` in front.
pub(crate) fn mlp(
    b: &mut Builder<'_>,
    prefix: &str,
    h: ValueId,
    [gate, up, down]: [Source; 3],
    act: Activation,
) -> ValueId {
    let name = |which: &str| format!("{prefix}{which}");
    let g = b.gate_up(&name("gate_up"), h, [gate, up]);
    let m = b.ops().gate_mul(&name("act"), g, act);
    b.linear(&name("down"), m, &[down], false, Cut::Cols)
}

/// down(max(up(h), 0)²)
pub(crate) fn plain_mlp(
    b: &mut Builder<'_>,
    prefix: &str,
    h: ValueId,
    [up, down]: [Source; 2],
) -> ValueId {
    let name = |which: &str| format!("{prefix}{which}");
    let up = b.linear(&name("up"), h, &[up], false, Cut::Rows);
    let m = b.ops().activate(&name("act"), up, Activation::ReluSquared);
    b.linear(&name("down"), m, &[down], false, Cut::Cols)
}
