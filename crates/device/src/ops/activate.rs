//! `y = act(x)` for each element: in f32, rounded once, when storing. `y` may be `x`. Rows past the `live` count may be
//! left as they are.

use super::{
    Access, Bindable, Contract, Named, Reuse, SpanVisitor, StepSize, Traffic, live_rows,
    require_live, require_matrices, require_shape_of, visit_live,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, exp, fma, levels, tanh};
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::Activation;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, Span, Tensor};
use serde::{Deserialize, Serialize};

/// Applies a function to each element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Activate<O: Operands = Bound> {
    /// Input.
    pub x: O::Value,
    /// The function.
    pub act: Activation,
    /// Output; may be `x`.
    pub y: O::Value,
    /// Rows past this device-side count need not be computed.
    #[serde(skip_serializing_if = "unset")]
    pub live: O::Late<Option<Span>>,
}

impl<O: Operands> Bindable for Activate<O> {
    type O = O;
    type Bound = Activate;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Activate, B::Error> {
        let (x, y) = (to.value(self.x)?, to.value(self.y)?);
        Ok(Activate { x, act: self.act, y, live: to.live(self.y) })
    }

    fn epilogues(&self) -> Vec<(O::Value, Activate<O>)> {
        vec![(self.x, self.clone())]
    }

    fn reuse(&self) -> Option<Reuse<O::Value>> {
        Some(Reuse { from: self.x, to: self.y, must: false })
    }
}

impl Contract for Activate {
    fn check(&self) -> Result<()> {
        require_matrices(&[(&self.x, "x"), (&self.y, "y")], Self::NAME)?;
        require_shape_of(&self.y, &self.x, Self::NAME, "x")?;
        require_live(self.live, Self::NAME)
    }

    fn describe(&self) -> String {
        format!("{} {}", self.act.name(), self.x)
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

impl Activate {
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        for row in 0..live_rows(memory, self.live, y.rows) {
            for col in 0..y.cols {
                y.set(row, col, self.act.apply(x.get(row, col)) as f32);
            }
        }
    }

    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        let (act, live, level) = (self.act, self.live, lowering.level);
        Box::new(ActivateStep { x, y, act, live, memory: *memory, level })
    }

    /// `kernels/activate.cu`: eight results per thread.
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let all = [&self.x, &self.y];
        let kernel = Kernel::new(target, "activate", "activate")
            .define("XT", code(self.x.dtype, Self::NAME)?)
            .define("YT", code(self.y.dtype, Self::NAME)?)
            .define("ACT", self.act.code())
            .define("ALIGNED", u32::from(all.into_iter().all(aligned)))
            .grid(self.y.cols.div_ceil(2048), self.y.rows, 1)
            .tensors(&all)
            .ints(&[self.y.cols, self.x.stride, self.y.stride])
            .optional(self.live);
        Ok(vec![kernel.lowered()])
    }
}

/// Blocks of columns of all rows, divided among the threads.
struct ActivateStep {
    x: Matrix,
    y: Matrix,
    act: Activation,
    live: Option<Span>,
    memory: CpuMemory,
    level: Level,
}

/// Columns that are converted at a time.
const COLUMNS: usize = 4096;

impl Step for ActivateStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: COLUMNS * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let (rows, cols) = (live_rows(&self.memory, self.live, self.y.rows), self.y.cols);
        let blocks = cols.div_ceil(COLUMNS);
        let items = rows * blocks;
        // A few thousand elements take less time than waking threads does.
        let few = items * cols.min(COLUMNS) < 16 << 10;
        let cuts = if few { items.min(1) } else { chunks(items, team.threads()) };
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let own = unsafe { team.own(worker).floats(COLUMNS) };
            for item in part(items, cuts, chunk) {
                let (row, col) = (item / blocks, item % blocks * COLUMNS);
                let values = &mut own[..COLUMNS.min(cols - col)];
                // SAFETY: a part of a row of `x` and of `y`, which this chunk alone touches; the level was detected.
                unsafe {
                    load_floats(self.x.dtype, self.x.at(row, col), values);
                    activate(self.level, values, self.act);
                    store_floats(self.y.dtype, self.y.at(row, col), values);
                }
            }
        });
    }
}

/// The share of a normal distribution below `x`, to 2e-7: a polynomial times e^(−x²/2) for its smaller side.
#[inline(always)]
fn share_below<const FMA: bool>(x: f32) -> f32 {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / fma::<FMA>(z, 0.327_591_1, 1.0);
    let p = fma::<FMA>(t, 0.530_702_7, -0.726_576_03);
    let p = fma::<FMA>(p, t, 0.710_706_9);
    let p = fma::<FMA>(p, t, -0.142_248_37);
    let p = fma::<FMA>(p, t, 0.127_414_8);
    let tail = p * t * exp::<FMA>(-z * z);
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// Plain loops: what is passed to `for_each` is a function of its own, which the compiler may leave without the caller's
/// instructions.
#[inline(always)]
pub(super) fn activate_body<const FMA: bool>(values: &mut [f32], act: Activation) {
    macro_rules! each {
        ($x:ident => $value:expr) => {
            for value in values {
                let $x = *value;
                *value = $value;
            }
        };
    }
    match act {
        Activation::Silu => each!(x => x / (1.0 + exp::<FMA>(-x))),
        Activation::GeluTanh => each!(x => {
            let twice = x * fma::<FMA>(x * x, 0.071_354_814, 1.595_769);
            x / (1.0 + exp::<FMA>(-twice))
        }),
        Activation::Gelu => each!(x => x * share_below::<FMA>(x)),
        Activation::Tanh => each!(x => tanh::<FMA>(x)),
        Activation::Relu => each!(x => x.max(0.0)),
        Activation::ReluSquared => each!(x => x.max(0.0) * x.max(0.0)),
    }
}

levels! {
    /// values = act(values).
    pub(crate) fn activate(values: &mut [f32], act: Activation) = activate_body;
}
