//! Builds a family's program together with its weights: each weight is declared where it is used, with the
//! checkpoint tensors it comes from and its shape.

mod recurrent;

use crate::adapter::{Adapted, AdapterRoom};
use crate::blocks::experts::Experts;
use crate::config::{Embedding, ModelConfig, Rope, Task};
use crate::precision::Precision;
use crate::weights::{Arrange, Cut, HeadRows, Part, WeightSpec};
use device::DType;
use device::op::{Activation, Pairs, Routing};
use device::target::WeightUse;
use graph::program::{
    ExpertWeights, Lookup, ModelShape, Pooling, Program, ProgramBuilder, ProgramError, RopeId,
    ValueId, WeightRef,
};
use std::ops::Range;

/// What a builder must know besides the model.
pub(crate) struct Setting<'a> {
    /// The number formats.
    pub(crate) precision: Precision,
    /// The longest context that is served.
    pub(crate) context: u32,
    /// How the program pairs the elements of a head.
    pub(crate) pairs: Pairs,
    /// Whether sums must be those of ggml, to the bit.
    pub(crate) ggml: bool,
    /// How a weight is stored.
    pub(crate) stored: &'a dyn Fn(&WeightSpec) -> DType,
    /// The program it drafts for, if it does.
    pub(crate) verifier: Option<&'a Program>,
    /// Room for adapters.
    pub(crate) adapters: Option<AdapterRoom>,
}

/// A model's program, and what its memory must hold.
#[derive(Clone, Debug)]
pub struct Written {
    /// What it computes.
    pub program: Program,
    /// Its weights, in order of first use.
    pub weights: Vec<WeightSpec>,
    /// Its rotations, in the order of the program's tables.
    pub ropes: Vec<Rope>,
    /// Caches and tables of the program it drafts for, which come before its own.
    pub(crate) before: (usize, usize),
    /// Caches, with those before its own.
    caches: usize,
    /// The weights that adapters add to.
    pub(crate) adapted: Vec<Adapted>,
}

impl Written {
    /// Caches that are its own: neither those of the program it drafts for nor those of one that drafts for it.
    pub(crate) fn own_caches(&self) -> usize {
        self.caches - self.before.0
    }
}

/// A tensor of a checkpoint by its two names, without layer and suffix, and how many rows it has. `{}` in a name is the
/// number of an expert. A name that begins with `/` stands outside the model's own tensors.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    json: &'static str,
    gguf: &'static str,
    from: usize,
    rows: usize,
    all: usize,
    rotated: Option<usize>,
    less_one: bool,
    factor: f32,
    stacked: bool,
    folded: Option<usize>,
    decay: bool,
    bare: bool,
    woven: bool,
    turned: bool,
    expert: Option<Expert>,
}

/// One of the experts of a layer.
#[derive(Clone, Copy, Debug)]
struct Expert {
    number: usize,
    of: usize,
}

/// The tensor that `config.json` checkpoints call `json` and GGUF files `gguf`.
pub const fn tensor(json: &'static str, gguf: &'static str, rows: usize) -> Source {
    Source {
        json,
        gguf,
        from: 0,
        rows,
        all: rows,
        rotated: None,
        less_one: false,
        factor: 1.0,
        stacked: false,
        folded: None,
        decay: false,
        bare: false,
        woven: false,
        turned: false,
        expert: None,
    }
}

impl Source {
    /// How many rows it has.
    pub(crate) const fn rows(self) -> usize {
        self.rows
    }

    /// Rows of heads whose first `elements` elements are rotated.
    pub const fn rotated(self, elements: usize) -> Source {
        Source { rotated: Some(elements), ..self }
    }

    /// Only rows `from..from + rows` of it: some checkpoints join tensors that others store separately.
    pub const fn part(self, from: usize, rows: usize) -> Source {
        Source { from, rows, ..self }
    }

    /// A norm's weight that `config.json` checkpoints store less 1.
    pub(crate) const fn less_one(self) -> Source {
        Source { less_one: true, ..self }
    }

    /// In GGUF files a vector of the decays of states, stored as −exp of them.
    pub(crate) const fn decay(self) -> Source {
        Source { decay: true, ..self }
    }

    /// In GGUF files its rows are divided into so many: one dimension more.
    pub(crate) const fn folded(self, into: usize) -> Source {
        Source { folded: Some(into), ..self }
    }

    /// In `config.json` checkpoints its rows are matrices of one row: a tensor of three dimensions.
    pub(crate) const fn stacked(self) -> Source {
        Source { stacked: true, ..self }
    }

    /// Its name in `config.json` checkpoints is whole: no suffix belongs to it.
    pub(crate) const fn bare(self) -> Source {
        Source { bare: true, ..self }
    }

    /// Rows of its two halves take turns: rows `from..from + rows` are counted as if the second half came behind the
    /// first.
    pub(crate) const fn woven(self) -> Source {
        Source { woven: true, ..self }
    }

    /// `config.json` checkpoints store it turned: a column for each row.
    pub(crate) const fn turned(self) -> Source {
        Source { turned: true, ..self }
    }

    /// The same of expert `number` of `of`: in a tensor of its own if the name says where its number stands, else in one
    /// that has those of all experts, one after the other.
    pub(crate) const fn of_expert(self, number: usize, of: usize) -> Source {
        Source { expert: Some(Expert { number, of }), ..self }
    }

    /// A vector to be multiplied by `factor`.
    pub(crate) const fn times(self, factor: f32) -> Source {
        Source { factor, ..self }
    }
}

/// Builds a family's program and weights. Mistakes are reported at the end, so that a family's code stays
/// free of `?`.
pub struct Builder<'a> {
    config: &'a ModelConfig,
    setting: Setting<'a>,
    program: ProgramBuilder,
    weights: Vec<WeightSpec>,
    ropes: Vec<Rope>,
    adapted: Vec<Adapted>,
    layer: Option<usize>,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(config: &'a ModelConfig, setting: Setting<'a>) -> Builder<'a> {
        let shape = ModelShape {
            hidden: config.hidden as u32,
            q_heads: config.q_heads as u32,
            kv_heads: config.kv_heads as u32,
            head_dim: config.head_dim as u32,
            vocab: (config.vocab * config.token_types) as u32,
            layers: config.layers as u32,
            max_positions: setting.context,
            act_dtype: setting.precision.act,
            kv_dtype: setting.precision.kv,
        };
        let mut program = ProgramBuilder::new(config.family, shape);
        if let Some(verifier) = setting.verifier {
            program = program.beside(verifier);
        }
        let (weights, ropes, adapted) = (Vec::new(), Vec::new(), Vec::new());
        Builder { config, setting, program, weights, ropes, adapted, layer: None }
    }

    pub(crate) fn finish(self) -> Result<Written, ProgramError> {
        let program = self.program.finish()?;
        let before = self.setting.verifier.map_or((0, 0), |of| (of.caches.len(), of.ropes.len()));
        let caches = program.caches.len();
        let Builder { weights, ropes, adapted, .. } = self;
        Ok(Written { program, weights, ropes, before, caches, adapted })
    }

    /// The program's builder, for ops without weights.
    pub(crate) fn ops(&mut self) -> &mut ProgramBuilder {
        &mut self.program
    }

    /// Declares a rotation of whole heads; the same one is declared once.
    pub(crate) fn rope(&mut self, rope: &Rope) -> RopeId {
        self.rope_of(rope, self.config.head_dim)
    }

    /// The same of `dim` elements. A model's rotations of different sizes differ in other respects, too.
    pub(crate) fn rope_of(&mut self, rope: &Rope, dim: usize) -> RopeId {
        if let Some(index) = self.ropes.iter().position(|known| known == rope) {
            let before = self.setting.verifier.map_or(0, |verifier| verifier.ropes.len());
            return RopeId((before + index) as u32);
        }
        self.ropes.push(rope.clone());
        self.program.rope_table_of(dim as u32)
    }

    /// Everything built inside belongs to layer `index`.
    pub(crate) fn layer<R>(&mut self, index: usize, build: impl FnOnce(&mut Self) -> R) -> R {
        self.layer = Some(index);
        self.program.enter(Some(index as u32));
        let result = build(self);
        self.layer = None;
        self.program.enter(None);
        result
    }

    /// Whether sums must be those of ggml, to the bit.
    pub(crate) fn is_ggml(&self) -> bool {
        self.setting.ggml
    }

    /// Whether this is the last layer of a program that needs the last token of each row only.
    pub(crate) fn in_last_layer(&self) -> bool {
        self.layer == Some(self.config.layers - 1) && self.config.task == Task::Generate
    }

    /// The step's tokens through the embedding.
    pub(crate) fn embed(&mut self) -> ValueId {
        let table = self.table(if self.config.tied { WeightUse::Head } else { WeightUse::Table });
        self.program.embed("embed", table)
    }

    /// Rows of a table that parts of the tokens' ids, or their positions, select.
    pub(crate) fn embed_by(
        &mut self,
        name: &str,
        source: Source,
        cols: usize,
        by: Lookup,
    ) -> ValueId {
        let parts = vec![self.part(&source, ".weight")];
        let kind = WeightUse::Table;
        let table = self.weight(name, parts, cols, Arrange::Stacked, kind, Cut::Rows);
        self.program.embed_by(name, table, by)
    }

    /// One vector of each row of `x`, as the model's files say; ends the program.
    pub(crate) fn publish(&mut self, x: ValueId, embedding: Embedding) {
        let vectors = self.program.pool("pool", x, embedding.pooling, embedding.unit);
        self.program.publish("publish", vectors);
    }

    /// Ends a decoder's program, whose last norm made `h`, with what the model is for. `adjust` makes the logits of tokens
    /// what is sampled from.
    pub(crate) fn end(&mut self, h: ValueId, adjust: impl FnOnce(&mut Self, ValueId) -> ValueId) {
        match self.config.task {
            Task::Generate => {
                let logits = self.logits(h);
                let logits = adjust(self, logits);
                match self.setting.verifier {
                    Some(_) => self.program.propose("propose", logits, 0),
                    None => self.program.sample("sample", logits),
                }
            }
            Task::Embed(embedding) => self.publish(h, embedding),
            Task::Classify(classes) => {
                let last = self.program.pool("pool", h, Pooling::Last, false);
                let scores = tensor("/score", "", classes.count);
                let scores = self.linear("score", last, &[scores], false, Cut::Rows);
                self.program.publish("publish", scores);
            }
            Task::Compare { tokens } => {
                let last = self.program.pool("pool", h, Pooling::Last, false);
                let name = if self.config.tied { "embed_tokens" } else { "/lm_head" };
                let head = tensor(name, "", self.config.vocab);
                let rows = tokens.map(|token| head.part(token as usize, 1));
                let logits = self.linear("compared", last, &rows, false, Cut::Rows);
                self.program.publish("publish", logits);
            }
        }
    }

    /// The head: the embedding, or a matrix of its own.
    pub(crate) fn logits(&mut self, x: ValueId) -> ValueId {
        let head = match self.config.tied {
            true => self.table(WeightUse::Head),
            false => {
                let source = tensor("/lm_head", "output", self.config.vocab);
                let parts = vec![self.part(&source, ".weight")];
                let (hidden, kind) = (self.config.hidden, WeightUse::Head);
                self.weight("lm_head", parts, hidden, Arrange::Stacked, kind, Cut::Rows)
            }
        };
        let weight = head.name.clone();
        let logits = self.program.logits("lm_head", x, head);
        self.adapt("lm_head", x, logits, &weight)
    }

    /// An RMS norm of rows of the residual stream.
    pub(crate) fn rms_norm(&mut self, name: &str, x: ValueId, source: Source) -> ValueId {
        // The last norm has a name of its own, because a layer's could be the same.
        let weight = if self.layer.is_none() { "final_norm" } else { name };
        let weight = self.vector(weight, &[source], ".weight", Cut::Whole);
        self.program.rms_norm(name, x, weight, self.config.norm_eps)
    }

    /// A norm by mean and variance, without a bias.
    pub(crate) fn layer_norm(&mut self, name: &str, x: ValueId, source: Source) -> ValueId {
        let weight = if self.layer.is_none() { "final_norm" } else { name };
        let weight = self.vector(weight, &[source], ".weight", Cut::Whole);
        self.program.layer_norm(name, x, weight, None, self.config.norm_eps)
    }

    /// The same under a name of its own, and with a bias if it has one.
    pub(crate) fn layer_norm_with(
        &mut self,
        name: &str,
        x: ValueId,
        source: Source,
        bias: bool,
    ) -> ValueId {
        let weight = self.vector(name, &[source], ".weight", Cut::Whole);
        let bias_name = format!("{name}_bias");
        let bias = bias.then(|| self.vector(&bias_name, &[source], ".bias", Cut::Whole));
        self.program.layer_norm(name, x, weight, bias, self.config.norm_eps)
    }

    /// An RMS norm of some columns of `x`, from `from` on; the others stay as they are.
    pub(crate) fn rms_norm_columns(
        &mut self,
        name: &str,
        x: ValueId,
        from: usize,
        source: Source,
    ) -> ValueId {
        let weight = self.vector(name, &[source], ".weight", Cut::Whole);
        self.program.rms_norm_columns(name, x, from as u32, weight, self.config.norm_eps)
    }

    /// `x` times the stacked rows of some tensors; `bias` if each has one.
    pub(crate) fn linear(
        &mut self,
        name: &str,
        x: ValueId,
        sources: &[Source],
        bias: bool,
        cut: Cut,
    ) -> ValueId {
        let cols = self.program.cols(x) as usize;
        let w = self.matrix(name, cols, sources, Arrange::Stacked, cut);
        let bias = bias.then(|| self.vector(&format!("{name}_bias"), sources, ".bias", cut));
        let weight = w.name.clone();
        let y = self.program.linear(name, x, w, bias);
        self.adapt(name, x, y, &weight)
    }

    /// Each head of `x`, of `each` elements, times rows `rows` of its own `all` rows of `source`; turned, if a row belongs
    /// to an input. Of every head, elements that no row takes are copied.
    pub(crate) fn head_linear(
        &mut self,
        name: &str,
        x: ValueId,
        source: Source,
        (rows, all, cols): (Range<usize>, usize, usize),
        each: usize,
        turned: bool,
    ) -> ValueId {
        let heads = self.config.q_heads;
        let of_head =
            |head| self.part(&source.part(head * all + rows.start, rows.len()), ".weight");
        let parts = (0..heads).map(of_head).collect();
        let w = self.weight(name, parts, cols, Arrange::EQUAL, WeightUse::Heads, Cut::Whole);
        self.program.head_linear(name, x, w, (heads as u32, each as u32), turned)
    }

    /// What adapters add to a linear's result, where there may be some.
    fn adapt(&mut self, name: &str, x: ValueId, y: ValueId, weight: &str) -> ValueId {
        let Some(room) = self.setting.adapters.filter(|_| self.config.task == Task::Generate)
        else {
            return y;
        };
        let Some(spec) = self.weights.iter().find(|spec| spec.name == weight).cloned() else {
            return y;
        };
        let head = self.layer.is_none();
        let adapted = Adapted::new(spec, head, room);
        let [a, b] = adapted.refs(self.setting.precision.act);
        let parts = adapted.parts();
        self.adapted.push(adapted);
        self.program.lora(&format!("{name}_lora"), (x, y), a, b, parts)
    }

    /// `x` times some columns of the stacked rows of some tensors, from `from` on of `all`.
    pub(crate) fn linear_columns(
        &mut self,
        name: &str,
        x: ValueId,
        sources: &[Source],
        (from, all): (usize, usize),
    ) -> ValueId {
        let cols = self.program.cols(x) as usize;
        let parts = sources.iter().map(|source| self.part(source, ".weight")).collect();
        let (arrange, kind, cut) = (Arrange::Stacked, WeightUse::Matrix, Cut::Rows);
        let spec = self.spec(name, parts, from..from + cols, all, arrange, kind, cut);
        let w = self.declare(spec);
        self.program.linear(name, x, w, None)
    }

    /// A weight of the program it drafts for.
    pub(crate) fn shared(&self, name: &str) -> Option<WeightRef> {
        let verifier = self.setting.verifier?;
        verifier.weights.iter().find(|weight| weight.name == name).cloned()
    }

    /// `x` times gate and up, whose columns alternate in the result.
    pub(crate) fn gate_up(&mut self, name: &str, x: ValueId, sources: [Source; 2]) -> ValueId {
        let cols = self.program.cols(x) as usize;
        let w = self.matrix(name, cols, &sources, Arrange::ALTERNATING, Cut::Rows).gate_up();
        let weight = w.name.clone();
        let y = self.program.linear(name, x, w, None);
        self.adapt(name, x, y, &weight)
    }

    /// The experts of each row of `x`, with a bias of the choice if there is one.
    pub(crate) fn route(
        &mut self,
        name: &str,
        x: ValueId,
        source: Source,
        bias: Option<Source>,
        routing: Routing,
    ) -> ValueId {
        let cols = self.program.cols(x) as usize;
        let parts = vec![self.part(&source, ".weight")];
        let kind = WeightUse::Router;
        let w = self.weight(name, parts, cols, Arrange::Stacked, kind, Cut::Whole);
        let bias_name = format!("{name}_bias");
        let bias = bias.map(|bias| self.vector(&bias_name, &[bias], "", Cut::Whole));
        self.program.route(name, x, w, bias, routing)
    }

    /// What the experts of `choice` make of `x`, added to `residual` if there is one.
    pub(crate) fn experts(
        &mut self,
        x: ValueId,
        choice: ValueId,
        experts: &Experts,
        residual: Option<ValueId>,
    ) -> ValueId {
        let Experts { count, sources: [gate, up, down], clamp, act, .. } = *experts;
        let (wide, inner) = (self.program.cols(x) as usize, up.rows);
        let of_all = |sources: &[Source]| -> Vec<Source> {
            let of = |number| sources.iter().map(move |source| source.of_expert(number, count));
            (0..count).flat_map(of).collect()
        };
        let gate_up = if act == Activation::ReluSquared {
            // There is no gate.
            self.matrix("experts_up", wide, &of_all(&[up]), Arrange::EQUAL, Cut::Rows)
        } else {
            let both = of_all(&[gate, up]);
            let both = self.matrix("experts_gate_up", wide, &both, Arrange::PAIRS, Cut::Rows);
            both.gate_up_turns()
        };
        let down = of_all(&[down]);
        let down = self.matrix("experts_down", inner, &down, Arrange::EQUAL, Cut::Cols);
        let (gate_up_bias, down_bias) = experts.biases.map_or((None, None), |biases| {
            let [gate, up, down] = biases;
            let both = [gate, up];
            let gate_up = self.expert_bias("experts_gate_up_bias", &both, count, Arrange::PAIRS);
            let down = self.expert_bias("experts_down_bias", &[down], count, Arrange::EQUAL);
            (Some(gate_up), Some(down))
        });
        let experts = count as u32;
        let weights = ExpertWeights { experts, gate_up, down, gate_up_bias, down_bias, clamp };
        self.program.experts("experts", x, choice, weights, act, residual)
    }

    /// A bias of all experts in the order of the rows of their weights.
    fn expert_bias(
        &mut self,
        name: &str,
        sources: &[Source],
        count: usize,
        arrange: Arrange,
    ) -> WeightRef {
        let of = |number| sources.iter().map(move |source| source.of_expert(number, count));
        let parts: Vec<Part> =
            (0..count).flat_map(of).map(|source| self.part(&source, ".bias")).collect();
        let cols = parts.iter().map(|part| part.rows.len()).sum();
        self.weight(name, parts, cols, arrange, WeightUse::Vector, Cut::Whole)
    }

    /// A learned score for each query head, which joins its softmax.
    pub(crate) fn sinks(&mut self, source: Source) -> WeightRef {
        self.vector("sinks", &[source], ".weight", Cut::Rows)
    }

    /// `a + sigmoid(x · w) · b`, where `w` is one row.
    pub(crate) fn add_gated(
        &mut self,
        name: &str,
        a: ValueId,
        b: ValueId,
        x: ValueId,
        source: Source,
    ) -> ValueId {
        let w = self.vector(name, &[source], ".weight", Cut::Whole);
        self.program.add_gated(name, a, b, x, w)
    }

    /// The weight and epsilon of a norm over the elements of each head.
    pub(crate) fn head_norm(&mut self, name: &str, source: Source) -> (WeightRef, f32) {
        (self.vector(name, &[source], ".weight", Cut::Whole), self.config.norm_eps)
    }

    /// Rotates q and k and writes k and v to the layer's pages.
    pub(crate) fn rope_kv(
        &mut self,
        name: &str,
        qkv: ValueId,
        q_norm: Option<(WeightRef, f32)>,
        k_norm: Option<(WeightRef, f32)>,
        rope: RopeId,
    ) -> ValueId {
        self.program.rope_kv(name, qkv, q_norm, k_norm, rope, self.setting.pairs)
    }

    fn table(&mut self, kind: WeightUse) -> WeightRef {
        let source = tensor("embed_tokens", "token_embd", self.config.vocab);
        let parts = vec![self.part(&source, ".weight")];
        self.weight("embed", parts, self.config.hidden, Arrange::Stacked, kind, Cut::Rows)
    }

    fn matrix(
        &mut self,
        name: &str,
        cols: usize,
        sources: &[Source],
        arrange: Arrange,
        cut: Cut,
    ) -> WeightRef {
        let parts = sources.iter().map(|source| self.part(source, ".weight")).collect();
        let experts = matches!(arrange, Arrange::PAIRS | Arrange::EQUAL);
        let kind = if experts { WeightUse::Experts } else { WeightUse::Matrix };
        self.weight(name, parts, cols, arrange, kind, cut)
    }

    fn vector(&mut self, name: &str, sources: &[Source], suffix: &str, cut: Cut) -> WeightRef {
        let parts: Vec<Part> = sources.iter().map(|source| self.part(source, suffix)).collect();
        let cols = parts.iter().map(|part| part.rows.len()).sum();
        self.weight(name, parts, cols, Arrange::Stacked, WeightUse::Vector, cut)
    }

    fn weight(
        &mut self,
        name: &str,
        parts: Vec<Part>,
        cols: usize,
        arrange: Arrange,
        kind: WeightUse,
        cut: Cut,
    ) -> WeightRef {
        let spec = self.spec(name, parts, 0..cols, cols, arrange, kind, cut);
        self.declare(spec)
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of a weight")]
    fn spec(
        &self,
        name: &str,
        parts: Vec<Part>,
        cols: Range<usize>,
        tensor_cols: usize,
        arrange: Arrange,
        kind: WeightUse,
        cut: Cut,
    ) -> WeightSpec {
        let name = self.layer.map_or(name.to_owned(), |layer| format!("layers.{layer}.{name}"));
        let name = self.setting.verifier.map_or(name.clone(), |_| format!("draft.{name}"));
        WeightSpec { name, parts, arrange, cols, tensor_cols, kind, cut }
    }

    fn declare(&mut self, spec: WeightSpec) -> WeightRef {
        let Precision { weights, quantise, .. } = self.setting.precision;
        let quantised = quantise.is_some_and(|quantise| quantise.takes(&spec));
        let dtype = match weights {
            Some(dtype) if !quantised => dtype,
            _ => (self.setting.stored)(&spec),
        };
        let weight = WeightRef::matrix(&spec.name, dtype, spec.rows() as u32, spec.cols() as u32);
        if !self.weights.contains(&spec) {
            self.weights.push(spec);
        }
        weight
    }

    fn part(&self, source: &Source, suffix: &str) -> Part {
        let Source { json, gguf, from, rows, all, rotated, less_one, factor, .. } = *source;
        let Source { expert, folded, bare, woven, turned, decay, .. } = *source;
        let stacked = source.stacked && !self.config.gguf;
        let suffix = if bare && !self.config.gguf { "" } else { suffix };
        let heads = rotated.map(|rotated| HeadRows {
            dim: self.config.head_dim,
            rotated,
            stored: self.config.pairs,
            wanted: self.setting.pairs,
        });
        let ModelConfig { root, layer_names: layers, .. } = self.config;
        let prefix = match (self.config.gguf, self.layer) {
            (true, Some(layer)) => format!("blk.{layer}."),
            (true, None) => String::new(),
            (false, _) if json.starts_with('/') => String::new(),
            (false, Some(layer)) => format!("{root}{layers}.{layer}."),
            (false, None) => root.clone(),
        };
        let name = if self.config.gguf { gguf } else { json.trim_start_matches('/') };
        let (name, stack, before) = match expert {
            Some(Expert { number, .. }) if name.contains("{}") => {
                (name.replace("{}", &number.to_string()), None, 0)
            }
            Some(Expert { number, of }) => (name.to_owned(), Some(of), number * all),
            None if self.config.gguf => (name.to_owned(), folded, 0),
            None => (name.to_owned(), stacked.then_some(all), 0),
        };
        let tensor_rows = if expert.is_some() { all * stack.unwrap_or(1) } else { all };
        // GGUF's converter adds the 1.
        let add = if less_one && !self.config.gguf { 1.0 } else { 0.0 };
        Part {
            tensor: format!("{prefix}{name}{suffix}"),
            rows: before + from..before + from + rows,
            tensor_rows,
            stack,
            heads,
            woven: woven.then_some(all),
            turned: turned && !self.config.gguf,
            add,
            factor,
            decay: decay && self.config.gguf,
        }
    }
}
