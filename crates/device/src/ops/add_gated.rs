//! `y = a + sigmoid(x · w) · b`: each row of `b` is multiplied by one number, which the row of `x` gives. In f32, rounded
//! once, when storing. `y` may be `a`. Rows past the `live` count may be left as they are.

use super::{
    Access, Bindable, Contract, Named, Reuse, SpanVisitor, StepSize, Traffic, live_rows, require,
    require_fit, require_float, require_vector, require_word,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, dot, fma, levels};
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, Span, Tensor};
use serde::{Deserialize, Serialize};

/// Adds rows times a gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct AddGated<O: Operands = Bound> {
    /// Added as it is.
    pub a: O::Value,
    /// Multiplied by the gate of its row.
    pub b: O::Value,
    /// What gates are made of.
    pub x: O::Value,
    /// One element per column of `x`.
    pub w: O::Weight,
    /// Their sum; may be `a`.
    pub y: O::Value,
    /// Rows past this device-side count need not be computed.
    #[serde(skip_serializing_if = "unset")]
    pub live: O::Late<Option<Span>>,
}

impl<O: Operands> Bindable for AddGated<O> {
    type O = O;
    type Bound = AddGated;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.a, Access::Read));
        visit(Operand::Value(&mut self.b, Access::Read));
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Weight(&mut self.w));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<AddGated, B::Error> {
        let [a, b, x, y] = [self.a, self.b, self.x, self.y].map(|value| to.value(value));
        let (a, b, x, y) = (a?, b?, x?, y?);
        Ok(AddGated { a, b, x, w: to.weight(self.w)?, y, live: to.live(self.y) })
    }

    fn reuse(&self) -> Option<Reuse<O::Value>> {
        let apart = self.a != self.b && self.a != self.x;
        apart.then_some(Reuse { from: self.a, to: self.y, must: false })
    }
}

impl Contract for AddGated {
    fn check(&self) -> Result<()> {
        for (tensor, what) in [(&self.a, "a"), (&self.b, "b"), (&self.x, "x"), (&self.y, "y")] {
            require_fit(tensor, Self::NAME, what)?;
            require_float(tensor, Self::NAME, what)?;
        }
        for (tensor, what) in [(&self.a, "a"), (&self.b, "b")] {
            let same = (tensor.rows, tensor.cols) == (self.y.rows, self.y.cols);
            require(same, Self::NAME, || format!("{what} and y differ in shape"))?;
        }
        require(self.x.rows == self.y.rows, Self::NAME, || "x and y differ in rows".into())?;
        require_vector(&self.w, self.x.cols, Self::NAME, "w")?;
        self.live.map_or(Ok(()), |live| require_word(live, Self::NAME, "the live count"))
    }

    fn describe(&self) -> String {
        format!("add gated {}", self.y)
    }

    fn traffic(&self) -> Traffic {
        let values = [&self.a, &self.b, &self.x, &self.y].map(Tensor::bytes);
        Traffic { weights: self.w.bytes(), values: values.iter().sum() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        for tensor in [&self.a, &self.b, &self.x, &self.w] {
            visit(tensor.span, Access::Read);
        }
        if let Some(live) = self.live {
            visit(live, Access::Read);
        }
        visit(self.y.span, Access::Write);
    }

    fn in_place(&self) -> Option<(Tensor, Tensor)> {
        Some((self.a, self.y))
    }

    fn detach(&mut self) {
        self.live = None;
    }
}

impl AddGated {
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let [a, b, x, w, y] =
            [&self.a, &self.b, &self.x, &self.w, &self.y].map(|tensor| Matrix::new(memory, tensor));
        for row in 0..live_rows(memory, self.live, y.rows) {
            let term = |col| f64::from(x.get(row, col)) * f64::from(w.get(0, col));
            let gate = 1.0 / (1.0 + (-(0..x.cols).map(term).sum::<f64>()).exp());
            for col in 0..y.cols {
                let sum = f64::from(a.get(row, col)) + gate * f64::from(b.get(row, col));
                y.set(row, col, sum as f32);
            }
        }
    }

    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let [a, b, x, w, y] =
            [&self.a, &self.b, &self.x, &self.w, &self.y].map(|tensor| Matrix::new(memory, tensor));
        let (live, level) = (self.live, lowering.level);
        Box::new(AddGatedStep { a, b, x, w, y, live, memory: *memory, level })
    }

    /// `kernels/add_gated.cu`: a block per row.
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let all = [&self.a, &self.b, &self.x, &self.w, &self.y];
        let kernel = Kernel::new(target, "add_gated", "add_gated")
            .define("AT", code(self.a.dtype, Self::NAME)?)
            .define("BT", code(self.b.dtype, Self::NAME)?)
            .define("XT", code(self.x.dtype, Self::NAME)?)
            .define("WT", code(self.w.dtype, Self::NAME)?)
            .define("YT", code(self.y.dtype, Self::NAME)?)
            .define("ALIGNED", u32::from(all.into_iter().all(aligned)))
            .grid(self.y.rows, 1, 1)
            .tensors(&all)
            .ints(&[self.x.cols, self.y.cols])
            .ints(&[self.a.stride, self.b.stride, self.x.stride, self.y.stride])
            .optional(self.live);
        Ok(vec![kernel.lowered()])
    }
}

/// Rows, divided among the threads.
struct AddGatedStep {
    a: Matrix,
    b: Matrix,
    x: Matrix,
    w: Matrix,
    y: Matrix,
    live: Option<Span>,
    memory: CpuMemory,
    level: Level,
}

impl Step for AddGatedStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: 2 * (self.x.cols + self.y.cols) * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let (wide, cols) = (self.x.cols, self.y.cols);
        let rows = live_rows(&self.memory, self.live, self.y.rows);
        let cuts = if rows < 8 { rows.min(1) } else { chunks(rows, team.threads()) };
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let own = unsafe { team.own(worker).floats(2 * (wide + cols)) };
            let (inputs, sums) = own.split_at_mut(2 * wide);
            let ((x, w), (a, b)) = (inputs.split_at_mut(wide), sums.split_at_mut(cols));
            // SAFETY: rows of these widths, of which this chunk alone touches those of `y`; the level was detected.
            unsafe {
                load_floats(self.w.dtype, self.w.start(), w);
                for row in part(rows, cuts, chunk) {
                    load_floats(self.x.dtype, self.x.at(row, 0), x);
                    load_floats(self.a.dtype, self.a.at(row, 0), a);
                    load_floats(self.b.dtype, self.b.at(row, 0), b);
                    add_gated(self.level, a, b, x, w);
                    store_floats(self.y.dtype, self.y.at(row, 0), a);
                }
            }
        });
    }
}

#[inline(always)]
fn add_gated_body<const FMA: bool>(a: &mut [f32], b: &[f32], x: &[f32], w: &[f32]) {
    let gate = 1.0 / (1.0 + (-dot::<FMA>(x, w)).exp());
    a.iter_mut().zip(b).for_each(|(a, b)| *a = fma::<FMA>(gate, *b, *a));
}

levels! {
    /// a + sigmoid(x · w) · b, in `a`.
    fn add_gated(a: &mut [f32], b: &[f32], x: &[f32], w: &[f32]) = add_gated_body;
}
