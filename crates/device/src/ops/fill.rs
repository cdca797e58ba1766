//! Fills a span with a repeated 32-bit word.

use super::{Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require};
use crate::Result;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::cpu::view::Words;
use crate::cuda::launch::{Lowered, Target};
use crate::dtype::Bytes;
use crate::operand::{Binder, Bound, OperandVisitor, Operands};
use serde::{Deserialize, Serialize};

/// Fills a span with a repeated 32-bit word.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Fill<O: Operands = Bound> {
    /// Destination; a multiple of 4 bytes.
    pub to: O::Bytes,
    /// The word.
    pub word: u32,
}

impl<O: Operands> Bindable for Fill<O> {
    type O = O;
    type Bound = Fill;

    fn operands(&mut self, _visit: OperandVisitor<'_, O>) {}

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Fill, B::Error> {
        Ok(Fill { to: to.bytes(self.to)?, word: self.word })
    }
}

impl Contract for Fill {
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
    pub(crate) fn lower(&self, _target: &Target) -> Result<Vec<Lowered>> {
        Ok(vec![Lowered::Fill { to: self.to, word: self.word }])
    }

    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, Fill::reference)
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let words = Words::of_span(memory, self.to);
        (0..words.len()).for_each(|index| words.set(index, self.word));
    }
}
