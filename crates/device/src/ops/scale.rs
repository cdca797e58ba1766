//! `y = x · factor`, or with a cap `y = cap · tanh(x · factor / cap)`, which is close to `x · factor` where that is small
//! and never beyond ±`cap`. In f32, rounded once, when storing. `y` may be `x`. Rows past the `live` count may be left as
//! they are.

use super::{
    Access, Bindable, Contract, Named, Reuse, SpanVisitor, StepSize, Traffic, live_rows, require,
    require_live, require_matrices, require_shape_of, visit_live,
};
use crate::cpu::ggml;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, levels, soft_cap};
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, Span, Tensor};
use serde::{Deserialize, Serialize};

/// Multiplies by a number, with an optional soft cap.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Scale<O: Operands = Bound> {
    /// Input.
    pub x: O::Value,
    /// The multiplier.
    pub factor: f32,
    /// The soft cap, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap: Option<f32>,
    /// Output; may be `x`.
    pub y: O::Value,
    /// Rows past this device-side count need not be computed.
    #[serde(skip_serializing_if = "unset")]
    pub live: O::Late<Option<Span>>,
}

impl<O: Operands> Bindable for Scale<O> {
    type O = O;
    type Bound = Scale;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Scale, B::Error> {
        let Scale { factor, cap, .. } = *self;
        Ok(Scale { x: to.value(self.x)?, factor, cap, y: to.value(self.y)?, live: to.live(self.y) })
    }

    fn reuse(&self) -> Option<Reuse<O::Value>> {
        Some(Reuse { from: self.x, to: self.y, must: false })
    }
}

impl Contract for Scale {
    fn check(&self) -> Result<()> {
        require_matrices(&[(&self.x, "x"), (&self.y, "y")], Self::NAME)?;
        require_shape_of(&self.y, &self.x, Self::NAME, "x")?;
        require(self.factor.is_finite(), Self::NAME, || format!("a factor of {}", self.factor))?;
        let cap = self.cap.unwrap_or(1.0);
        require(cap.is_finite() && cap > 0.0, Self::NAME, || format!("a cap of {cap}"))?;
        require_live(self.live, Self::NAME)
    }

    fn describe(&self) -> String {
        let cap = self.cap.map_or(String::new(), |cap| format!(", soft cap {cap}"));
        format!("scale {} by {}{cap}", self.x, self.factor)
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: self.x.bytes() + self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit_live(&[&self.x], self.live, &self.y, visit);
    }

    fn in_place(&self) -> Option<(Tensor, Tensor)> {
        Some((self.x, self.y))
    }

    fn detach(&mut self) {
        self.live = None;
    }
}

impl Scale {
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        for row in 0..live_rows(memory, self.live, y.rows) {
            for col in 0..y.cols {
                let scaled = f64::from(x.get(row, col)) * f64::from(self.factor);
                let value =
                    self.cap.map(f64::from).map_or(scaled, |cap| cap * (scaled / cap).tanh());
                y.set(row, col, value as f32);
            }
        }
    }

    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let Scale { factor, cap, live, .. } = *self;
        let apply = match cap {
            None => Apply::Factor(factor),
            Some(cap) if lowering.ggml() => Apply::Ggml { factor, cap },
            Some(cap) => Apply::Cap { factor: factor / cap, cap },
        };
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        Box::new(ScaleStep { x, y, apply, live, memory: *memory, level: lowering.level })
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let all = [&self.x, &self.y];
        let (factor, cap) = match self.cap {
            None => (self.factor, 1.0),
            Some(cap) => (self.factor / cap, cap),
        };
        let kernel = Kernel::new(target, "scale", "scale")
            .define("XT", code(self.x.dtype, Self::NAME)?)
            .define("YT", code(self.y.dtype, Self::NAME)?)
            .define("CAP", u32::from(self.cap.is_some()))
            .define("ALIGNED", u32::from(all.into_iter().all(aligned)))
            .grid(self.y.cols.div_ceil(2048), self.y.rows, 1)
            .tensors(&all)
            .ints(&[self.y.cols, self.x.stride, self.y.stride])
            .arg(Arg::F32(factor))
            .arg(Arg::F32(cap))
            .optional(self.live);
        Ok(vec![kernel.lowered()])
    }
}

/// The operation on each element.
#[derive(Clone, Copy)]
enum Apply {
    Factor(f32),
    /// The factor has been divided by the cap.
    Cap {
        factor: f32,
        cap: f32,
    },
    /// Soft cap with ggml's arithmetic.
    Ggml {
        factor: f32,
        cap: f32,
    },
}

/// Blocks of columns of all rows, divided among the threads.
struct ScaleStep {
    x: Matrix,
    y: Matrix,
    apply: Apply,
    live: Option<Span>,
    memory: CpuMemory,
    level: Level,
}

/// Columns that are converted at a time.
const COLUMNS: usize = 4096;

impl Step for ScaleStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: COLUMNS * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let (rows, cols) = (live_rows(&self.memory, self.live, self.y.rows), self.y.cols);
        let blocks = cols.div_ceil(COLUMNS);
        let items = rows * blocks;
        // A few thousand elements take less time than waking threads does.
        let cuts = if items * cols.min(COLUMNS) < 32 << 10 {
            items.min(1)
        } else {
            chunks(items, team.threads())
        };
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let own = unsafe { team.own(worker).floats(COLUMNS) };
            for item in part(items, cuts, chunk) {
                let (row, col) = (item / blocks, item % blocks * COLUMNS);
                let values = &mut own[..COLUMNS.min(cols - col)];
                // SAFETY: a part of a row of `x` and of `y`, which this chunk alone touches; the level was detected.
                unsafe {
                    load_floats(self.x.dtype, self.x.at(row, col), values);
                    match self.apply {
                        Apply::Factor(factor) => multiply(self.level, values, factor),
                        Apply::Cap { factor, cap } => soft_cap(self.level, values, factor, cap),
                        Apply::Ggml { factor, cap } => {
                            multiply(self.level, values, factor);
                            ggml::soft_cap(values, cap);
                        }
                    }
                    store_floats(self.y.dtype, self.y.at(row, col), values);
                }
            }
        });
    }
}

#[inline(always)]
fn multiply_body<const FMA: bool>(values: &mut [f32], factor: f32) {
    values.iter_mut().for_each(|v| *v *= factor);
}

levels! {
    /// values · factor.
    fn multiply(values: &mut [f32], factor: f32) = multiply_body;
}
