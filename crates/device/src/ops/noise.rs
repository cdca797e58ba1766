//! Dummy weights: element i (row-major, i = row · cols + col) is `mean + scale · u` with u in [−1, 1):
//! u = (h >> 40) · 2⁻²³ − 1, h = mix(seed + (i + 1) · 0x9E3779B97F4A7C15) in wrapping 64-bit arithmetic,
//! mix = the SplitMix64 finaliser: z = (z ^ z >> 30) · 0xBF58476D1CE4E5B9;
//! z = (z ^ z >> 27) · 0x94D049BB133111EB; z ^ z >> 31.
//! `mean + scale · u` is one f32 multiplication, one f32 addition, then a rounding to nearest even to the
//! dtype: every device gives the same bits. Only F32, F16 and BF16.

mod cuda;

use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require_fit, require_float,
};
use crate::Result;
use crate::cpu::memory::CpuMemory;
use crate::cpu::view::Matrix;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands};
use serde::{Deserialize, Serialize};

mod fast;

/// Fills a matrix with numbers drawn from a seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Noise<O: Operands = Bound> {
    /// Destination.
    pub to: O::Value,
    /// Same seed, same numbers, on every device.
    pub seed: u64,
    /// Centre of the range.
    pub mean: f32,
    /// Half the width of the range.
    pub scale: f32,
}

impl<O: Operands> Bindable for Noise<O> {
    type O = O;
    type Bound = Noise;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.to, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Noise, B::Error> {
        let (seed, mean, scale) = (self.seed, self.mean, self.scale);
        Ok(Noise { to: to.value(self.to)?, seed, mean, scale })
    }
}

impl Contract for Noise {
    fn check(&self) -> Result<()> {
        require_fit(&self.to, Self::NAME, "to")?;
        require_float(&self.to, Self::NAME, "to")
    }

    fn describe(&self) -> String {
        format!("noise {} seed {}", self.to, self.seed)
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.to.span, Access::Write);
    }
}

impl Noise {
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let to = Matrix::new(memory, &self.to);
        for row in 0..to.rows {
            for col in 0..to.cols {
                to.set(row, col, self.value((row * to.cols + col) as u64));
            }
        }
    }

    /// Element `index`, before the rounding to the dtype.
    pub(crate) fn value(&self, index: u64) -> f32 {
        let step = index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let z = self.seed.wrapping_add(step);
        let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        let hash = z ^ z >> 31;
        let u = (hash >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        self.mean + self.scale * u
    }
}
