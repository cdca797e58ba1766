//! Builds a program op by op: values in, values out, layers by index.

mod draft;
mod recurrent;

pub use recurrent::Heads;

use super::{
    Cache, CacheId, Dim, Input, InputId, Lookup, Mark, ModelShape, Pairs, Pooling, Program,
    ProgramError, ProgramOp, RopeId, RopeTable, Step, Symbolic, Value, ValueId, WeightId,
    WeightRef,
};
use crate::Phase;
use device::DType;
use device::op::{
    Activate, Activation, Add, AddGated, Attention, Clamp, Embed, Experts, GateMul, Gather,
    HeadLinear, LatentAttention, LatentKv, LayerNorm, Linear, Lora, LoraParts, Norm, Pool, Publish,
    RmsNorm, RmsNormColumns, RopeKv, Route, Routing, Sample, Scale,
};
use device::operand::Unset;
use std::collections::BTreeMap;

/// The weights of all experts of a layer.
#[derive(Clone, Debug)]
pub struct ExpertWeights {
    /// How many experts there are.
    pub experts: u32,
    /// (experts · 2n) × hidden, of layout [`super::WeightLayout::GateUpTurns`]; without a gate (experts · n) × hidden.
    pub gate_up: WeightRef,
    /// (experts · hidden) × n.
    pub down: WeightRef,
    /// One element for each row of `gate_up`.
    pub gate_up_bias: Option<WeightRef>,
    /// One element for each row of `down`.
    pub down_bias: Option<WeightRef>,
    /// Limits of gates, if the weights were trained with some.
    pub clamp: Option<Clamp>,
}

/// Builds a [`Program`]. Mistakes do not panic: the first one is what [`ProgramBuilder::finish`]
/// returns, so that a model's code stays free of `?`.
///
/// ```
/// use graph::program::{Activation, ModelShape, Pairs, ProgramBuilder, WeightRef};
/// use device::DType::F32;
/// let shape = ModelShape {
///     hidden: 64, q_heads: 4, kv_heads: 2, head_dim: 16, vocab: 96, layers: 1,
///     max_positions: 128, act_dtype: F32, kv_dtype: F32,
/// };
/// let mut b = ProgramBuilder::new("tiny", shape);
/// let w = |name: &str, rows, cols| WeightRef::matrix(name, F32, rows, cols);
/// let norm = |name: &str| WeightRef::vector(name, F32, 64);
/// let rope = b.rope_table();
/// let mut x = b.embed("embed", w("embed", 96, 64));
/// for l in 0..1 {
///     x = b.layer(l, |b| {
///         let h = b.rms_norm("norm", x, norm("0.norm"), 1e-6);
///         let qkv = b.linear("qkv", h, w("0.qkv", shape.qkv_cols(), 64), None);
///         let qkv = b.rope_kv("rope", qkv, None, None, rope, Pairs::Halves);
///         let a = b.attention("attn", qkv, 0.25, None);
///         let o = b.linear("o", a, w("0.o", 64, 64), None);
///         let x = b.add("attn_out", x, o);
///         let h = b.rms_norm("mlp_norm", x, norm("0.mlp_norm"), 1e-6);
///         let g = b.linear("gate_up", h, w("0.gate_up", 256, 64).gate_up(), None);
///         let m = b.gate_mul("act", g, Activation::Silu);
///         let d = b.linear("down", m, w("0.down", 64, 128), None);
///         b.add("mlp_out", x, d)
///     });
/// }
/// let last = b.gather_last("last", x);
/// let h = b.rms_norm("norm", last, norm("norm"), 1e-6);
/// let logits = b.logits("head", h, w("embed", 96, 64));
/// b.sample("sample", logits);
/// let program = b.finish().unwrap();
/// assert_eq!(program.weights.len(), 8, "the tied head is bound once");
/// ```
#[derive(Debug)]
pub struct ProgramBuilder {
    program: Program,
    layer: Option<u32>,
    /// The caches of layers that have one.
    caches: BTreeMap<u32, CacheId>,
    error: Option<ProgramError>,
}

impl ProgramBuilder {
    /// An empty program for both phases.
    pub fn new(name: impl Into<String>, shape: ModelShape) -> ProgramBuilder {
        let program = Program {
            name: name.into(),
            shape,
            phases: Phase::ALL.to_vec(),
            ropes: Vec::new(),
            weights: Vec::new(),
            caches: Vec::new(),
            carries: Vec::new(),
            inputs: Vec::new(),
            values: Vec::new(),
            steps: Vec::new(),
            drafter: None,
        };
        ProgramBuilder { program, layer: None, caches: BTreeMap::new(), error: None }
    }

    /// The same for a model that drafts for `verifier`: its caches and rotations come after those of that program.
    pub fn beside(mut self, verifier: &Program) -> ProgramBuilder {
        self.program.caches.clone_from(&verifier.caches);
        self.program.ropes.clone_from(&verifier.ropes);
        self
    }

    /// The model's numbers.
    pub fn shape(&self) -> ModelShape {
        self.program.shape
    }

    /// Restricts the program to some phases.
    pub fn phases(&mut self, phases: &[Phase]) {
        self.program.phases = phases.to_vec();
    }

    /// Everything built inside belongs to layer `index`.
    pub fn layer<R>(&mut self, index: u32, build: impl FnOnce(&mut Self) -> R) -> R {
        let outer = self.layer.replace(index);
        let result = build(self);
        self.layer = outer;
        result
    }

    /// Everything built from now on belongs to `layer`.
    pub fn enter(&mut self, layer: Option<u32>) {
        self.layer = layer;
    }

    /// Columns of a value.
    pub fn cols(&self, value: ValueId) -> u32 {
        self.program.value(value).cols
    }

    /// Declares a table of rotations for whole heads.
    pub fn rope_table(&mut self) -> RopeId {
        self.rope_table_of(self.program.shape.head_dim)
    }

    /// The same for `dim` elements.
    pub fn rope_table_of(&mut self, dim: u32) -> RopeId {
        self.program.ropes.push(RopeTable { dim });
        RopeId(self.program.ropes.len() as u32 - 1)
    }

    /// Declares the cache of the layer being built. A layer that declares none gets [`ModelShape::cache`] when rope or
    /// attention first ask for one.
    pub fn cache(&mut self, cache: Cache) -> CacheId {
        let id = CacheId(self.program.caches.len() as u32);
        self.program.caches.push(cache);
        match self.layer {
            Some(layer) if self.caches.contains_key(&layer) => {
                self.fail(ProgramError::CacheTwice { layer });
            }
            Some(layer) => drop(self.caches.insert(layer, id)),
            None => self.fail(ProgramError::OutsideLayer { step: "cache".into() }),
        }
        id
    }

    /// Declares rows that the host gives.
    pub fn input(&mut self, name: &str, rows: u32, cols: u32) -> InputId {
        if self.program.inputs.iter().any(|input| input.name == name) {
            self.fail(ProgramError::NameTwice { name: name.to_owned() });
        }
        let (name, dtype) = (name.to_owned(), self.program.shape.act_dtype);
        self.program.inputs.push(Input { name, rows, cols, dtype });
        InputId(self.program.inputs.len() as u32 - 1)
    }

    /// The step's tokens through `table` (vocab × hidden).
    pub fn embed(&mut self, name: &str, table: WeightRef) -> ValueId {
        self.embed_or(name, table, None)
    }

    /// The same, where a token may stand for a row of an input ([`device::step::GIVEN_ROW`]).
    pub fn embed_or(&mut self, name: &str, table: WeightRef, given: Option<InputId>) -> ValueId {
        let cols = table.cols;
        let table = self.weight(table);
        let dtype = self.program.shape.act_dtype;
        let (by, ids) = (Lookup::Token, Unset);
        self.make(name, Dim::Tokens, cols, dtype, |out| Embed { by, ids, table, given, out })
    }

    /// Rows of `table` that parts of the tokens' ids, or their positions, select.
    pub fn embed_by(&mut self, name: &str, table: WeightRef, by: Lookup) -> ValueId {
        let cols = table.cols;
        let table = self.weight(table);
        let (dtype, ids, given) = (self.program.shape.act_dtype, Unset, None);
        self.make(name, Dim::Tokens, cols, dtype, |out| Embed { by, ids, table, given, out })
    }

    /// RMS normalisation of each row of `x`.
    pub fn rms_norm(&mut self, name: &str, x: ValueId, weight: WeightRef, eps: f32) -> ValueId {
        let norm = self.norm(weight, eps);
        let Value { rows, cols, dtype, .. } = *self.program.value(x);
        self.make(name, rows, cols, dtype, |y| RmsNorm { x, norm, y })
    }

    /// RMS normalisation of the columns of `x` from `from` on, as many as the weight has, in place; the others stay as
    /// they are.
    pub fn rms_norm_columns(
        &mut self,
        name: &str,
        x: ValueId,
        from: u32,
        weight: WeightRef,
        eps: f32,
    ) -> ValueId {
        let norm = self.norm(weight, eps);
        let Value { rows, cols, dtype, .. } = *self.program.value(x);
        self.make(name, rows, cols, dtype, |y| RmsNormColumns { x, from, norm, y })
    }

    /// Normalisation of each row of `x` by its mean and variance.
    pub fn layer_norm(
        &mut self,
        name: &str,
        x: ValueId,
        weight: WeightRef,
        bias: Option<WeightRef>,
        eps: f32,
    ) -> ValueId {
        let weight = self.weight(weight);
        let bias = bias.map(|bias| self.weight(bias));
        let Value { rows, cols, dtype, .. } = *self.program.value(x);
        self.make(name, rows, cols, dtype, |y| LayerNorm { x, weight, bias, eps, y })
    }

    /// `x · wᵀ + bias`, stored in `x`'s dtype.
    pub fn linear(
        &mut self,
        name: &str,
        x: ValueId,
        w: WeightRef,
        bias: Option<WeightRef>,
    ) -> ValueId {
        let dtype = self.program.value(x).dtype;
        self.linear_as(name, x, w, bias, dtype)
    }

    /// The head: `x · wᵀ` stored in f32, because two logits that differ only past bf16 are not equal.
    pub fn logits(&mut self, name: &str, x: ValueId, w: WeightRef) -> ValueId {
        self.linear_as(name, x, w, None, DType::F32)
    }

    /// `x · wᵀ + bias`, stored as `dtype`.
    pub(crate) fn linear_as(
        &mut self,
        name: &str,
        x: ValueId,
        w: WeightRef,
        bias: Option<WeightRef>,
        dtype: DType,
    ) -> ValueId {
        let (rows, cols) = (self.program.value(x).rows, w.rows);
        let w = self.weight(w);
        let bias = bias.map(|bias| self.weight(bias));
        let (live, scratch, pick) = (Unset, Unset, Unset);
        self.make(name, rows, cols, dtype, |y| Linear { x, w, bias, y, live, scratch, pick })
    }

    /// What adapters add to `base`, which a linear made of `x`: `a` and `b` are theirs, `parts` those of the weight.
    pub fn lora(
        &mut self,
        name: &str,
        (x, base): (ValueId, ValueId),
        a: WeightRef,
        b: WeightRef,
        parts: LoraParts,
    ) -> ValueId {
        let Value { rows, cols, dtype, .. } = *self.program.value(base);
        let (a, b) = (self.weight(a), self.weight(b));
        let (state, by_row, live, scratch) = (Unset, Unset, Unset, Unset);
        let lora = |y| Lora { x, base, a, b, parts, y, state, by_row, live, scratch };
        self.make(name, rows, cols, dtype, lora)
    }

    /// `a + b`.
    pub fn add(&mut self, name: &str, a: ValueId, b: ValueId) -> ValueId {
        let Value { rows, cols, dtype, .. } = *self.program.value(a);
        self.make(name, rows, cols, dtype, |y| Add { a, b, y, live: Unset })
    }

    /// `a + sigmoid(x · w) · b`, where `w` is a vector: each row of `b` times one number.
    pub fn add_gated(
        &mut self,
        name: &str,
        a: ValueId,
        b: ValueId,
        x: ValueId,
        w: WeightRef,
    ) -> ValueId {
        let w = self.weight(w);
        let Value { rows, cols, dtype, .. } = *self.program.value(a);
        self.make(name, rows, cols, dtype, |y| AddGated { a, b, x, w, y, live: Unset })
    }

    /// `x · factor`.
    pub fn scale(&mut self, name: &str, x: ValueId, factor: f32) -> ValueId {
        self.scaled(name, x, factor, None)
    }

    /// `cap · tanh(x · factor / cap)`: about `x · factor`, and never beyond ±`cap`.
    pub fn soft_cap(&mut self, name: &str, x: ValueId, factor: f32, cap: f32) -> ValueId {
        self.scaled(name, x, factor, Some(cap))
    }

    /// `act(gate) · up` over alternating columns of `x`.
    pub fn gate_mul(&mut self, name: &str, x: ValueId, act: Activation) -> ValueId {
        let Value { rows, cols, dtype, .. } = *self.program.value(x);
        self.make(name, rows, cols / 2, dtype, |y| GateMul { x, act, y, live: Unset })
    }

    /// `act(x)`.
    pub fn activate(&mut self, name: &str, x: ValueId, act: Activation) -> ValueId {
        let Value { rows, cols, dtype, .. } = *self.program.value(x);
        self.make(name, rows, cols, dtype, |y| Activate { x, act, y, live: Unset })
    }

    /// The experts of each row of `x`, by the router `w` (experts × hidden) and a bias of the choice.
    pub fn route(
        &mut self,
        name: &str,
        x: ValueId,
        w: WeightRef,
        bias: Option<WeightRef>,
        routing: Routing,
    ) -> ValueId {
        let rows = self.program.value(x).rows;
        let w = self.weight(w);
        let bias = bias.map(|bias| self.weight(bias));
        let cols = 2 * routing.top;
        let (live, plans, load, scratch, pick) = (Unset, Unset, Unset, Unset, Unset);
        self.make(name, rows, cols, DType::U32, |y| Route {
            x,
            w,
            bias,
            routing,
            y,
            live,
            plans,
            load,
            scratch,
            pick,
        })
    }

    /// What the experts of `choice` make of `x`, added to `residual` if there is one.
    pub fn experts(
        &mut self,
        name: &str,
        x: ValueId,
        choice: ValueId,
        weights: ExpertWeights,
        act: Activation,
        residual: Option<ValueId>,
    ) -> ValueId {
        let Value { rows, cols, dtype, .. } = *self.program.value(x);
        let ExpertWeights { experts, gate_up, down, gate_up_bias, down_bias, clamp } = weights;
        let (gate_up, down) = (self.weight(gate_up), self.weight(down));
        let [gate_up_bias, down_bias] =
            [gate_up_bias, down_bias].map(|bias| bias.map(|bias| self.weight(bias)));
        self.make(name, rows, cols, dtype, |y| Experts {
            x,
            choice,
            experts,
            gate_up,
            down,
            gate_up_bias,
            down_bias,
            act,
            clamp,
            residual,
            y,
            live: Unset,
            scratch: Unset,
            load: Unset,
            planned: Unset,
            pick: Unset,
        })
    }

    /// Rotates q and k by position (after their norms, given as weight and epsilon), with the elements of a head paired
    /// as `pairs` says, and writes k and v to the layer's pages.
    pub fn rope_kv(
        &mut self,
        name: &str,
        qkv: ValueId,
        q_norm: Option<(WeightRef, f32)>,
        k_norm: Option<(WeightRef, f32)>,
        rope: RopeId,
        pairs: Pairs,
    ) -> ValueId {
        let q_norm = q_norm.map(|(weight, eps)| self.norm(weight, eps));
        let k_norm = k_norm.map(|(weight, eps)| self.norm(weight, eps));
        let kv = self.layer_cache(name);
        let Value { rows, cols, dtype, .. } = *self.program.value(qkv);
        let q_heads = self.program.shape.q_heads;
        self.make(name, rows, cols, dtype, |out| RopeKv {
            qkv,
            out,
            q_heads,
            q_norm,
            k_norm,
            rope,
            pairs,
            state: Unset,
            kv,
        })
    }

    /// Causal attention of what [`ProgramBuilder::rope_kv`] made.
    pub fn attention(
        &mut self,
        name: &str,
        qkv: ValueId,
        scale: f32,
        window: Option<u32>,
    ) -> ValueId {
        self.attention_capped(name, qkv, scale, None, window)
    }

    /// As [`ProgramBuilder::attention`], to the tokens after it too.
    pub fn attention_both_ways(
        &mut self,
        name: &str,
        qkv: ValueId,
        scale: f32,
        window: Option<u32>,
    ) -> ValueId {
        self.attend(name, qkv, None, Scores { scale, softcap: None, window, causal: false })
    }

    /// As [`ProgramBuilder::attention`], with scores soft-capped to ±`softcap`.
    pub fn attention_capped(
        &mut self,
        name: &str,
        qkv: ValueId,
        scale: f32,
        softcap: Option<f32>,
        window: Option<u32>,
    ) -> ValueId {
        self.attend(name, qkv, None, Scores { scale, softcap, window, causal: true })
    }

    /// As [`ProgramBuilder::attention`], with a learned score for each query head that joins its softmax.
    pub fn attention_with_sinks(
        &mut self,
        name: &str,
        qkv: ValueId,
        sinks: WeightRef,
        scale: f32,
        window: Option<u32>,
    ) -> ValueId {
        self.attend(name, qkv, Some(sinks), Scores { scale, softcap: None, window, causal: true })
    }

    fn attend(
        &mut self,
        name: &str,
        qkv: ValueId,
        sinks: Option<WeightRef>,
        scores: Scores,
    ) -> ValueId {
        let Scores { scale, softcap, window, causal } = scores;
        let sinks = sinks.map(|sinks| self.weight(sinks));
        let kv = self.layer_cache(name);
        let Value { rows, dtype, .. } = *self.program.value(qkv);
        // Tokens that see those after them are all of one step, which frees nothing.
        self.program.caches[kv.0 as usize].keep(window.filter(|_| causal));
        let q_heads = self.program.shape.q_heads;
        let head_dim = match self.program.caches[kv.0 as usize] {
            Cache::Paged { head_dim, .. } => head_dim,
            // Refused when the op is checked.
            Cache::Latent { latent, .. } => latent,
        };
        let cols = q_heads * head_dim;
        self.make(name, rows, cols, dtype, |out| Attention {
            qkv,
            q_heads,
            kv,
            sinks,
            state: Unset,
            out,
            scale,
            softcap,
            window,
            causal,
            rows: Unset,
            single: Unset,
            even: Unset,
            last_only: Unset,
            scratch: Unset,
            pick: Unset,
        })
    }

    /// Each head of `x` times a matrix of its own: `w` has a row for every result of every head, or with `turned` for
    /// every input. Elements of a head of `x`, which has `each`, that no matrix takes are copied behind its results.
    pub fn head_linear(
        &mut self,
        name: &str,
        x: ValueId,
        w: WeightRef,
        (heads, each): (u32, u32),
        turned: bool,
    ) -> ValueId {
        let Value { rows, dtype, .. } = *self.program.value(x);
        let (own, other) = (w.rows / heads.max(1), w.cols);
        let (k, n) = if turned { (own, other) } else { (other, own) };
        let w = self.weight(w);
        let cols = heads * (n + each.saturating_sub(k));
        let live = Unset;
        self.make(name, rows, cols, dtype, |y| HeadLinear { x, w, heads, each, turned, y, live })
    }

    /// Writes the latents in the columns of `x` from `from` on to the layer's pages, normalised and with their rotated
    /// keys, and rotates the last elements of each head of `q`. The layer has declared a cache of latents.
    pub fn latent_kv(
        &mut self,
        name: &str,
        q: ValueId,
        (x, from): (ValueId, u32),
        (norm, eps): (WeightRef, f32),
        rope: RopeId,
        pairs: Pairs,
    ) -> ValueId {
        let norm = self.norm(norm, eps);
        let (kv, state) = (self.layer_cache(name), Unset);
        let Value { rows, cols, dtype, .. } = *self.program.value(q);
        let heads = self.program.shape.q_heads;
        let op = |out| LatentKv { q, out, heads, x, from, norm, rope, pairs, state, kv };
        self.make(name, rows, cols, dtype, op)
    }

    /// Causal attention of what [`ProgramBuilder::latent_kv`] made.
    pub fn latent_attention(&mut self, name: &str, q: ValueId, scale: f32) -> ValueId {
        let kv = self.layer_cache(name);
        let Value { rows, dtype, .. } = *self.program.value(q);
        let heads = self.program.shape.q_heads;
        let latent = match self.program.caches[kv.0 as usize] {
            Cache::Latent { latent, .. } => latent,
            // Refused when the op is checked.
            Cache::Paged { head_dim, .. } => head_dim,
        };
        self.make(name, rows, heads * latent, dtype, |out| LatentAttention {
            q,
            heads,
            kv,
            state: Unset,
            out,
            scale,
            rows: Unset,
            single: Unset,
            even: Unset,
            last_only: Unset,
            scratch: Unset,
            pick: Unset,
        })
    }

    /// The last token of each row.
    pub fn gather_last(&mut self, name: &str, x: ValueId) -> ValueId {
        let Value { cols, dtype, .. } = *self.program.value(x);
        self.make(name, Dim::Rows, cols, dtype, |y| Gather { index: Unset, x, y })
    }

    /// Chooses tokens from `logits`; ends the program.
    pub fn sample(&mut self, name: &str, logits: ValueId) {
        let (state, scratch, rows, q_len) = (Unset, Unset, Unset, Unset);
        self.push(name, Sample { logits, state, scratch, rows, q_len }.into());
    }

    /// One vector of the tokens of each row, in f32; with `unit` divided by its length.
    pub fn pool(&mut self, name: &str, x: ValueId, pooling: Pooling, unit: bool) -> ValueId {
        let cols = self.program.value(x).cols;
        self.make(name, Dim::Rows, cols, DType::F32, |y| Pool { x, pooling, unit, state: Unset, y })
    }

    /// Gives the host a vector of each row; ends the program, which then has no decode phase.
    pub fn publish(&mut self, name: &str, vectors: ValueId) {
        self.program.phases.retain(|phase| *phase != Phase::Decode);
        self.push(name, Publish { vectors, state: Unset }.into());
    }

    /// Marks the step that made `value`.
    pub fn mark(&mut self, value: ValueId, mark: Mark) {
        if let Some(step) = self.program.steps.iter_mut().find(|s| s.op.made() == Some(value)) {
            step.mark = Some(mark);
        }
    }

    /// The program, checked as a whole.
    pub fn finish(self) -> Result<Program, ProgramError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        self.program.check()?;
        Ok(self.program)
    }

    fn scaled(&mut self, name: &str, x: ValueId, factor: f32, cap: Option<f32>) -> ValueId {
        let Value { rows, cols, dtype, .. } = *self.program.value(x);
        self.make(name, rows, cols, dtype, |y| Scale { x, factor, cap, y, live: Unset })
    }

    fn norm(&mut self, weight: WeightRef, eps: f32) -> Norm<Symbolic> {
        Norm { weight: self.weight(weight), eps }
    }

    /// The id of a weight; the same name always means the same weight.
    fn weight(&mut self, weight: WeightRef) -> WeightId {
        let known = self.program.weights.iter().position(|w| w.name == weight.name);
        if let Some(index) = known {
            if self.program.weights[index] != weight {
                self.fail(ProgramError::WeightTwice { name: weight.name });
            }
            return WeightId(index as u32);
        }
        self.program.weights.push(weight);
        WeightId(self.program.weights.len() as u32 - 1)
    }

    fn layer_cache(&mut self, name: &str) -> CacheId {
        if self.layer.is_none() {
            self.fail(ProgramError::OutsideLayer { step: name.to_owned() });
        }
        match self.layer.and_then(|layer| self.caches.get(&layer)) {
            Some(id) => *id,
            None => self.cache(self.program.shape.cache()),
        }
    }

    fn make<T: Into<ProgramOp>>(
        &mut self,
        name: &str,
        rows: Dim,
        cols: u32,
        dtype: DType,
        op: impl FnOnce(ValueId) -> T,
    ) -> ValueId {
        let out = ValueId(self.program.values.len() as u32);
        let full = match self.layer {
            Some(layer) => format!("{layer}.{name}"),
            None => name.to_owned(),
        };
        if self.program.values.iter().any(|value| value.name == full) {
            self.fail(ProgramError::NameTwice { name: full.clone() });
        }
        self.program.values.push(Value { name: full, rows, cols, dtype });
        self.push(name, op(out).into());
        out
    }

    fn push(&mut self, name: &str, op: ProgramOp) {
        self.program.steps.push(Step { op, name: name.into(), layer: self.layer, mark: None });
    }

    fn fail(&mut self, error: ProgramError) {
        self.error.get_or_insert(error);
    }
}

/// How attention scores keys, and which ones.
struct Scores {
    scale: f32,
    softcap: Option<f32>,
    window: Option<u32>,
    causal: bool,
}
