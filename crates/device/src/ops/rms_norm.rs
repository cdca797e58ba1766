//! `y = x / sqrt(mean(x²) + eps) · weight` for each row; the mean and the scaling in f32.

pub(crate) mod cuda;

use super::{
    Access, Bindable, Contract, Named, Reuse, SpanVisitor, StepSize, Traffic, require_matrices,
    require_norm, require_shape_of,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::view::Matrix;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands};
use crate::{Result, Tensor};
use serde::{Deserialize, Serialize};

mod fast;

pub(crate) use fast::NormStep;

/// RMS normalisation of the input of another op: y = x / sqrt(mean(x²) + eps) · weight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Norm<O: Operands = Bound> {
    /// One element per column.
    pub weight: O::Weight,
    /// Added to the mean square.
    pub eps: f32,
}

/// Normalises rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct RmsNorm<O: Operands = Bound> {
    /// Input.
    pub x: O::Value,
    /// Weight and epsilon.
    pub norm: Norm<O>,
    /// Output; may be `x`.
    pub y: O::Value,
}

impl<O: Operands> Bindable for RmsNorm<O> {
    type O = O;
    type Bound = RmsNorm;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Weight(&mut self.norm.weight));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<RmsNorm, B::Error> {
        let (x, y) = (to.value(self.x)?, to.value(self.y)?);
        Ok(RmsNorm { x, norm: self.norm.bind(to)?, y })
    }

    fn reuse(&self) -> Option<Reuse<O::Value>> {
        Some(Reuse { from: self.x, to: self.y, must: false })
    }
}

impl Contract for RmsNorm {
    fn check(&self) -> Result<()> {
        require_matrices(&[(&self.x, "x"), (&self.y, "y")], Self::NAME)?;
        require_norm(&self.norm, self.x.cols, Self::NAME)?;
        require_shape_of(&self.y, &self.x, Self::NAME, "x")
    }

    fn describe(&self) -> String {
        format!("rms_norm {}", self.x)
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: self.norm.weight.bytes(), values: self.x.bytes() + self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Read);
        visit(self.norm.weight.span, Access::Read);
        visit(self.y.span, Access::Write);
    }

    fn in_place(&self) -> Option<(Tensor, Tensor)> {
        Some((self.x, self.y))
    }
}

impl RmsNorm {
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        let mut values = vec![0.0; x.cols];
        for row in 0..x.rows {
            x.read_row(row, &mut values);
            self.norm.apply(memory, &mut values);
            for (col, value) in values.iter().enumerate() {
                y.set(row, col, *value);
            }
        }
    }
}

impl Norm {
    /// Normalises a row in place: the reference every op with a norm uses.
    pub(crate) fn apply(&self, memory: &CpuMemory, values: &mut [f32]) {
        let weight = Matrix::new(memory, &self.weight);
        let squares: f64 = values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        let mean = (squares / values.len() as f64) as f32;
        let scale = 1.0 / (mean + self.eps).sqrt();
        for (col, value) in values.iter_mut().enumerate() {
            *value = *value * scale * weight.get(0, col);
        }
    }
}
