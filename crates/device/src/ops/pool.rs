//! `y[r]` is one vector of the tokens of row r: their mean, the first or the last; with `unit` divided by its length. Sums
//! in f32, rounded once, when storing. A pad row's is zeros, and so is a vector whose length is 0.

use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require, require_matrices,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, StepState};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Which tokens of a row make its vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The mean of all.
    Mean,
    /// The first one's.
    First,
    /// The last one's.
    Last,
}

impl Pooling {
    /// The tokens that count, of those of a row.
    fn of(self, tokens: Range<usize>) -> Range<usize> {
        match self {
            _ if tokens.is_empty() => tokens,
            Pooling::Mean => tokens,
            Pooling::First => tokens.start..tokens.start + 1,
            Pooling::Last => tokens.end - 1..tokens.end,
        }
    }

    /// Its name in listings.
    const fn name(self) -> &'static str {
        match self {
            Pooling::Mean => "mean",
            Pooling::First => "first",
            Pooling::Last => "last",
        }
    }
}

/// Combines the tokens of each row to one vector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Pool<O: Operands = Bound> {
    /// tokens × width.
    pub x: O::Value,
    /// Which tokens count.
    pub pooling: Pooling,
    /// Whether vectors are divided by their length.
    pub unit: bool,
    /// Where rows begin.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// rows × width.
    pub y: O::Value,
}

impl<O: Operands> Bindable for Pool<O> {
    type O = O;
    type Bound = Pool;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Pool, B::Error> {
        let (x, y) = (to.value(self.x)?, to.value(self.y)?);
        Ok(Pool { x, pooling: self.pooling, unit: self.unit, state: to.state(), y })
    }
}

impl Contract for Pool {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        require_matrices(&[(&self.x, "x"), (&self.y, "y")], Self::NAME)?;
        require(self.x.cols == self.y.cols, Self::NAME, || "x and y differ in columns".into())?;
        let limits = &self.state.limits;
        require(self.y.rows <= limits.rows && self.x.rows <= limits.tokens, Self::NAME, || {
            let (rows, tokens) = (limits.rows, limits.tokens);
            format!(
                "{} rows of {} tokens; the tables have {rows} and {tokens}",
                self.y.rows, self.x.rows
            )
        })
    }

    fn describe(&self) -> String {
        let unit = if self.unit { ", unit length" } else { "" };
        format!("pool {} of {} by {}{unit}", self.y, self.x, self.pooling.name())
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: self.x.bytes() + self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::rows(self.y.rows)
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.state.q_start.span, Access::Read);
        visit(self.x.span, Access::Read);
        visit(self.y.span, Access::Write);
    }
}

impl Pool {
    /// The tokens of a row.
    fn tokens(&self, tables: &Tables, row: usize) -> Range<usize> {
        let (start, end) = (tables.q_start.get(row) as usize, tables.q_start.get(row + 1) as usize);
        let end = end.min(self.x.rows as usize);
        start.min(end)..end
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let tables = Tables::new(memory, &self.state);
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        for row in 0..y.rows {
            let tokens = self.pooling.of(self.tokens(&tables, row));
            let count = tokens.len().max(1) as f64;
            let mean =
                |col: usize| tokens.clone().map(|t| f64::from(x.get(t, col))).sum::<f64>() / count;
            let values: Vec<f64> = (0..x.cols).map(mean).collect();
            let length = values.iter().map(|v| v * v).sum::<f64>().sqrt();
            let factor = if self.unit && length > 0.0 { 1.0 / length } else { 1.0 };
            for (col, value) in values.iter().enumerate() {
                y.set(row, col, (value * factor) as f32);
            }
        }
    }

    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        let tables = Tables::new(memory, &self.state);
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        Box::new(PoolStep { op: self.clone(), tables, x, y })
    }

    /// `kernels/pool.cu`: a block per row.
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let kernel = Kernel::new(target, "pool", "pool")
            .define("XT", code(self.x.dtype, Self::NAME)?)
            .define("YT", code(self.y.dtype, Self::NAME)?)
            .define("POOLING", self.pooling as u32)
            .define("UNIT", u32::from(self.unit))
            .define("WIDTH", self.x.cols)
            .defines(&[("EACH", if aligned(&self.x) { 8 } else { 1 }), ("THREADS", 1024)])
            .grid(self.y.rows, 1, 1)
            .threads(1024)
            .tensors(&[&self.state.q_start, &self.x, &self.y])
            .ints(&[self.x.rows, self.x.stride, self.y.stride]);
        Ok(vec![kernel.lowered()])
    }
}

/// Rows, divided among the threads.
struct PoolStep {
    op: Pool,
    tables: Tables,
    x: Matrix,
    y: Matrix,
}

impl Step for PoolStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: 2 * self.x.cols * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let (rows, cols) = (self.y.rows, self.x.cols);
        let cuts = chunks(rows, team.threads());
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let (sums, values) = unsafe { team.own(worker).floats(2 * cols) }.split_at_mut(cols);
            for row in part(rows, cuts, chunk) {
                let tokens = self.op.pooling.of(self.op.tokens(&self.tables, row));
                let share = 1.0 / tokens.len().max(1) as f32;
                sums.fill(0.0);
                for token in tokens {
                    // SAFETY: a row of `x`.
                    unsafe { load_floats(self.x.dtype, self.x.at(token, 0), values) };
                    sums.iter_mut().zip(&*values).for_each(|(sum, value)| *sum += value);
                }
                let square = |sum: &f32| f64::from(sum * share).powi(2);
                let length = sums.iter().map(square).sum::<f64>().sqrt() as f32;
                let factor = if self.op.unit && length > 0.0 { share / length } else { share };
                sums.iter_mut().for_each(|sum| *sum *= factor);
                // SAFETY: a row of `y`, which this chunk alone writes.
                unsafe { store_floats(self.y.dtype, self.y.at(row, 0), sums) };
            }
        });
    }
}
