//! Parts of decoders that several families share.

use crate::Builder;
use crate::builder::tensor;
use crate::config::{ModelConfig, Rope};
use crate::families::Decoder;
use crate::weights::Cut;
use graph::program::{RopeId, ValueId};

/// Llama's block with the options that Mistral, Qwen 2 and Qwen 3 differ in.
#[derive(Debug)]
pub(crate) struct Dense {
    pub(crate) rope: Rope,
    /// A bias on queries, keys and values.
    pub(crate) qkv_bias: bool,
    /// Norms over the elements of each query and key head.
    pub(crate) head_norms: bool,
    /// How far back each layer looks; `None` is the whole context.
    pub(crate) windows: Vec<Option<usize>>,
}

impl Decoder for Dense {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&self.rope);
        decoder(config, b, |b, layer, x| {
            let h =
                b.rms_norm("attn_norm", x, tensor("input_layernorm", "attn_norm", config.hidden));
            let options = Attention {
                qkv_bias: self.qkv_bias,
                head_norms: self.head_norms,
                window: self.windows[layer],
                ..Attention::new(config, rope)
            };
            let a = attention(config, b, h, &options);
            let (a, x) = last_tokens(b, a, x);
            let o = output(config, b, a);
            let x = b.ops().add("attn_out", x, o);
            let norm = tensor("post_attention_layernorm", "ffn_norm", config.hidden);
            let h = b.rms_norm("mlp_norm", x, norm);
            let d = gated_mlp(config, b, h);
            b.ops().add("mlp_out", x, d)
        });
    }
}

/// Embedding, layers, last norm, head, sampler.
pub(crate) fn decoder(
    config: &ModelConfig,
    b: &mut Builder<'_>,
    layer: impl Fn(&mut Builder<'_>, usize, ValueId) -> ValueId,
) {
    let mut x = b.embed();
    for index in 0..config.layers {
        x = b.layer(index, |b| layer(b, index, x));
    }
    let h = b.rms_norm("norm", x, tensor("norm", "output_norm", config.hidden));
    let logits = b.logits(h);
    b.ops().sample("sample", logits);
}

/// How a layer attends.
pub(crate) struct Attention {
    pub(crate) qkv_bias: bool,
    pub(crate) head_norms: bool,
    pub(crate) rope: RopeId,
    /// Elements of a head that are rotated.
    pub(crate) rotated: usize,
    pub(crate) window: Option<usize>,
    pub(crate) scale: f32,
}

impl Attention {
    /// Whole heads rotated, the whole context, no norms, no bias.
    pub(crate) fn new(config: &ModelConfig, rope: RopeId) -> Attention {
        let (rotated, scale) = (config.head_dim, (config.head_dim as f32).powf(-0.5));
        Attention { qkv_bias: false, head_norms: false, rope, rotated, window: None, scale }
    }
}

/// Attention of `h`, without the output projection.
pub(crate) fn attention(
    config: &ModelConfig,
    b: &mut Builder<'_>,
    h: ValueId,
    options: &Attention,
) -> ValueId {
    let (q, kv) = (config.q_width(), config.kv_width());
    let sources = [
        tensor("self_attn.q_proj", "attn_q", q).rotated(options.rotated),
        tensor("self_attn.k_proj", "attn_k", kv).rotated(options.rotated),
        tensor("self_attn.v_proj", "attn_v", kv),
    ];
    let qkv = b.linear("qkv", h, &sources, options.qkv_bias, Cut::Rows);
    let mut norm = |name: &'static str, json, gguf| {
        let source = tensor(json, gguf, config.head_dim);
        options.head_norms.then(|| b.head_norm(name, source))
    };
    let q_norm = norm("q_norm", "self_attn.q_norm", "attn_q_norm");
    let k_norm = norm("k_norm", "self_attn.k_norm", "attn_k_norm");
    let qkv = b.rope_kv("rope", qkv, q_norm, k_norm, options.rope);
    let window = options.window.map(|window| window as u32);
    b.ops().attention("attn", qkv, options.scale, window)
}

/// Behind the last layer's pages only the last token of each row matters: from there on it is the only one.
pub(crate) fn last_tokens(b: &mut Builder<'_>, a: ValueId, x: ValueId) -> (ValueId, ValueId) {
    match b.in_last_layer() {
        true => (b.ops().gather_last("attn_last", a), b.ops().gather_last("last", x)),
        false => (a, x),
    }
}

/// The output projection of attention.
pub(crate) fn output(config: &ModelConfig, b: &mut Builder<'_>, a: ValueId) -> ValueId {
    b.linear("o", a, &[tensor("self_attn.o_proj", "attn_output", config.hidden)], false, Cut::Cols)
}

/// down(silu(gate(h)) · up(h))
pub(crate) fn gated_mlp(config: &ModelConfig, b: &mut Builder<'_>, h: ValueId) -> ValueId {
    let inner = config.intermediate;
    let sources =
        [tensor("mlp.gate_proj", "ffn_gate", inner), tensor("mlp.up_proj", "ffn_up", inner)];
    let g = b.gate_up("gate_up", h, sources);
    let m = b.ops().silu_mul("act", g);
    b.linear("down", m, &[tensor("mlp.down_proj", "ffn_down", config.hidden)], false, Cut::Cols)
}
