//! `y = a + b`, added in f32 and rounded once, when storing. `y` may be `a` or `b`. Rows past the `live` count may be
//! left as they are.

use super::{
    Access, Bindable, Contract, Named, Reuse, SpanVisitor, StepSize, Traffic, live_rows,
    require_live, require_matrices, require_shape_of, visit_live,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, Span, Tensor};
use serde::{Deserialize, Serialize};

/// Adds two matrices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Add<O: Operands = Bound> {
    /// The first operand.
    pub a: O::Value,
    /// The second operand.
    pub b: O::Value,
    /// Their sum; may be `a` or `b`.
    pub y: O::Value,
    /// Rows past this device-side count need not be computed.
    #[serde(skip_serializing_if = "unset")]
    pub live: O::Late<Option<Span>>,
}

impl<O: Operands> Bindable for Add<O> {
    type O = O;
    type Bound = Add;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.a, Access::Read));
        visit(Operand::Value(&mut self.b, Access::Read));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Add, B::Error> {
        let (a, b, y) = (to.value(self.a)?, to.value(self.b)?, to.value(self.y)?);
        Ok(Add { a, b, y, live: to.live(self.y) })
    }

    fn reuse(&self) -> Option<Reuse<O::Value>> {
        Some(Reuse { from: self.a, to: self.y, must: false })
    }

    /// `b` first: models usually have the residual on the left.
    fn epilogues(&self) -> Vec<(O::Value, Add<O>)> {
        let swapped = Add { a: self.b, b: self.a, ..self.clone() };
        vec![(self.b, self.clone()), (self.a, swapped)]
    }
}

impl Contract for Add {
    fn check(&self) -> Result<()> {
        require_matrices(&[(&self.a, "a"), (&self.b, "b"), (&self.y, "y")], Self::NAME)?;
        require_shape_of(&self.y, &self.a, Self::NAME, "a")?;
        require_shape_of(&self.y, &self.b, Self::NAME, "b")?;
        require_live(self.live, Self::NAME)
    }

    fn describe(&self) -> String {
        format!("add {}", self.y)
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: self.a.bytes() + self.b.bytes() + self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit_live(&[&self.a, &self.b], self.live, &self.y, visit);
    }

    fn in_place(&self) -> Option<(Tensor, Tensor)> {
        let from = if self.b == self.y { self.b } else { self.a };
        Some((from, self.y))
    }

    fn detach(&mut self) {
        self.live = None;
    }
}

impl Add {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        let [a, b, y] = [&self.a, &self.b, &self.y].map(|tensor| Matrix::new(memory, tensor));
        Box::new(AddStep { a, b, y, live: self.live, memory: *memory })
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let [a, b, y] = [&self.a, &self.b, &self.y].map(|tensor| Matrix::new(memory, tensor));
        for row in 0..live_rows(memory, self.live, y.rows) {
            (0..y.cols).for_each(|col| y.set(row, col, a.get(row, col) + b.get(row, col)));
        }
    }

    /// `kernels/add.cu`: eight results per thread.
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let all = [&self.a, &self.b, &self.y];
        let kernel = Kernel::new(target, "add", "add")
            .define("AT", code(self.a.dtype, Self::NAME)?)
            .define("BT", code(self.b.dtype, Self::NAME)?)
            .define("YT", code(self.y.dtype, Self::NAME)?)
            .define("ALIGNED", u32::from(all.into_iter().all(aligned)))
            .grid(self.y.cols.div_ceil(2048), self.y.rows, 1)
            .tensors(&all)
            .ints(&[self.y.cols, self.a.stride, self.b.stride, self.y.stride])
            .optional(self.live);
        Ok(vec![kernel.lowered()])
    }
}

/// Rows, divided among the threads.
struct AddStep {
    a: Matrix,
    b: Matrix,
    y: Matrix,
    live: Option<Span>,
    memory: CpuMemory,
}

impl Step for AddStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: 2 * self.y.cols * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let (rows, cols) = (live_rows(&self.memory, self.live, self.y.rows), self.y.cols);
        // A few thousand elements take less time than waking threads does.
        let cuts = if rows * cols < 16 << 10 { rows.min(1) } else { chunks(rows, team.threads()) };
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let (sums, others) = unsafe { team.own(worker).floats(2 * cols) }.split_at_mut(cols);
            for row in part(rows, cuts, chunk) {
                // SAFETY: rows of `a`, `b` and `y`; this chunk alone touches that of `y`.
                unsafe {
                    load_floats(self.a.dtype, self.a.at(row, 0), sums);
                    load_floats(self.b.dtype, self.b.at(row, 0), others);
                    sums.iter_mut().zip(&*others).for_each(|(sum, other)| *sum += other);
                    store_floats(self.y.dtype, self.y.at(row, 0), sums);
                }
            }
        });
    }
}
