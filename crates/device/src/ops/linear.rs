//! `y = x · wᵀ + bias`.
//!
//! Sums are in f32 and rounded once, when storing. Packed weights (`P4`, `P8`) are multiplied with x quantised to 8 bits
//! per 32 columns, as `cpu::pack::quantise` does; sums within a block are then exact integers.
//! With [`crate::variant::Pick::Fixed`] a row's sums are in the same order for any number of rows; on the CPU that is
//! always so.
//! Rows of `x` past the `live` count may be left uncomputed; their `y` is then unchanged.
//! Weights in e4m3 may be multiplied with x rounded to e4m3, with a scale for each 128 columns of a row or for a row.
//! What its kernels can do before and after the linear is in `linear/chain.rs`.

pub(crate) mod blocks;
mod cuda;

use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, live_rows, require,
    require_live, require_matrices, require_scratch, require_vector, require_weights,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::pack;
use crate::cpu::step::Step;
use crate::cpu::view::Matrix;
use crate::cuda::launch::{Lowered, Target};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::variant::{LinearVariant, Pick, Variant};
use crate::{DType, Result, Span, Tensor};
pub use chain::{Epilogue, LinearChain, NormHandoff};
use serde::{Deserialize, Serialize};
use std::ops::Range;

pub(super) mod acts;
pub(crate) mod adapters;
mod amx;
mod avx2;
mod avx512;
pub(crate) mod chain;
mod even;
mod fast;
pub(super) mod finish;
mod ggml;
pub(super) mod hand;
mod k_blocks;
pub(super) mod packed;
mod panel;
pub(super) mod plain;
pub(super) mod scaled;
mod split;
mod tiles;
mod turn;
pub(crate) mod variant;
mod vnni;
mod wgmma;

/// Multiplies by a weight matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Linear<O: Operands = Bound> {
    /// rows × k activations.
    pub x: O::Value,
    /// n × k weights.
    pub w: O::Weight,
    /// n elements added to each row's sums.
    pub bias: Option<O::Weight>,
    /// rows × n.
    pub y: O::Value,
    /// Rows past this device-side count need not be computed (a u32 in a `counts` tensor).
    #[serde(skip_serializing_if = "unset")]
    pub live: O::Late<Option<Span>>,
    /// Room for partial sums and prepared inputs; the target says how much.
    #[serde(skip_serializing_if = "unset")]
    pub scratch: O::Late<Option<Span>>,
    /// Which kernel.
    #[serde(skip_serializing_if = "unset")]
    pub pick: O::Late<Pick<LinearVariant>>,
}

impl Linear {
    /// `y = x · wᵀ` and nothing else.
    pub fn new(x: Tensor, w: Tensor, y: Tensor) -> Linear {
        Linear { x, w, bias: None, y, live: None, scratch: None, pick: Pick::Best }
    }
}

impl<O: Operands> Bindable for Linear<O> {
    type O = O;
    type Bound = Linear;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Weight(&mut self.w));
        if let Some(bias) = &mut self.bias {
            visit(Operand::Weight(bias));
        }
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Linear, B::Error> {
        Ok(Linear {
            x: to.value(self.x)?,
            w: to.weight(self.w)?,
            bias: self.bias.map(|bias| to.weight(bias)).transpose()?,
            y: to.value(self.y)?,
            live: to.live(self.x),
            scratch: None,
            pick: Pick::Best,
        })
    }
}

impl Contract for Linear {
    fn check(&self) -> Result<()> {
        require_matrices(&[(&self.x, "x"), (&self.y, "y")], Self::NAME)?;
        require_weights(&self.w, Self::NAME, "w")?;
        require(self.x.cols == self.w.cols, Self::NAME, || {
            format!("x has {} columns, w has {}", self.x.cols, self.w.cols)
        })?;
        require(self.y.rows == self.x.rows && self.y.cols == self.w.rows, Self::NAME, || {
            let (y, rows, n) = (&self.y, self.x.rows, self.w.rows);
            format!("y is {}×{}, not {rows}×{n}", y.rows, y.cols)
        })?;
        if let Some(bias) = &self.bias {
            require_vector(bias, self.w.rows, Self::NAME, "bias")?;
        }
        require_live(self.live, Self::NAME)?;
        require_scratch(self.scratch, Self::NAME)
    }

    fn describe(&self) -> String {
        LinearChain::from(self).describe()
    }

    fn traffic(&self) -> Traffic {
        LinearChain::from(self).traffic()
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn scratch_slot(&mut self) -> Option<&mut Option<Span>> {
        Some(&mut self.scratch)
    }

    fn pick(&self) -> Option<Pick<Variant>> {
        Some(self.pick.map(Variant::Linear))
    }

    fn set_pick(&mut self, pick: Pick<Variant>) -> bool {
        pick.narrow(Variant::linear).map(|pick| self.pick = pick).is_some()
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Read);
        visit(self.w.span, Access::Read);
        if let Some(bias) = &self.bias {
            visit(bias.span, Access::Read);
        }
        if let Some(live) = self.live {
            visit(live, Access::Read);
        }
        if let Some(scratch) = self.scratch {
            visit(scratch, Access::Write);
        }
        visit(self.y.span, Access::Write);
    }

    fn scratch_bytes(&self, target: &Target) -> u64 {
        LinearChain::from(self).scratch_bytes(target)
    }

    fn shape(&self) -> Option<String> {
        LinearChain::from(self).shape_text()
    }

    fn candidates(&self, target: &Target) -> Vec<Variant> {
        LinearChain::from(self).candidates(target)
    }

    fn detach(&mut self) {
        self.live = None;
    }
}

impl Linear {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        LinearChain::from(self).prepare(memory, lowering)
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        LinearChain::from(self).lower(target)
    }

    /// Sums in f64, one element after the other.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        let input = |row: usize| {
            let mut values = vec![0.0; x.cols];
            x.read_row(row, &mut values);
            values
        };
        let inputs: Vec<Vec<f32>> = (0..live_rows(memory, self.live, x.rows)).map(input).collect();
        let mut sums = vec![vec![0.0f32; self.w.rows as usize]; inputs.len()];
        let w = Matrix::new(memory, &self.w);
        reference_sums(&w, 0..w.rows, &inputs, &mut sums);
        for (row, sums) in sums.iter_mut().enumerate() {
            if let Some(bias) = &self.bias {
                let bias = Matrix::new(memory, bias);
                sums.iter_mut().enumerate().for_each(|(n, sum)| *sum += bias.get(0, n));
            }
            sums.iter().enumerate().for_each(|(col, sum)| y.set(row, col, *sum));
        }
    }
}

/// The reference's sums: `inputs` times some rows of `w`.
pub(crate) fn reference_sums(
    w: &Matrix,
    rows: Range<usize>,
    inputs: &[Vec<f32>],
    sums: &mut [Vec<f32>],
) {
    match w.dtype {
        DType::P4 | DType::P8 => packed_sums(w, rows, inputs, sums),
        _ => plain_sums(w, rows, inputs, sums),
    }
}

fn plain_sums(w: &Matrix, rows: Range<usize>, inputs: &[Vec<f32>], sums: &mut [Vec<f32>]) {
    let mut weights = vec![0.0; w.cols];
    for (at, n) in rows.enumerate() {
        w.read_row(n, &mut weights);
        for (x, sums) in inputs.iter().zip(&mut *sums) {
            let terms = x.iter().zip(&weights).map(|(x, w)| f64::from(*x) * f64::from(*w));
            sums[at] = terms.sum::<f64>() as f32;
        }
    }
}

fn packed_sums(w: &Matrix, rows: Range<usize>, inputs: &[Vec<f32>], sums: &mut [Vec<f32>]) {
    let dtype = w.dtype;
    // SAFETY: a packed matrix is dense, so it takes exactly these bytes of its span.
    let packed = unsafe { std::slice::from_raw_parts(w.start(), dtype.bytes(w.rows * w.cols)) };
    for (x, sums) in inputs.iter().zip(sums) {
        let x: Vec<_> = x.chunks_exact(pack::COLS).map(pack::quantise).collect();
        for (n, sum) in rows.clone().zip(sums) {
            let terms = x.iter().enumerate().map(|(at, x)| {
                let block = pack::block(dtype, packed, w.cols, n, at);
                let values =
                    (0..pack::COLS).map(|c| pack::element(dtype, block, n % pack::ROWS, c));
                let dot: i32 = values.zip(x.q).map(|((_, _, w), x)| w * i32::from(x)).sum();
                let (d, m, _) = pack::element(dtype, block, n % pack::ROWS, 0);
                f64::from(d) * f64::from(x.d) * f64::from(dot) + f64::from(m) * f64::from(x.s)
            });
            *sum = terms.sum::<f64>() as f32;
        }
    }
}
