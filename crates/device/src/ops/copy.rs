//! Copies a span to another of the same length. Spans must not overlap.

use super::{Access, Contract, SpanVisitor, StepSize, Traffic, require};
use crate::cpu::memory::{CpuMemory, copy_bytes};
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::dtype::Bytes;
use crate::op::Copy;
use crate::{Region, Result};

impl Contract for Copy {
    const NAME: &'static str = "copy";

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
