//! The dense decoder: Llama (SmolLM2 is one), Mistral, Qwen2 and Qwen3 differ only in what their
//! configuration says — a bias on q, k and v, norms on q and k heads, a window, a scaled rotation, a
//! head shared with the embedding — so one builder writes all of them down. A decoder with another
//! block gets a file like this one, and an arm in [`super::program`].

use super::weights::in_layer;
use device::DType;
use formats::config::ModelConfig;
use graph::program::{
    Activation, ModelShape, Program, ProgramBuilder, ProgramError, ValueId, WeightRef,
};

/// How numbers are kept on the device a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// Activations.
    pub act: DType,
    /// KV pages.
    pub kv: DType,
    /// Weights, where not each as the device multiplies it fastest.
    pub weights: Option<DType>,
}

impl Numbers {
    /// Nothing is rounded below float32: slow, and what everything else is compared with.
    pub const EXACT: Numbers =
        Numbers { act: DType::F32, kv: DType::F32, weights: Some(DType::F32) };
}

/// The program of a dense decoder; `stored` tells how each weight is kept.
pub fn program(
    config: &ModelConfig,
    numbers: Numbers,
    max_positions: u32,
    stored: &dyn Fn(&str) -> DType,
) -> Result<Program, ProgramError> {
    let shape = ModelShape {
        hidden: config.hidden as u32,
        q_heads: config.q_heads as u32,
        kv_heads: config.kv_heads as u32,
        head_dim: config.head_dim as u32,
        vocab: config.vocab as u32,
        layers: config.layers as u32,
        max_positions,
        act_dtype: numbers.act,
        kv_dtype: numbers.kv,
    };
    let model = Dense { config, shape, stored };
    let mut b = ProgramBuilder::new(config.family.name(), shape);
    let mut x = b.embed("embed", model.matrix("embed".into(), shape.vocab, shape.hidden));
    for layer in 0..config.layers {
        x = b.layer(layer as u32, |b| {
            let x = model.attention(b, layer, x);
            model.mlp(b, layer, x)
        });
    }
    let h = b.rms_norm("norm", x, model.norm("final_norm".into()), config.rms_eps);
    // One matrix serves both ends when it is stored alike for both.
    let shared = config.tied && stored("embed") == stored("lm_head");
    let head = if shared { "embed" } else { "lm_head" };
    let logits = b.logits("lm_head", h, model.matrix(head.into(), shape.vocab, shape.hidden));
    b.sample("sample", logits);
    b.finish()
}

struct Dense<'a> {
    config: &'a ModelConfig,
    shape: ModelShape,
    stored: &'a dyn Fn(&str) -> DType,
}

impl Dense<'_> {
    /// x + o(attention(rope(qkv(norm(x))))). Behind the last layer's pages only the last token of each row
    /// matters: from there on it is the only one.
    fn attention(&self, b: &mut ProgramBuilder, layer: usize, x: ValueId) -> ValueId {
        let (config, shape) = (self.config, self.shape);
        let name = |name| in_layer(layer, name);
        let head_norm = |which| {
            config.qk_norm.then(|| (self.vector(name(which), shape.head_dim), config.rms_eps))
        };
        let bias = config.qkv_bias.then(|| self.vector(name("qkv_bias"), shape.qkv_cols()));
        let h = b.rms_norm("attn_norm", x, self.norm(name("attn_norm")), config.rms_eps);
        let qkv =
            b.linear("qkv", h, self.matrix(name("qkv"), shape.qkv_cols(), shape.hidden), bias);
        let qkv = b.rope_kv("rope", qkv, head_norm("q_norm"), head_norm("k_norm"));
        let scale = (shape.head_dim as f32).powf(-0.5);
        let window = config.window(layer).map(|window| window as u32);
        let mut a = b.attention("attn", qkv, scale, window);
        let mut x = x;
        if layer + 1 == config.layers {
            (a, x) = (b.gather_last("attn_last", a), b.gather_last("last", x));
        }
        let o = b.linear("o", a, self.matrix(name("o"), shape.hidden, shape.q_cols()), None);
        b.add("attn_out", x, o)
    }

    /// x + down(silu(gate(norm(x))) · up(norm(x)))
    fn mlp(&self, b: &mut ProgramBuilder, layer: usize, x: ValueId) -> ValueId {
        let (hidden, inner) = (self.shape.hidden, self.config.intermediate as u32);
        let name = |name| in_layer(layer, name);
        let h = b.rms_norm("mlp_norm", x, self.norm(name("mlp_norm")), self.config.rms_eps);
        let gate_up = self.matrix(name("gate_up"), 2 * inner, hidden).gate_up();
        let g = b.linear("gate_up", h, gate_up, None);
        let m = b.gate_mul("act", g, Activation::Silu);
        let d = b.linear("down", m, self.matrix(name("down"), hidden, inner), None);
        b.add("mlp_out", x, d)
    }

    fn matrix(&self, name: String, rows: u32, cols: u32) -> WeightRef {
        let dtype = (self.stored)(&name);
        WeightRef::matrix(name, dtype, rows, cols)
    }

    fn vector(&self, name: String, len: u32) -> WeightRef {
        let dtype = (self.stored)(&name);
        WeightRef::vector(name, dtype, len)
    }

    fn norm(&self, name: String) -> WeightRef {
        self.vector(name, self.shape.hidden)
    }
}
