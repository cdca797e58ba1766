//! `y[i] = x[index[i]]`: selects the last token of each row before the head. Equal dtypes; an index past `x` reads
//! row 0.

mod cuda;

use super::{
    Access, Bindable, Contract, Keep, Named, SpanVisitor, StepSize, Traffic, require, require_fit,
    require_indices,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::cpu::view::{Matrix, Words};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, Tensor};
use serde::{Deserialize, Serialize};

/// Gathers rows by index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Gather<O: Operands = Bound> {
    /// u32 indices, one per row of `y`.
    #[serde(skip_serializing_if = "unset")]
    pub index: O::Late<Tensor>,
    /// Source rows.
    pub x: O::Value,
    /// `y[i] = x[index[i]]`.
    pub y: O::Value,
}

impl<O: Operands> Bindable for Gather<O> {
    type O = O;
    type Bound = Gather;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Gather, B::Error> {
        let (x, y) = (to.value(self.x)?, to.value(self.y)?);
        Ok(Gather { index: to.state().last_index, x, y })
    }

    /// Hidden states and log-probabilities of rows that are not gathered are computed later.
    fn keeps(&self) -> Keep<O::Value> {
        Keep::Always
    }
}

impl Contract for Gather {
    fn check(&self) -> Result<()> {
        require_fit(&self.x, Self::NAME, "x")?;
        require_fit(&self.y, Self::NAME, "y")?;
        require_indices(&self.index, self.y.rows, Self::NAME, "index")?;
        require(self.x.dtype == self.y.dtype && self.x.dtype.is_plain(), Self::NAME, || {
            "x and y differ in dtype".into()
        })?;
        require(self.x.cols == self.y.cols, Self::NAME, || "x and y differ in columns".into())
    }

    fn describe(&self) -> String {
        format!("gather {} of {}", self.y, self.x)
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: 2 * self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::rows(self.y.rows)
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.index.span, Access::Read);
        visit(self.x.span, Access::Read);
        visit(self.y.span, Access::Write);
    }
}

impl Gather {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, Gather::reference)
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let index = Words::new(memory, &self.index);
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        let bytes = x.dtype.bytes(x.cols);
        for row in 0..y.rows {
            let from = index.get(row) as usize;
            let from = if from < x.rows { from } else { 0 };
            // SAFETY: both rows lie inside their tensors; `copy` because a row may be its own source.
            unsafe { std::ptr::copy(x.at(from, 0), y.at(row, 0), bytes) };
        }
    }
}
