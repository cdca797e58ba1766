//! Random programs: values that are shared, dead, rewritten or read twice, in every combination that the
//! passes must handle.

use device::DType;
use fixtures::Rng;
use graph::program::{
    Activation, Cache, Gate, Heads, ModelShape, Pairs, Program, ProgramBuilder, RopeId, Rule,
    ValueId, WeightRef,
};

pub fn program(seed: u64) -> Program {
    let mut rng = Rng::new(seed);
    let kv_heads = 1 + rng.below(2);
    let act_dtype = if rng.once_in(3) { DType::BF16 } else { DType::F32 };
    let shape = ModelShape {
        hidden: 16 * (1 + rng.below(2)),
        q_heads: kv_heads * (1 + rng.below(2)),
        kv_heads,
        head_dim: 8,
        vocab: 32 + rng.below(40),
        layers: 1 + rng.below(3),
        max_positions: 64,
        act_dtype,
        kv_dtype: act_dtype,
    };
    let mut b = ProgramBuilder::new(format!("random {seed}"), shape);
    b.rope_table();
    b.rope_table();
    let mut maker = Maker { rng, shape, count: 0 };
    let table = WeightRef::matrix("embed", act_dtype, shape.vocab, shape.hidden);
    let mut x = b.embed("embed", table.clone());
    for layer in 0..shape.layers {
        x = b.layer(layer, |b| maker.layer(b, x, layer > 0));
    }
    let last = b.gather_last("last", x);
    let head_in = if maker.rng.once_in(4) { last } else { maker.norm(&mut b, last) };
    let logits = b.logits("head", head_in, table);
    b.sample("sample", logits);
    b.finish().unwrap()
}

struct Maker {
    rng: Rng,
    shape: ModelShape,
    count: u32,
}

impl Maker {
    fn name(&mut self, kind: &str) -> String {
        self.count += 1;
        format!("{kind}{}", self.count)
    }

    /// The first layer keeps tokens in pages; others may be recurrent.
    fn layer(&mut self, b: &mut ProgramBuilder, mut x: ValueId, may_recur: bool) -> ValueId {
        for _ in 0..1 + self.rng.below(3) {
            x = match self.rng.below(4) {
                0 => self.mlp(b, x),
                1 => self.double(b, x),
                2 => self.twice(b, x),
                _ => self.norm(b, x),
            };
        }
        self.attention(b, x, may_recur)
    }

    fn linear(
        &mut self,
        b: &mut ProgramBuilder,
        x: ValueId,
        rows: u32,
        cols: u32,
        gate_up: bool,
    ) -> ValueId {
        let name = self.name("linear");
        let w = WeightRef::matrix(format!("{name}.w"), self.shape.act_dtype, rows, cols);
        let bias = self.rng.once_in(3);
        let bias = bias.then(|| WeightRef::vector(format!("{name}.b"), self.shape.act_dtype, rows));
        b.linear(&name, x, if gate_up { w.gate_up() } else { w }, bias)
    }

    fn add(&mut self, b: &mut ProgramBuilder, x: ValueId, y: ValueId) -> ValueId {
        let name = self.name("add");
        // The residual may stand on either side.
        if self.rng.once_in(2) { b.add(&name, x, y) } else { b.add(&name, y, x) }
    }

    fn norm(&mut self, b: &mut ProgramBuilder, x: ValueId) -> ValueId {
        let name = self.name("norm");
        let w = WeightRef::vector(format!("{name}.norm"), self.shape.act_dtype, self.shape.hidden);
        if self.rng.once_in(5) {
            let bias = self.rng.once_in(2).then(|| {
                WeightRef::vector(format!("{name}.bias"), self.shape.act_dtype, self.shape.hidden)
            });
            return b.layer_norm(&name, x, w, bias, 1e-5);
        }
        b.rms_norm(&name, x, w, 1e-5)
    }

    fn maybe_norm(&mut self, b: &mut ProgramBuilder, x: ValueId) -> ValueId {
        if self.rng.once_in(3) { x } else { self.norm(b, x) }
    }

    fn mlp(&mut self, b: &mut ProgramBuilder, x: ValueId) -> ValueId {
        let (hidden, inner) = (self.shape.hidden, 8 * (1 + self.rng.below(6)));
        let h = self.maybe_norm(b, x);
        let g = self.linear(b, h, 2 * inner, hidden, true);
        let name = self.name("act");
        let act = if self.rng.once_in(3) { Activation::GeluTanh } else { Activation::Silu };
        let m = b.gate_mul(&name, g, act);
        let m = self.maybe_activate(b, m);
        let d = self.linear(b, m, hidden, inner, false);
        let d = self.maybe_scale(b, d);
        if self.rng.once_in(6) {
            let name = self.name("gated");
            let w = WeightRef::vector(format!("{name}.w"), self.shape.act_dtype, hidden);
            return b.add_gated(&name, x, d, h, w);
        }
        if self.rng.once_in(4) { d } else { self.add(b, x, d) }
    }

    fn maybe_activate(&mut self, b: &mut ProgramBuilder, x: ValueId) -> ValueId {
        if !self.rng.once_in(6) {
            return x;
        }
        let name = self.name("function");
        b.activate(&name, x, Activation::Gelu)
    }

    /// Norms of all heads of q, and of k, inside the joined matrix.
    fn maybe_norm_columns(&mut self, b: &mut ProgramBuilder, qkv: ValueId) -> ValueId {
        if !self.rng.once_in(4) {
            return qkv;
        }
        let s = self.shape;
        let (q, k) = (s.q_cols(), s.kv_heads * s.head_dim);
        let (name, after) = (self.name("q_norm"), self.name("k_norm"));
        let weight = |name: &str, len| WeightRef::vector(format!("{name}.norm"), s.act_dtype, len);
        let qkv = b.rms_norm_columns(&name, qkv, 0, weight(&name, q), 1e-5);
        b.rms_norm_columns(&after, qkv, q, weight(&after, k), 1e-5)
    }

    /// A multiplier of a branch, as some models have, with or without a limit.
    fn maybe_scale(&mut self, b: &mut ProgramBuilder, x: ValueId) -> ValueId {
        let name = self.name("scale");
        match self.rng.below(8) {
            0 => b.scale(&name, x, 0.22),
            1 => b.soft_cap(&name, x, 1.5, 2.0),
            _ => x,
        }
    }

    /// One norm read by two linears, and a residual that is also an input.
    fn double(&mut self, b: &mut ProgramBuilder, x: ValueId) -> ValueId {
        let hidden = self.shape.hidden;
        let h = self.norm(b, x);
        let u = self.linear(b, h, hidden, hidden, false);
        let v = self.linear(b, h, hidden, hidden, false);
        let v = self.add(b, x, v);
        let w = self.linear(b, u, hidden, hidden, false);
        self.add(b, v, w)
    }

    /// `x + linear(x)`: what is read must not be overwritten; and a norm that a residual reads too.
    fn twice(&mut self, b: &mut ProgramBuilder, x: ValueId) -> ValueId {
        let hidden = self.shape.hidden;
        let h = if self.rng.once_in(2) { x } else { self.norm(b, x) };
        let p = self.linear(b, h, hidden, hidden, false);
        self.add(b, h, p)
    }

    /// Latents of 16 elements with keys of 8, as large as keys and values of one head.
    fn latent(&mut self, b: &mut ProgramBuilder, x: ValueId, h: ValueId) -> ValueId {
        let (s, latent, still) = (self.shape, 16, 8);
        // A rotation of whole heads.
        let rotated = s.head_dim;
        let (heads, each, dtype) = (s.q_heads, still + rotated, s.kv_dtype);
        let both = self.linear(b, h, heads * each + latent + rotated, s.hidden, false);
        b.cache(Cache::Latent { latent, rotated, dtype });
        let name = self.name("latent");
        let matrix = |which: &str, rows, cols| {
            WeightRef::matrix(format!("{name}.{which}"), s.act_dtype, rows, cols)
        };
        let w = matrix("absorb", heads * still, latent);
        let q = b.head_linear(&format!("{name}.q"), both, w, (heads, each), true);
        let norm = (WeightRef::vector(format!("{name}.norm"), s.act_dtype, latent), 1e-6);
        let kv = (both, heads * each);
        let rope = RopeId(self.rng.below(2));
        let q = b.latent_kv(&name, q, kv, norm, rope, Pairs::Neighbours);
        let name = self.name("attn");
        let a = b.latent_attention(&name, q, 0.2);
        let w = matrix("values", heads * s.head_dim, latent);
        let v = b.head_linear(&format!("{name}.v"), a, w, (heads, latent), false);
        let o = self.linear(b, v, s.hidden, s.q_cols(), false);
        self.add(b, x, o)
    }

    /// A matrix of each head that is carried from token to token, behind a convolution, with a gated norm.
    fn recurrent(&mut self, b: &mut ProgramBuilder, x: ValueId, h: ValueId) -> ValueId {
        let s = self.shape;
        let (groups, key, value) = (2, 8, 8);
        let heads = groups * (1 + self.rng.below(2));
        let (channels, values) = (2 * groups * key + heads * value, heads * value);
        let delta = self.rng.once_in(2);
        // Gates and steps behind the channels.
        let both = self.linear(b, h, channels + values + 2 * heads, s.hidden, false);
        let name = self.name("recurrent");
        let vector =
            |which: &str, cols| WeightRef::vector(format!("{name}.{which}"), s.act_dtype, cols);
        let w = WeightRef::matrix(format!("{name}.conv"), s.act_dtype, channels, 3);
        let bias = self.rng.once_in(2).then(|| vector("bias", channels));
        let c = b.conv(&format!("{name}.c"), (both, 0), w, bias);
        let (rule, skip) = match delta {
            true => (Rule::Delta, None),
            false => (Rule::StateSpace { least: 0.0 }, Some(vector("skip", heads))),
        };
        let vectors = (vector("a", heads), vector("dt", heads), skip);
        let shape = Heads { heads, groups, turns: delta, key, value };
        let gates = (both, channels + values);
        let o = b.scan(&format!("{name}.s"), c, gates, vectors, rule, shape);
        let norm = self.rng.once_in(2).then(|| (vector("norm", value), 1e-6, value));
        let gate = if self.rng.once_in(2) { Gate::Silu } else { Gate::Sigmoid };
        let o = b.gated(&format!("{name}.g"), o, (both, channels), gate, norm, delta);
        let o = self.linear(b, o, s.hidden, values, false);
        self.add(b, x, o)
    }

    fn attention(&mut self, b: &mut ProgramBuilder, x: ValueId, may_recur: bool) -> ValueId {
        let s = self.shape;
        let h = self.maybe_norm(b, x);
        if may_recur && self.rng.once_in(3) {
            return self.recurrent(b, x, h);
        }
        if self.rng.once_in(4) {
            return self.latent(b, x, h);
        }
        let qkv = self.linear(b, h, s.qkv_cols(), s.hidden, false);
        let qkv = self.maybe_norm_columns(b, qkv);
        let name = self.name("rope");
        let norm = |which: &str| {
            WeightRef::vector(format!("{name}.{which}.norm"), s.act_dtype, s.head_dim)
        };
        let (q, k) = if self.rng.once_in(2) {
            (Some((norm("q"), 1e-5)), Some((norm("k"), 1e-5)))
        } else {
            (None, None)
        };
        let rope = RopeId(self.rng.below(2));
        let qkv = b.rope_kv(&name, qkv, q, k, rope, Pairs::Halves);
        let window = self.rng.once_in(3).then(|| 1 + self.rng.below(9));
        let name = self.name("attn");
        let softcap = self.rng.once_in(4).then_some(1.5);
        let a = match softcap.is_none() && self.rng.once_in(3) {
            true => {
                let sinks = WeightRef::vector(format!("{name}.sinks"), s.act_dtype, s.q_heads);
                b.attention_with_sinks(&name, qkv, sinks, 0.35, window)
            }
            false => b.attention_capped(&name, qkv, 0.35, softcap, window),
        };
        let o = self.linear(b, a, s.hidden, s.q_cols(), false);
        if self.rng.once_in(4) { o } else { self.add(b, x, o) }
    }
}
