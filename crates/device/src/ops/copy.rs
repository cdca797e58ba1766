//! Copies a span to another of the same length. Spans must not overlap.

use super::{Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require};
use crate::cpu::memory::{CpuMemory, copy_bytes};
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::cuda::launch::{Lowered, Target};
use crate::dtype::Bytes;
use crate::operand::{Binder, Bound, OperandVisitor, Operands};
use crate::{Region, Result};
use serde::{Deserialize, Serialize};

/// Copies `from` to `to`; equal lengths, no overlap.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Copy<O: Operands = Bound> {
    /// Source.
    pub from: O::Bytes,
    /// Destination.
    pub to: O::Bytes,
}

impl<O: Operands> Bindable for Copy<O> {
    type O = O;
    type Bound = Copy;

    fn operands(&mut self, _visit: OperandVisitor<'_, O>) {}

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Copy, B::Error> {
        Ok(Copy { from: to.bytes(self.from)?, to: to.bytes(self.to)? })
    }
}

impl Contract for Copy {
    fn check(&self) -> Result<()> {
        require(self.from.len == self.to.len, Self::NAME, || "lengths differ".into())?;
        require(!self.from.overlaps(self.to), Self::NAME, || "spans overlap".into())
    }

    fn describe(&self) -> String {
        format!("copy {}", Bytes(self.from.len))
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.from, Access::Read);
        visit(self.to, Access::Write);
    }
}

impl Copy {
    pub(crate) fn lower(&self, _target: &Target) -> Result<Vec<Lowered>> {
        Ok(vec![Lowered::Copy { from: self.from, to: self.to }])
    }

    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, Copy::reference)
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let (from, to) = (memory.address(self.from), memory.address(self.to));
        let shared = [self.from, self.to].iter().any(|span| span.region == Region::HostMapped);
        // SAFETY: both spans were checked against the arena and do not overlap.
        unsafe { copy_bytes(from, to, self.from.len as usize, shared) };
    }
}
