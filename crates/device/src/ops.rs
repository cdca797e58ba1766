//! One file per op: its contract in words, the checks of shapes, what it reads and writes, and the
//! exact scalar reference. Beside it, in a folder of the same name, the fast CPU version and the
//! CUDA launcher; the kernel is `kernels/<same name>.cu`.

mod attention;
mod copy;
mod embed;
mod fill;
mod gather;
mod layers;
mod linear;
mod noise;
mod prologue;
mod rms_norm;
mod rope_kv;
mod sample;

use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::Step;
use crate::op::Norm;
use crate::{DType, Error, Op, Result, Span, StepState, Tensor};

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

    /// The variant of its kernel it asks for, if any; `None` for ops that have no variants.
    pub fn variant(&self) -> Option<&Option<String>> {
        match self {
            Op::Linear(op) => Some(&op.variant),
            Op::Attention(op) => Some(&op.variant),
            _ => None,
        }
    }

    /// Asks for a variant; the empty one is what the rule says. Nothing where there are none.
    pub fn ask_for(&mut self, name: &str) {
        match self {
            Op::Linear(op) => op.variant = Some(name.into()),
            Op::Attention(op) => op.variant = Some(name.into()),
            _ => {}
        }
    }

    /// Refuses shapes, dtypes and strides outside the op's contract.
    pub fn check(&self) -> Result<()> {
        for_each_op!(self, op => op.check())
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

/// A contract violation, unless `holds`.
pub(crate) fn require(holds: bool, op: &str, problem: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Contract { op: op.into(), problem: problem() }) }
}

/// That a tensor fits its span and its rows do not overlap.
pub(crate) fn require_fit(tensor: &Tensor, op: &str, what: &str) -> Result<()> {
    let elems = match tensor.rows {
        0 => 0,
        rows => (rows as usize - 1) * tensor.stride as usize + tensor.cols as usize,
    };
    let whole = elems.is_multiple_of(tensor.dtype.block_elems());
    require(whole && tensor.stride >= tensor.cols, op, || {
        format!(
            "{what}: {}×{} with stride {} is not whole rows of {:?}",
            tensor.rows, tensor.cols, tensor.stride, tensor.dtype
        )
    })?;
    require(tensor.dtype.bytes(elems) as u64 <= tensor.span.len, op, || {
        format!(
            "{what}: {elems} elements of {:?} do not fit {} bytes",
            tensor.dtype, tensor.span.len
        )
    })
}

/// That a tensor holds floats an op can compute with.
pub(crate) fn require_float(tensor: &Tensor, op: &str, what: &str) -> Result<()> {
    require(matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16), op, || {
        format!("{what} is {:?}; f32, f16 or bf16 is needed", tensor.dtype)
    })
}

/// That a norm's weight has one element per column.
pub(crate) fn require_norm(norm: &Norm, cols: u32, op: &str) -> Result<()> {
    require_fit(&norm.weight, op, "norm weight")?;
    require_float(&norm.weight, op, "norm weight")?;
    require(norm.weight.cols == cols && norm.weight.rows == 1, op, || {
        format!("norm weight is {}×{}, not 1×{cols}", norm.weight.rows, norm.weight.cols)
    })
}

/// Every table of the step state that the ops between prologue and sampler read.
pub(crate) fn visit_step_tables(state: &StepState, visit: SpanVisitor<'_>) {
    let StepState { counts, row_seat, q_start, kv_len, position, kv_slot, page_table, .. } = state;
    for table in [counts, row_seat, q_start, kv_len, position, kv_slot, page_table] {
        visit(table.span, Access::Read);
    }
}
