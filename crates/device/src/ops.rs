//! Ops as plain data. An op names operands and shapes; it holds no pointer, no closure and no device. Over
//! [`Bound`] operands it is what a plan runs; over a program's names it is what a model is written in.
//!
//! One file per op: its contract, the checks of shapes, what it reads and writes, the exact scalar reference, the
//! fast CPU version and the CUDA lowering. Long parts are in a folder of the same name; the kernel is
//! `kernels/<same name>.cu`. An op is declared here, by `mod` and one line of the list.

#[macro_use]
mod list;
pub(crate) mod activate;
pub(crate) mod add;
pub(crate) mod add_gated;
pub(crate) mod attention;
mod check;
pub(crate) mod conv;
pub(crate) mod copy;
pub(crate) mod draft;
pub(crate) mod draft_rows;
pub(crate) mod embed;
pub(crate) mod experts;
pub(crate) mod fill;
pub(crate) mod follow;
pub mod fused;
pub(crate) mod gate_mul;
pub(crate) mod gated;
pub(crate) mod gather;
pub(crate) mod head_linear;
pub(crate) mod latent_attention;
pub(crate) mod latent_kv;
pub(crate) mod layer_norm;
pub(crate) mod linear;
pub(crate) mod lora;
pub(crate) mod noise;
pub(crate) mod pool;
pub(crate) mod prologue;
pub(crate) mod propose;
pub(crate) mod publish;
pub(crate) mod recall;
pub(crate) mod rms_norm;
pub(crate) mod rms_norm_columns;
pub(crate) mod rope_kv;
pub(crate) mod route;
pub(crate) mod sample;
pub(crate) mod scale;
pub(crate) mod scan;
pub(crate) mod tap;

use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::Step;
use crate::cpu::view::Words;
use crate::cuda::launch::{Lowered, Target};
use crate::op::Norm;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands};
use crate::variant::{Pick, Variant};
use crate::{Result, Span, StepState, Tensor};
pub(crate) use check::*;
use serde::{Deserialize, Serialize};

ops! { ($)
    /// Applies the mail and derives the step's tables.
    prologue::Prologue = "prologue";
    /// Drafts tokens from the sequences themselves.
    draft::Draft = "draft";
    /// Derives what a model is fed that drafts.
    draft_rows::DraftRows = "draft_rows";
    /// Chooses a draft of each row, and derives what is fed next.
    propose::Propose = "propose";
    /// Keeps hidden states for a drafter.
    tap::Tap = "tap" with Kept;
    /// Takes hidden states that were kept.
    recall::Recall = "recall";
    /// Feeds a drafter the tokens of a step with the states before them.
    follow::Follow = "follow";
    /// Gathers embedding rows.
    embed::Embed = "embed" with Lookup;
    /// Normalises rows.
    rms_norm::RmsNorm = "rms_norm" with Norm;
    /// Normalises a range of columns in place.
    rms_norm_columns::RmsNormColumns = "rms_norm_columns";
    /// Normalises rows by mean and variance.
    layer_norm::LayerNorm = "layer_norm";
    /// Multiplies by a weight matrix.
    linear::Linear = "linear" with Epilogue, LinearChain, NormHandoff;
    /// Adds what adapters make of a linear's input.
    lora::Lora = "lora" with LoraParts;
    /// Adds two matrices.
    add::Add = "add";
    /// Adds rows times a gate.
    add_gated::AddGated = "add_gated";
    /// Multiplies by a number, and may limit the result.
    scale::Scale = "scale";
    /// Multiplies by an activated gate.
    gate_mul::GateMul = "gate_mul" with Activation;
    /// Applies a function to each element.
    activate::Activate = "activate";
    /// Normalises and rotates q and k, writes k and v to their pages.
    rope_kv::RopeKv = "rope_kv" with Pairs;
    /// Attends over pages.
    attention::Attention = "attention" with AttentionChain;
    /// Multiplies each head by a matrix of its own.
    head_linear::HeadLinear = "head_linear";
    /// Rotates q, writes latents to their pages.
    latent_kv::LatentKv = "latent_kv";
    /// Attends over pages of latents.
    latent_attention::LatentAttention = "latent_attention";
    /// Convolves the tokens of each sequence.
    conv::Conv = "conv";
    /// Carries a matrix of each head from token to token.
    scan::Scan = "scan" with Rule;
    /// Multiplies by a gate, with a norm before or after.
    gated::Gated = "gated" with Gate, GatedNorm;
    /// Chooses experts.
    route::Route = "route" with Routing, Score;
    /// Runs the chosen experts.
    experts::Experts = "experts" with Clamp;
    /// Gathers rows by index.
    gather::Gather = "gather";
    /// Combines the tokens of each row to one vector.
    pool::Pool = "pool" with Pooling;
    /// Chooses tokens, advances the seats, publishes to the ring.
    sample::Sample = "sample";
    /// Gives the host a vector of each row, advances the seats, publishes to the ring.
    publish::Publish = "publish";
    /// Copies bytes.
    copy::Copy = "copy";
    /// Fills with a repeated word.
    fill::Fill = "fill";
    /// Fills with numbers drawn from a seed.
    noise::Noise = "noise";
    /// Several ops as one.
    fused::Fused = "fused" with FusedKernel;
}

/// Whether a span is read, written, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read only.
    Read,
    /// Written only; what was there before does not matter.
    Write,
    /// Read and written.
    Update,
}

/// Bytes that an op reads and writes once, without KV pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of weights read.
    pub weights: u64,
    /// Bytes of activations read and written.
    pub values: u64,
}

/// The sizes of the step that an op is made for, if it depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepSize {
    /// Rows of the bucket.
    pub rows: Option<u32>,
    /// Tokens of the bucket.
    pub tokens: Option<u32>,
}

impl StepSize {
    /// Any step.
    pub(crate) const ANY: StepSize = StepSize { rows: None, tokens: None };

    /// A step of `rows` rows.
    pub(crate) const fn rows(rows: u32) -> StepSize {
        StepSize { rows: Some(rows), tokens: None }
    }
}

/// Called with every span that an op touches.
pub type SpanVisitor<'a> = &'a mut dyn FnMut(Span, Access);

/// An op's name in errors and listings.
pub trait Named {
    /// For example `rope_kv`.
    const NAME: &'static str;
}

/// An output that is stored in the place of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reuse<V> {
    /// The input.
    pub from: V,
    /// The output.
    pub to: V,
    /// Whether it has to be; else it may be.
    pub must: bool,
}

/// Whether the inputs of an op must be kept until the end of the step, because results are computed from them
/// afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep<V> {
    /// It need not.
    No,
    /// It must.
    Always,
    /// It must if nothing but gathers reads this result.
    IfOnlyGathered(V),
}

/// What every op's file implements for any operands.
pub(crate) trait Bindable: Named + Sized {
    /// Its operands.
    type O: Operands;
    /// The same op in a plan.
    type Bound;
    /// Names every operand.
    fn operands(&mut self, visit: OperandVisitor<'_, Self::O>);
    /// The op with each operand bound to memory.
    fn bind<B: Binder<Self::O>>(&self, to: &B) -> Result<Self::Bound, B::Error>;
    /// The input whose place its output may or must take.
    fn reuse(&self) -> Option<Reuse<<Self::O as Operands>::Value>> {
        None
    }
    /// Inputs whose linear can be fused with this op in one kernel, best first, and the op as that kernel expects it.
    fn epilogues(&self) -> Vec<(<Self::O as Operands>::Value, Self)> {
        Vec::new()
    }
    /// Whether its inputs must be kept until the end of the step.
    fn keeps(&self) -> Keep<<Self::O as Operands>::Value> {
        Keep::No
    }
    /// Its name in listings.
    fn name(&self) -> &'static str {
        Self::NAME
    }
}

/// What every op's file implements for plans.
pub(crate) trait Contract: Named {
    /// Refuses shapes, dtypes and strides outside the contract.
    fn check(&self) -> Result<()>;
    /// Names every span it touches.
    fn visit_spans(&self, visit: SpanVisitor<'_>);
    /// The op in one line, without spans.
    fn describe(&self) -> String;
    /// Bytes it reads and writes.
    fn traffic(&self) -> Traffic;
    /// The sizes of the step it is made for.
    fn step_size(&self) -> StepSize;
    /// Where its scratch is stored, if it can have some.
    fn scratch_slot(&mut self) -> Option<&mut Option<Span>> {
        None
    }
    /// How its kernel is picked, if it has several.
    fn pick(&self) -> Option<Pick<Variant>> {
        None
    }
    /// Sets how its kernel is picked; false where it has no such choice.
    fn set_pick(&mut self, _pick: Pick<Variant>) -> bool {
        false
    }
    /// The input and output of an in-place op. They are the only two matrices that may share bytes, and they must
    /// share all of them.
    fn in_place(&self) -> Option<(Tensor, Tensor)> {
        None
    }
    /// Whether its outputs must not overlap anything else it touches.
    fn is_one_op(&self) -> bool {
        true
    }
    /// Bytes of scratch it needs on a GPU.
    fn scratch_bytes(&self, _target: &Target) -> u64 {
        0
    }
    /// A text of everything that decides how long it takes, if it has several kernels.
    fn shape(&self) -> Option<String> {
        None
    }
    /// Variants worth measuring, without the rule's choice.
    fn candidates(&self, _target: &Target) -> Vec<Variant> {
        Vec::new()
    }
    /// Makes it independent of other ops: it computes all rows, and neither consumes nor produces a prepared input.
    fn detach(&mut self) {}
}

impl<O: Operands> Op<O> {
    /// The op's name, for example `rope_kv`.
    pub fn name(&self) -> &'static str {
        for_each_op!(self, op => op.name())
    }

    /// Names every operand. Members of a fused op name theirs, inner ones included.
    pub(crate) fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        for_each_op!(self, op => op.operands(visit));
    }

    /// The op with each operand bound to memory.
    pub fn bind<B: Binder<O>>(&self, to: &B) -> Result<Op, B::Error> {
        Ok(for_each_op!(self, op => op.bind(to)?, again))
    }

    /// The input whose place its output may or must take.
    pub fn reuse(&self) -> Option<Reuse<O::Value>> {
        for_each_op!(self, op => op.reuse())
    }

    /// Inputs whose linear can be fused with this op in one kernel, best first, and the op as that kernel expects it.
    pub fn epilogues(&self) -> Vec<(O::Value, Op<O>)> {
        for_each_op!(self, op => {
            op.epilogues().into_iter().map(|(value, op)| (value, op.into())).collect()
        })
    }

    /// Whether its inputs must be kept until the end of the step.
    pub fn keeps(&self) -> Keep<O::Value> {
        for_each_op!(self, op => op.keeps())
    }

    /// The values it reads that it does not compute itself.
    pub fn reads(&self) -> Vec<O::Value> {
        let (mut reads, mut made) = (Vec::new(), Vec::new());
        self.clone().operands(&mut |operand| match operand {
            Operand::Value(value, Access::Write) => made.push(*value),
            Operand::Value(value, _) if !made.contains(value) => reads.push(*value),
            Operand::Value(..)
            | Operand::Weight(_)
            | Operand::Table(_)
            | Operand::Cache(_)
            | Operand::Carry(_) => {}
        });
        reads
    }

    /// The value it computes: the last one, if it has members.
    pub fn made(&self) -> Option<O::Value> {
        let mut made = None;
        self.clone().operands(&mut |operand| {
            if let Operand::Value(value, Access::Write) = operand {
                made = Some(*value);
            }
        });
        made
    }

    /// The weights it reads.
    pub fn weights(&self) -> Vec<O::Weight> {
        let mut weights = Vec::new();
        self.clone().operands(&mut |operand| {
            if let Operand::Weight(weight) = operand {
                weights.push(*weight);
            }
        });
        weights
    }

    /// Replaces a value it reads.
    pub fn redirect(&mut self, from: O::Value, to: O::Value) {
        self.operands(&mut |operand| match operand {
            Operand::Value(value, Access::Read | Access::Update) if *value == from => *value = to,
            Operand::Value(..)
            | Operand::Weight(_)
            | Operand::Table(_)
            | Operand::Cache(_)
            | Operand::Carry(_) => {}
        });
    }

    /// A value has another name, wherever it is read or written.
    pub fn rename(&mut self, from: O::Value, to: O::Value) {
        self.operands(&mut |operand| match operand {
            Operand::Value(value, _) if *value == from => *value = to,
            Operand::Value(..)
            | Operand::Weight(_)
            | Operand::Table(_)
            | Operand::Cache(_)
            | Operand::Carry(_) => {}
        });
    }

    /// The ops it consists of: itself, or the members of a fused op.
    pub fn members(&self) -> &[Op<O>] {
        match self {
            Op::Fused(fused) => &fused.members,
            op => std::slice::from_ref(op),
        }
    }

    /// The same, mutable.
    pub fn members_mut(&mut self) -> &mut [Op<O>] {
        match self {
            Op::Fused(fused) => &mut fused.members,
            op => std::slice::from_mut(op),
        }
    }
}

impl Op {
    /// How its kernel is picked; `None` for ops that have one kernel only.
    pub fn pick(&self) -> Option<Pick<Variant>> {
        for_each_op!(self, op => op.pick())
    }

    /// Sets how its kernel is picked; false where the op has no such choice.
    pub fn set_pick(&mut self, pick: Pick<Variant>) -> bool {
        for_each_op!(self, op => op.set_pick(pick))
    }

    /// The op in one line, without spans.
    pub fn describe(&self) -> String {
        for_each_op!(self, op => op.describe())
    }

    /// Bytes it reads and writes.
    pub fn traffic(&self) -> Traffic {
        for_each_op!(self, op => op.traffic())
    }

    /// The sizes of the step it is made for.
    pub fn step_size(&self) -> StepSize {
        for_each_op!(self, op => op.step_size())
    }

    /// Gives it scratch; false if it never has any.
    pub fn set_scratch(&mut self, span: Option<Span>) -> bool {
        self.scratch_slot().map(|slot| *slot = span).is_some()
    }

    fn scratch_slot(&mut self) -> Option<&mut Option<Span>> {
        for_each_op!(self, op => op.scratch_slot())
    }

    /// Its scratch, if it has some.
    pub fn scratch(&self) -> Option<Span> {
        let mut op = self.clone();
        op.scratch_slot().and_then(|slot| *slot)
    }

    /// Refuses shapes, dtypes, strides and places outside the op's contract: among others tables that are too short
    /// for the op's lookups, matrices that kernels cannot load, and results that overlap inputs.
    pub fn check(&self) -> Result<()> {
        fn check<C: Contract>(op: &C) -> Result<()> {
            op.check()?;
            check::require_apart(op)
        }
        for_each_op!(self, op => check(op))
    }

    /// Names every span the op touches.
    pub fn visit_spans(&self, visit: SpanVisitor<'_>) {
        for_each_op!(self, op => op.visit_spans(visit));
    }

    /// Makes it independent of other ops: it computes all rows, and neither consumes nor produces a prepared input.
    pub fn detach(&mut self) {
        for_each_op!(self, op => op.detach());
    }

    /// What it is lowered to on a GPU, in order.
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        for_each_op!(self, op => op.lower(target))
    }

    /// Bytes of scratch it needs on a GPU.
    pub(crate) fn scratch_bytes(&self, target: &Target) -> u64 {
        for_each_op!(self, op => op.scratch_bytes(target))
    }

    /// A text of everything that decides how long it takes; `None` for ops with one kernel.
    pub(crate) fn shape(&self) -> Option<String> {
        for_each_op!(self, op => op.shape())
    }

    /// Variants worth measuring.
    pub(crate) fn candidates(&self, target: &Target) -> Vec<Variant> {
        for_each_op!(self, op => op.candidates(target))
    }

    /// Runs the exact scalar reference. The op and its spans were checked.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        for_each_op!(self, op => op.reference(memory));
    }

    /// Lowers the op for this processor.
    pub(crate) fn prepare_cpu(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        for_each_op!(self, op => op.prepare(memory, lowering))
    }
}

/// Every table of the step state that the ops between prologue and sampler read.
pub(crate) fn visit_step_tables(state: &StepState, visit: SpanVisitor<'_>) {
    let StepState { counts, row_seat, q_start, kv_len, position, kv_slot, page_table, .. } = state;
    for table in [counts, row_seat, q_start, kv_len, position, kv_slot, page_table] {
        visit(table.span, Access::Read);
    }
}

/// The spans of an op that computes the live rows of `y` from others.
pub(crate) fn visit_live(from: &[&Tensor], live: Option<Span>, y: &Tensor, visit: SpanVisitor<'_>) {
    let read = from.iter().map(|tensor| tensor.span).chain(live);
    read.for_each(|span| visit(span, Access::Read));
    visit(y.span, Access::Write);
}

/// Bytes of an optional norm's weight.
pub(crate) fn norm_bytes(norm: &Option<Norm>) -> u64 {
    norm.as_ref().map_or(0, |norm| norm.weight.bytes())
}

impl<O: Operands> Norm<O> {
    pub(crate) fn bind<B: Binder<O>>(&self, to: &B) -> Result<Norm, B::Error> {
        Ok(Norm { weight: to.weight(self.weight)?, eps: self.eps })
    }
}

/// Rows that must be computed: all, or as many as a count in memory says.
pub(crate) fn live_rows(memory: &CpuMemory, live: Option<Span>, rows: usize) -> usize {
    live.map_or(rows, |live| rows.min(Words::of_span(memory, live).get(0) as usize))
}
