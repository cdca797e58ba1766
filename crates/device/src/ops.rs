//! One file per op: its contract in words, the checks of shapes, what it reads and writes, and the
//! exact scalar reference. Beside it, in a folder of the same name, the fast CPU version and the
//! CUDA launcher; the kernel is `kernels/<same name>.cu`.

pub(crate) mod attention;
mod check;
mod copy;
mod embed;
mod fill;
mod gather;
mod layers;
pub(crate) mod linear;
mod noise;
mod prologue;
mod rms_norm;
mod rope_kv;
mod sample;

use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::Step;
use crate::op::Norm;
use crate::variant::{Pick, Variant};
use crate::{Op, Result, Span, StepState, Tensor};
pub(crate) use check::*;

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

/// Memory an op goes through once, without KV pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of weights read.
    pub weights: u64,
    /// Bytes of activations read and written.
    pub values: u64,
}

/// The sizes of a step that an op is made for, as far as it depends on them.
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

    /// A step of so many rows.
    pub(crate) const fn rows(rows: u32) -> StepSize {
        StepSize { rows: Some(rows), tokens: None }
    }
}

/// Gets every span an op touches.
pub type SpanVisitor<'a> = &'a mut dyn FnMut(Span, Access);

/// What every op's file provides.
pub(crate) trait Contract {
    /// The op's name in errors and listings.
    const NAME: &'static str;
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
    /// Where its scratch is noted, if it can have some.
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
    /// What it reads and writes in one place, if it does: the only two matrices that may share bytes, and only all
    /// of them.
    fn in_place(&self) -> Option<(&Tensor, &Tensor)> {
        None
    }
    /// Whether what it writes must be apart from everything else it touches.
    fn is_one_op(&self) -> bool {
        true
    }
}

macro_rules! for_each_op {
    ($self:expr, $op:ident => $body:expr) => {
        match $self {
            Op::Prologue($op) => $body,
            Op::Embed($op) => $body,
            Op::RmsNorm($op) => $body,
            Op::Linear($op) => $body,
            Op::RopeKv($op) => $body,
            Op::Attention($op) => $body,
            Op::Gather($op) => $body,
            Op::Sample($op) => $body,
            Op::Copy($op) => $body,
            Op::Fill($op) => $body,
            Op::Noise($op) => $body,
            Op::Layers($op) => $body,
        }
    };
}

impl Op {
    /// The op's name, for example `rope_kv`.
    pub fn name(&self) -> &'static str {
        fn name<C: Contract>(_: &C) -> &'static str {
            C::NAME
        }
        for_each_op!(self, op => name(op))
    }

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
        let slot = for_each_op!(self, op => op.scratch_slot());
        slot.map(|slot| *slot = span).is_some()
    }

    /// Its scratch, if it has some.
    pub fn scratch(&self) -> Option<Span> {
        let mut op = self.clone();
        for_each_op!(&mut op, op => op.scratch_slot()).and_then(|slot| *slot)
    }

    /// Refuses shapes, dtypes, strides and places outside the op's contract: among others tables shorter than what
    /// the op looks up in them, matrices that kernels cannot load, and results that overlap what is read.
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

    /// Runs the exact scalar reference. The op was checked, its spans too.
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

/// Bytes of an optional norm's weight.
pub(crate) fn norm_bytes(norm: &Option<Norm>) -> u64 {
    norm.as_ref().map_or(0, |norm| norm.weight.bytes())
}
