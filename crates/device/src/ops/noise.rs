//! Dummy weights: element i (row-major, i = row · cols + col) is `mean + scale · u` with u in [−1, 1):
//! u = (h >> 40) · 2⁻²³ − 1, h = mix(seed + (i + 1) · 0x9E3779B97F4A7C15) in wrapping 64-bit arithmetic,
//! mix = the SplitMix64 finaliser: z = (z ^ z >> 30) · 0xBF58476D1CE4E5B9;
//! z = (z ^ z >> 27) · 0x94D049BB133111EB; z ^ z >> 31.
//! `mean + scale · u` is one f32 multiplication, one f32 addition, then a rounding to nearest even to the
//! dtype: every device gives the same bits.
//!
//! Types with scales are spread over the whole range of their values, with the same scale everywhere and mean 0: e4m3
//! of `448 · u` times `scale / 448`; h's upper four bits less 7 or 8 (by row) times `scale / 7.5`; h's upper four bits as an
//! element of MXFP4 times the power of 2 below `scale / 4`, so that the deviation is about that of other types.

mod cuda;

use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require, require_fit,
    require_float, require_weights,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::view::Matrix;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands};
use crate::scaled::{self, Chunk, e4m3, mxfp4};
use crate::{DType, Result};
use serde::{Deserialize, Serialize};
use std::ops::Range;

mod fast;

/// What the scale is divided by for the exponents of MXFP4.
const MXFP4_SIZE: f32 = 4.0;

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
        if scaled::is_scaled(self.to.dtype) {
            require(self.mean == 0.0, Self::NAME, || "scaled types have the mean 0".into())?;
            return require_weights(&self.to, Self::NAME, "to");
        }
        require_fit(&self.to, Self::NAME, "to")?;
        let bytes = self.to.dtype == DType::E4M3;
        if bytes { Ok(()) } else { require_float(&self.to, Self::NAME, "to") }
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
        if scaled::is_scaled(self.to.dtype) {
            return self.fill_scaled(&to, 0..to.rows);
        }
        for row in 0..to.rows {
            for col in 0..to.cols {
                to.set(row, col, self.value((row * to.cols + col) as u64));
            }
        }
    }

    /// Element `index`, before the rounding to the dtype.
    pub(crate) fn value(&self, index: u64) -> f32 {
        let u = (self.hash(index) >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        self.mean + self.scale * u
    }

    /// The number that element `index` is made of.
    fn hash(&self, index: u64) -> u64 {
        let step = index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let z = self.seed.wrapping_add(step);
        let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// Whole units of rows of a type with scales.
    pub(crate) fn fill_scaled(&self, to: &Matrix, rows: Range<usize>) {
        let (cols, dtype) = (to.cols, to.dtype);
        let mut chunk = Chunk::new(dtype, (to.rows, cols), rows.clone());
        for row in rows {
            let index = |col: usize| (row * cols + col) as u64;
            match scaled::group(dtype) {
                None if dtype == DType::Mxfp4 => {
                    let code = |col: usize| (self.hash(index(col)) >> 60) as u8;
                    let bytes: Vec<u8> =
                        (0..cols / 2).map(|at| code(2 * at) | code(2 * at + 1) << 4).collect();
                    let exponent = ((self.scale / MXFP4_SIZE).to_bits() >> 23) as u8;
                    chunk.set_mxfp4(row, &bytes, &vec![exponent; cols / mxfp4::GROUP]);
                }
                None => {
                    let u = |col| (self.hash(index(col)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
                    let bytes: Vec<u8> =
                        (0..cols).map(|col| e4m3::encode(u(col) * e4m3::MOST)).collect();
                    chunk.set_fp8(
                        row,
                        &bytes,
                        &vec![self.scale / e4m3::MOST; chunk.scales_of_row()],
                    );
                }
                Some(group) => {
                    let values: Vec<u8> =
                        (0..cols).map(|col| (self.hash(index(col)) >> 60) as u8).collect();
                    let zeros = vec![7 + (row % 2) as u8; cols / group];
                    chunk.set_int4(row, &values, &vec![self.scale / 7.5; cols / group], &zeros);
                }
            }
        }
        for (at, bytes) in chunk.parts() {
            to.write_bytes(at, &bytes);
        }
    }
}
