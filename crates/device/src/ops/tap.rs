//! Keeps hidden states for a drafter that reads them: the rows of x become columns of a table of the step state
//! ([`crate::step::Features`]), which other programs of the step, and later steps, read.

mod cuda;

use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require, require_fit,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::cpu::view::Matrix;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, StepState, Tensor};
use serde::{Deserialize, Serialize};

/// Where hidden states are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kept {
    /// Of each token of the step, by the model that verifies: these columns from here on.
    Token(u32),
    /// Of each row, by the model that drafts, after its last draft.
    Row,
}

/// Keeps hidden states.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Tap<O: Operands = Bound> {
    /// What is kept.
    pub x: O::Value,
    /// Where.
    pub to: Kept,
    /// The tables.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
}

impl<O: Operands> Bindable for Tap<O> {
    type O = O;
    type Bound = Tap;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Tap, B::Error> {
        Ok(Tap { x: to.value(self.x)?, to: self.to, state: to.state() })
    }
}

impl Tap {
    /// The table that it writes, and from which column on.
    fn kept(&self) -> Option<(Tensor, u32)> {
        let features = self.state.features?;
        Some(match self.to {
            Kept::Token(column) => (features.token, column),
            Kept::Row => (features.drafted, 0),
        })
    }
}

impl Contract for Tap {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        require_fit(&self.x, Self::NAME, "x")?;
        let Some((kept, column)) = self.kept() else {
            return require(false, Self::NAME, || "no tables for hidden states".into());
        };
        let Tensor { rows, cols, dtype, .. } = self.x;
        let fits = rows <= kept.rows && column.saturating_add(cols) <= kept.cols;
        require(fits && dtype == kept.dtype, Self::NAME, || {
            format!("{} at column {column} of {kept}", self.x)
        })?;
        require(dtype.is_plain(), Self::NAME, || format!("{dtype:?} is no plain type"))
    }

    fn describe(&self) -> String {
        match self.to {
            Kept::Token(column) => format!("keep {} of each token at column {column}", self.x),
            Kept::Row => format!("keep {} of each draft", self.x),
        }
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: 2 * self.x.bytes() }
    }

    fn step_size(&self) -> StepSize {
        match self.to {
            Kept::Token(_) => StepSize { rows: None, tokens: Some(self.x.rows) },
            Kept::Row => StepSize::rows(self.x.rows),
        }
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Read);
        if let Some((kept, _)) = self.kept() {
            visit(kept.span, Access::Update);
        }
    }
}

impl Tap {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, Tap::reference)
    }

    /// Both the reference and the CPU version: copies of rows.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let (kept, column) = self.kept().expect("checked with the op");
        let (x, kept) = (Matrix::new(memory, &self.x), Matrix::new(memory, &kept));
        for row in 0..x.rows {
            // SAFETY: the row lies inside x, its place inside the table: both were checked with the op. They do not
            // overlap, because no value lies in the step state.
            unsafe {
                let bytes = x.dtype.bytes(x.cols);
                std::ptr::copy_nonoverlapping(x.at(row, 0), kept.at(row, column as usize), bytes);
            }
        }
    }
}
