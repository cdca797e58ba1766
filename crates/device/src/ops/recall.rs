//! Hidden states that were kept for a drafter, as its input. Row r of y is of row r of the step: the states of the model that
//! verifies after the last token that has keys, or those of the drafter after its last draft.

mod cuda;

use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require, require_fit,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::cpu::tables::Tables;
use crate::cpu::view::Matrix;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, StepState, Tensor};
use serde::{Deserialize, Serialize};

/// Takes hidden states that were kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Recall<O: Operands = Bound> {
    /// Whether they are the drafter's own.
    pub drafted: bool,
    /// A row for each row of the step.
    pub y: O::Value,
    /// The tables.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
}

impl<O: Operands> Bindable for Recall<O> {
    type O = O;
    type Bound = Recall;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Recall, B::Error> {
        Ok(Recall { drafted: self.drafted, y: to.value(self.y)?, state: to.state() })
    }
}

impl Recall {
    /// The table that it reads.
    fn kept(&self) -> Option<Tensor> {
        let features = self.state.features?;
        Some(if self.drafted { features.drafted } else { features.last })
    }
}

impl Contract for Recall {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        require_fit(&self.y, Self::NAME, "y")?;
        let Some(kept) = self.kept() else {
            return require(false, Self::NAME, || "no tables for hidden states".into());
        };
        let fits = self.y.rows <= self.state.limits.rows && self.y.cols == kept.cols;
        require(fits && self.y.dtype == kept.dtype && kept.dtype.is_plain(), Self::NAME, || {
            format!("{} of {kept}", self.y)
        })
    }

    fn describe(&self) -> String {
        let what = if self.drafted { "last draft" } else { "last token" };
        format!("recall {} of the {what}", self.y)
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: 2 * self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::rows(self.y.rows)
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.state.row_seat.span, Access::Read);
        if let Some(kept) = self.kept() {
            visit(kept.span, Access::Read);
        }
        visit(self.y.span, Access::Write);
    }
}

impl Recall {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, Recall::reference)
    }

    /// Both the reference and the CPU version: copies of rows.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let tables = Tables::new(memory, &self.state);
        let kept = Matrix::new(memory, &self.kept().expect("checked with the op"));
        let y = Matrix::new(memory, &self.y);
        for row in 0..y.rows {
            let seat = tables.row_seat.get(row).min(tables.limits.seats) as usize;
            let from = if self.drafted { row } else { seat };
            // SAFETY: both rows lie inside their tensors, which were checked with the op; no value lies in the step state.
            unsafe {
                let bytes = y.dtype.bytes(y.cols);
                std::ptr::copy_nonoverlapping(kept.at(from, 0), y.at(row, 0), bytes);
            }
        }
    }
}
