//! Fills a span with a repeated 32-bit word.

use super::{Access, Contract, SpanVisitor, StepSize, Traffic, require};
use crate::Result;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::cpu::view::Words;
use crate::dtype::Bytes;
use crate::op::Fill;

impl Contract for Fill {
    const NAME: &'static str = "fill";

    fn check(&self) -> Result<()> {
        let whole = self.to.len.is_multiple_of(4) && self.to.offset.is_multiple_of(4);
        require(whole, Self::NAME, || "not whole words".into())
    }

    fn describe(&self) -> String {
        format!("fill {} with {:#x}", Bytes(self.to.len), self.word)
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.to, Access::Write);
    }
}

impl Fill {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, Fill::reference)
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let words = Words::of_span(memory, self.to);
        (0..words.len()).for_each(|index| words.set(index, self.word));
    }
}
