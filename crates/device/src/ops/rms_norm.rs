//! `y = x / sqrt(mean(x²) + eps) · weight` for each row; the mean and the scaling in f32.

pub(crate) mod cuda;

use super::{
    Access, Contract, SpanVisitor, StepSize, Traffic, require, require_fit, require_float,
    require_norm,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::view::Matrix;
use crate::op::{Norm, RmsNorm};
use crate::{Result, Tensor};

mod fast;

pub(crate) use fast::NormStep;

impl Contract for RmsNorm {
    const NAME: &'static str = "rms_norm";

    fn check(&self) -> Result<()> {
        for (tensor, what) in [(&self.x, "x"), (&self.y, "y")] {
            require_fit(tensor, Self::NAME, what)?;
            require_float(tensor, Self::NAME, what)?;
        }
        require_norm(&self.norm, self.x.cols, Self::NAME)?;
        require(self.x.rows == self.y.rows && self.x.cols == self.y.cols, Self::NAME, || {
            "x and y differ in shape".into()
        })
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

    fn in_place(&self) -> Option<(&Tensor, &Tensor)> {
        Some((&self.x, &self.y))
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
