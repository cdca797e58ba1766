//! Small programs for examples and tests: the shape of a Llama-like model, at any size.

use super::{Activation, ModelShape, Pairs, Program, ProgramBuilder, WeightRef};
use device::DType;

/// What varies between the sample programs.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The model's numbers.
    pub shape: ModelShape,
    /// Width of the MLP.
    pub intermediate: u32,
    /// Weights' dtype.
    pub weights: DType,
    /// Normalise q and k heads, as Qwen3 does.
    pub qk_norm: bool,
    /// A bias on the qkv projection, as Qwen2 has.
    pub qkv_bias: bool,
    /// Head and embedding are one matrix.
    pub tied: bool,
    /// Sliding window of attention.
    pub window: Option<u32>,
}

impl Sample {
    /// A model that runs in microseconds.
    pub fn tiny() -> Sample {
        let shape = ModelShape {
            hidden: 32,
            q_heads: 4,
            kv_heads: 2,
            head_dim: 8,
            vocab: 64,
            layers: 2,
            max_positions: 256,
            act_dtype: DType::F32,
            kv_dtype: DType::F32,
        };
        Sample {
            shape,
            intermediate: 48,
            weights: DType::F32,
            qk_norm: true,
            qkv_bias: false,
            tied: true,
            window: None,
        }
    }

    /// Qwen3-8B's numbers, in bf16.
    pub fn qwen3_8b() -> Sample {
        let shape = ModelShape {
            hidden: 4096,
            q_heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocab: 151_936,
            layers: 36,
            max_positions: 40_960,
            act_dtype: DType::BF16,
            kv_dtype: DType::BF16,
        };
        let intermediate = 12_288;
        Sample { shape, intermediate, weights: DType::BF16, tied: false, ..Sample::tiny() }
    }

    /// Qwen3-0.6B's numbers, in bf16.
    pub fn qwen3_0_6b() -> Sample {
        let big = Sample::qwen3_8b();
        let shape = ModelShape { hidden: 1024, q_heads: 16, layers: 28, ..big.shape };
        Sample { shape, intermediate: 3072, tied: true, ..big }
    }

    /// The program.
    pub fn build(&self, name: &str) -> Program {
        let s = self.shape;
        let eps = 1e-6;
        let matrix = |name: String, rows, cols| WeightRef::matrix(name, self.weights, rows, cols);
        let vector = |name: String, len| WeightRef::vector(name, s.act_dtype, len);
        let mut b = ProgramBuilder::new(name, s);
        let rope = b.rope_table();
        let table = matrix("embed".into(), s.vocab, s.hidden);
        let mut x = b.embed("embed", table.clone());
        for l in 0..s.layers {
            x = b.layer(l, |b| {
                let qk = |which: &str| {
                    let weight = vector(format!("{l}.{which}_norm"), s.head_dim);
                    self.qk_norm.then_some((weight, eps))
                };
                let bias = self.qkv_bias.then(|| vector(format!("{l}.qkv_bias"), s.qkv_cols()));
                let h = b.rms_norm("attn_norm", x, vector(format!("{l}.attn_norm"), s.hidden), eps);
                let w = matrix(format!("{l}.qkv"), s.qkv_cols(), s.hidden);
                let qkv = b.linear("qkv", h, w, bias);
                let qkv = b.rope_kv("rope", qkv, qk("q"), qk("k"), rope, Pairs::Halves);
                let scale = (s.head_dim as f32).powf(-0.5);
                let a = b.attention("attn", qkv, scale, self.window);
                let o = b.linear("o", a, matrix(format!("{l}.o"), s.hidden, s.q_cols()), None);
                let x = b.add("attn_out", x, o);
                let h = b.rms_norm("mlp_norm", x, vector(format!("{l}.mlp_norm"), s.hidden), eps);
                let w = matrix(format!("{l}.gate_up"), 2 * self.intermediate, s.hidden).gate_up();
                let g = b.linear("gate_up", h, w, None);
                let m = b.gate_mul("act", g, Activation::Silu);
                let w = matrix(format!("{l}.down"), s.hidden, self.intermediate);
                let d = b.linear("down", m, w, None);
                b.add("mlp_out", x, d)
            });
        }
        let last = b.gather_last("last", x);
        let h = b.rms_norm("norm", last, vector("norm".into(), s.hidden), eps);
        let head = if self.tied { table } else { matrix("head".into(), s.vocab, s.hidden) };
        let logits = b.logits("head", h, head);
        b.sample("sample", logits);
        b.finish().expect("a sample program is a program")
    }
}
