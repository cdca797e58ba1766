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
        match self {
            Op::Linear(op) => Some(op.pick.map(Variant::Linear)),
            Op::Attention(op) => Some(op.pick.map(Variant::Attention)),
            Op::Prologue(_)
            | Op::Embed(_)
            | Op::RmsNorm(_)
            | Op::RopeKv(_)
            | Op::Gather(_)
            | Op::Sample(_)
            | Op::Copy(_)
            | Op::Fill(_)
            | Op::Noise(_)
            | Op::Layers(_) => None,
        }
    }

    /// Sets how its kernel is picked; false where the op has no such choice.
    pub fn set_pick(&mut self, pick: Pick<Variant>) -> bool {
        match (self, pick) {
            (Op::Linear(op), Pick::Named(Variant::Linear(variant))) => {
                op.pick = Pick::Named(variant);
            }
            (Op::Attention(op), Pick::Named(Variant::Attention(variant))) => {
                op.pick = Pick::Named(variant);
            }
            (_, Pick::Named(_)) => return false,
            (Op::Linear(op), Pick::Best) => op.pick = Pick::Best,
            (Op::Linear(op), Pick::Rule) => op.pick = Pick::Rule,
            (Op::Linear(op), Pick::Fixed) => op.pick = Pick::Fixed,
            (Op::Attention(op), Pick::Best) => op.pick = Pick::Best,
            (Op::Attention(op), Pick::Rule) => op.pick = Pick::Rule,
            (Op::Attention(op), Pick::Fixed) => op.pick = Pick::Fixed,
            (_, Pick::Best | Pick::Rule | Pick::Fixed) => return false,
        }
        true
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
