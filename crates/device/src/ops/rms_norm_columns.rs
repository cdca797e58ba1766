//! RMS normalisation of a range of columns, in place: columns `from .. from + n` of each row, where n is the length
//! of the norm's weight, are normalised as [`RmsNorm`] would normalise them as a separate row. The other columns do
//! not change. For models that normalise all heads of q together, and all heads of k, inside the joined matrix of q,
//! k and v.
//!
//! It has no kernel of its own: it is [`RmsNorm`] over a view of the columns.

use super::{
    Access, Bindable, Contract, Named, Reuse, SpanVisitor, StepSize, Traffic, require, require_fit,
    require_float, require_norm,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::Step;
use crate::cuda::launch::{Lowered, Target};
use crate::op::{Norm, RmsNorm};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands};
use crate::{Result, Tensor};
use serde::{Deserialize, Serialize};

/// Normalises a range of columns in place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct RmsNormColumns<O: Operands = Bound> {
    /// The whole matrix.
    pub x: O::Value,
    /// The first column that is normalised; starts at a multiple of 16 bytes.
    pub from: u32,
    /// Weight and epsilon; the weight's length is the number of columns.
    pub norm: Norm<O>,
    /// The same bytes as `x`.
    pub y: O::Value,
}

impl<O: Operands> Bindable for RmsNormColumns<O> {
    type O = O;
    type Bound = RmsNormColumns;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Update));
        visit(Operand::Weight(&mut self.norm.weight));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<RmsNormColumns, B::Error> {
        let (x, y) = (to.value(self.x)?, to.value(self.y)?);
        Ok(RmsNormColumns { x, from: self.from, norm: self.norm.bind(to)?, y })
    }

    fn reuse(&self) -> Option<Reuse<O::Value>> {
        Some(Reuse { from: self.x, to: self.y, must: true })
    }
}

impl Contract for RmsNormColumns {
    fn check(&self) -> Result<()> {
        require_fit(&self.x, Self::NAME, "x")?;
        require_float(&self.x, Self::NAME, "x")?;
        require(self.y == self.x, Self::NAME, || "columns are normalised in place".into())?;
        let (from, cols) = (self.from, self.norm.weight.cols);
        require_norm(&self.norm, cols, Self::NAME)?;
        require(u64::from(from) + u64::from(cols) <= u64::from(self.x.cols), Self::NAME, || {
            format!("{cols} columns from {from} on, of {}", self.x.cols)
        })?;
        require_fit(&self.columns(), Self::NAME, "the range of columns")
    }

    fn describe(&self) -> String {
        let end = self.from + self.norm.weight.cols;
        format!("rms_norm {}, columns {}..{end}", self.x, self.from)
    }

    fn traffic(&self) -> Traffic {
        let part = self.x.dtype.bytes(self.x.rows as usize * self.norm.weight.cols as usize);
        Traffic { weights: self.norm.weight.bytes(), values: 2 * part as u64 }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Update);
        visit(self.norm.weight.span, Access::Read);
    }
}

impl RmsNormColumns {
    /// The columns that are normalised, of all rows.
    fn columns(&self) -> Tensor {
        let skipped = self.x.dtype.bytes(self.from as usize) as u64;
        let span = self.x.span.part(skipped, self.x.span.len - skipped);
        Tensor { span, cols: self.norm.weight.cols, ..self.x }
    }

    fn rms_norm(&self) -> RmsNorm {
        RmsNorm { x: self.columns(), norm: self.norm, y: self.columns() }
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        self.rms_norm().reference(memory);
    }

    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        self.rms_norm().prepare(memory, lowering)
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        self.rms_norm().lower(target)
    }
}
