//! `y = (x − mean) / sqrt(variance + eps) · weight + bias` for each row: mean, variance (of all n elements) and scaling in
//! f32, rounded once, when storing. `y` may be `x`.

use super::{
    Access, Bindable, Contract, Named, Reuse, SpanVisitor, StepSize, Traffic, require_matrices,
    require_shape_of, require_vector,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{LANES, Level, fma, levels, sum};
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands};
use crate::{DType, Result, Tensor};
use serde::{Deserialize, Serialize};

/// Normalises rows by mean and variance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct LayerNorm<O: Operands = Bound> {
    /// Input.
    pub x: O::Value,
    /// One element per column.
    pub weight: O::Weight,
    /// One element per column, added last.
    pub bias: Option<O::Weight>,
    /// Added to the variance.
    pub eps: f32,
    /// Output; may be `x`.
    pub y: O::Value,
}

impl<O: Operands> Bindable for LayerNorm<O> {
    type O = O;
    type Bound = LayerNorm;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Weight(&mut self.weight));
        if let Some(bias) = &mut self.bias {
            visit(Operand::Weight(bias));
        }
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<LayerNorm, B::Error> {
        let bias = self.bias.map(|bias| to.weight(bias)).transpose()?;
        let (x, y) = (to.value(self.x)?, to.value(self.y)?);
        Ok(LayerNorm { x, weight: to.weight(self.weight)?, bias, eps: self.eps, y })
    }

    fn reuse(&self) -> Option<Reuse<O::Value>> {
        Some(Reuse { from: self.x, to: self.y, must: false })
    }
}

impl Contract for LayerNorm {
    fn check(&self) -> Result<()> {
        require_matrices(&[(&self.x, "x"), (&self.y, "y")], Self::NAME)?;
        require_vector(&self.weight, self.x.cols, Self::NAME, "weight")?;
        if let Some(bias) = &self.bias {
            require_vector(bias, self.x.cols, Self::NAME, "bias")?;
        }
        require_shape_of(&self.y, &self.x, Self::NAME, "x")
    }

    fn describe(&self) -> String {
        let bias = if self.bias.is_some() { " + bias" } else { "" };
        format!("layer_norm {}{bias}", self.x)
    }

    fn traffic(&self) -> Traffic {
        let bias = self.bias.as_ref().map_or(0, Tensor::bytes);
        let values = self.x.bytes() + self.y.bytes();
        Traffic { weights: self.weight.bytes() + bias, values }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Read);
        visit(self.weight.span, Access::Read);
        if let Some(bias) = &self.bias {
            visit(bias.span, Access::Read);
        }
        visit(self.y.span, Access::Write);
    }

    fn in_place(&self) -> Option<(Tensor, Tensor)> {
        Some((self.x, self.y))
    }
}

impl LayerNorm {
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let [x, weight, y] =
            [&self.x, &self.weight, &self.y].map(|tensor| Matrix::new(memory, tensor));
        let bias = self.bias.as_ref().map(|bias| Matrix::new(memory, bias));
        let mut values = vec![0.0; x.cols];
        for row in 0..x.rows {
            x.read_row(row, &mut values);
            let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / x.cols as f64;
            let squares = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>();
            let scale = 1.0 / (squares / x.cols as f64 + f64::from(self.eps)).sqrt();
            for (col, value) in values.iter().enumerate() {
                let scaled = (f64::from(*value) - mean) * scale * f64::from(weight.get(0, col));
                let bias = bias.as_ref().map_or(0.0, |bias| bias.get(0, col));
                y.set(row, col, (scaled + f64::from(bias)) as f32);
            }
        }
    }

    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let [x, weight, y] =
            [&self.x, &self.weight, &self.y].map(|tensor| Matrix::new(memory, tensor));
        let bias = self.bias.as_ref().map(|bias| Matrix::new(memory, bias));
        Box::new(LayerNormStep { x, weight, bias, eps: self.eps, y, level: lowering.level })
    }

    /// `kernels/layer_norm.cu`: a block per row.
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let bias = self.bias.unwrap_or(self.weight);
        let whole = [&self.x, &self.weight, &bias, &self.y].into_iter().all(aligned);
        let eights = self.x.cols.div_ceil(256);
        let held = if whole && eights <= MOST_HELD { eights } else { 0 };
        let entry = if held > 0 { "layer_norm_held" } else { "layer_norm" };
        let kernel = Kernel::new(target, "layer_norm", entry)
            .define("XT", code(self.x.dtype, Self::NAME)?)
            .define("WT", code(self.weight.dtype, Self::NAME)?)
            .define("BT", code(bias.dtype, Self::NAME)?)
            .define("YT", code(self.y.dtype, Self::NAME)?)
            .define("BIAS", u32::from(self.bias.is_some()))
            .defines(&[("ALIGNED", u32::from(whole)), ("HELD", held)])
            .grid(if held > 0 { self.x.rows.div_ceil(8) } else { self.x.rows }, 1, 1)
            .tensors(&[&self.x, &self.weight])
            .optional(self.bias.map(|bias| bias.span))
            .tensors(&[&self.y]);
        let kernel = if held > 0 { kernel.ints(&[self.x.rows]) } else { kernel };
        let kernel =
            kernel.ints(&[self.x.cols, self.x.stride, self.y.stride]).arg(Arg::F32(self.eps));
        Ok(vec![kernel.lowered()])
    }
}

/// Eights of a row that a lane of a warp can hold: rows of up to 2,048 columns.
const MOST_HELD: u32 = 8;

/// Rows, divided among the threads.
struct LayerNormStep {
    x: Matrix,
    weight: Matrix,
    bias: Option<Matrix>,
    eps: f32,
    y: Matrix,
    level: Level,
}

impl Step for LayerNormStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: 3 * self.x.cols * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let (rows, cols) = (self.x.rows, self.x.cols);
        let cuts = if rows < 8 { 1 } else { chunks(rows, team.threads()) };
        let floats = self.x.dtype == DType::F32 && self.y.dtype == DType::F32;
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch; the vectors have one element per column.
            let (weight, bias, values) = unsafe {
                let own = team.own(worker).floats(3 * cols);
                let (weight, rest) = own.split_at_mut(cols);
                let (bias, values) = rest.split_at_mut(cols);
                load_floats(self.weight.dtype, self.weight.start(), weight);
                match &self.bias {
                    Some(from) => load_floats(from.dtype, from.start(), bias),
                    None => bias.fill(0.0),
                }
                (weight, bias, values)
            };
            for row in part(rows, cuts, chunk) {
                let (x, y) = (self.x.at(row, 0), self.y.at(row, 0));
                // SAFETY: rows of `x` and `y`, which this chunk alone touches; the level was detected.
                unsafe {
                    if floats {
                        std::ptr::copy(x.cast::<f32>(), y.cast::<f32>(), cols);
                        let values = std::slice::from_raw_parts_mut(y.cast(), cols);
                        normalise(self.level, values, weight, bias, self.eps);
                    } else {
                        load_floats(self.x.dtype, x, values);
                        normalise(self.level, values, weight, bias, self.eps);
                        store_floats(self.y.dtype, y, values);
                    }
                }
            }
        });
    }
}

/// The sum of `of(value)` over all values, in lanes.
#[inline(always)]
fn total(values: &[f32], of: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = values.chunks_exact(LANES);
    let rest = whole.remainder().iter().fold(0.0, |sum, v| of(*v, sum));
    for values in whole {
        lanes.iter_mut().zip(values).for_each(|(lane, v)| *lane = of(*v, *lane));
    }
    sum(lanes) + rest
}

#[inline(always)]
fn normalise_body<const FMA: bool>(values: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    let n = values.len() as f32;
    let mean = total(values, |v, sum| sum + v) / n;
    let squares = total(values, |v, sum| fma::<FMA>(v - mean, v - mean, sum));
    let scale = 1.0 / (squares / n + eps).sqrt();
    for ((value, weight), bias) in values.iter_mut().zip(weight).zip(bias) {
        *value = (*value - mean) * scale * weight + bias;
    }
}

levels! {
    /// Normalises a row in place.
    fn normalise(values: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) = normalise_body;
}
