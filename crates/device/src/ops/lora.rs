//! Adds what the adapter of each row's sequence makes of `x` to the result of a linear:
//! `y = base + (x · Aᵀ) · Bᵀ`, where A and B are those of the row's adapter. Rows without one are left as they are.
//!
//! A weight that is made of several matrices (q, k and v; gate and up) has an A for each of them: its *parts*. Slot `s` of
//! `a` has the rows of its parts one after the other, `rank` each; row `c` of slot `s` of `b` belongs to column `c` of `y`,
//! and to the part that the column belongs to. An adapter of a smaller rank has zeros in the rest. B is already scaled.
//! `x · Aᵀ` is summed in f32; the result is rounded once, when storing. `y` is `base`. Only as a member of a fused linear may
//! `base` be apart: the linear's sums, to which rows without an adapter are equal; and `x · Aᵀ` may be rounded to bf16 there.

mod cuda;
mod fast;

use super::{
    Access, Bindable, Contract, Named, Reuse, SpanVisitor, StepSize, Traffic, live_rows, require,
    require_live, require_matrices, require_scratch, require_shape_of,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::tables::Tables;
use crate::cpu::view::Matrix;
use crate::cuda::launch::Target;
use crate::cuda::lower::SEMAPHORE_BYTES;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::step::{PARAM_WORDS, param};
use crate::{Region, Result, Span, StepState, Tensor};
use serde::{Deserialize, Serialize};

/// Which columns belong to which part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoraParts {
    /// All columns of the first part, then of the second, …: where each ends.
    Stacked(Vec<u32>),
    /// One column of each in turn.
    Turns(u32),
}

impl LoraParts {
    /// How many there are.
    pub fn count(&self) -> u32 {
        match self {
            LoraParts::Stacked(ends) => ends.len() as u32,
            LoraParts::Turns(count) => *count,
        }
    }

    /// The part of a column.
    pub fn of(&self, col: u32) -> u32 {
        match self {
            LoraParts::Stacked(ends) => ends.iter().take_while(|end| **end <= col).count() as u32,
            LoraParts::Turns(count) => col % count,
        }
    }
}

/// Adds the results of adapters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Lora<O: Operands = Bound> {
    /// rows × k: what the linear read.
    pub x: O::Value,
    /// rows × n: what it made.
    pub base: O::Value,
    /// (slots · parts · rank) × k.
    pub a: O::Weight,
    /// (slots · n) × rank.
    pub b: O::Weight,
    /// The parts of the weight.
    pub parts: LoraParts,
    /// rows × n, in the place of `base` if that is no inner value of a fused op.
    pub y: O::Value,
    /// The step's tables, which have the adapter of every sequence.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// Whether a row of `x` is a row of the step; else it is a token.
    #[serde(skip_serializing_if = "unset")]
    pub by_row: O::Late<bool>,
    /// Rows past this device-side count need not be computed.
    #[serde(skip_serializing_if = "unset")]
    pub live: O::Late<Option<Span>>,
    /// Room for `x · Aᵀ`; the target says how much.
    #[serde(skip_serializing_if = "unset")]
    pub scratch: O::Late<Option<Span>>,
}

impl<O: Operands> Bindable for Lora<O> {
    type O = O;
    type Bound = Lora;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Value(&mut self.base, Access::Read));
        visit(Operand::Weight(&mut self.a));
        visit(Operand::Weight(&mut self.b));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Lora, B::Error> {
        Ok(Lora {
            x: to.value(self.x)?,
            base: to.value(self.base)?,
            a: to.weight(self.a)?,
            b: to.weight(self.b)?,
            parts: self.parts.clone(),
            y: to.value(self.y)?,
            state: to.state(),
            by_row: to.by_row(self.x),
            live: to.live(self.x),
            scratch: None,
        })
    }

    fn reuse(&self) -> Option<Reuse<O::Value>> {
        Some(Reuse { from: self.base, to: self.y, must: true })
    }
}

impl Lora {
    /// Columns of `x · Aᵀ`: the ranks of all parts.
    pub(crate) fn inner(&self) -> u32 {
        self.parts.count() * self.b.cols
    }

    /// Adapters that fit.
    pub(crate) fn slots(&self) -> u32 {
        self.b.rows / self.y.cols
    }

    /// Whether rows without an adapter must be copied.
    fn copies(&self) -> bool {
        self.base != self.y
    }

    /// Bytes of the matrices of one adapter.
    pub(crate) fn adapter_bytes(&self) -> u64 {
        (self.a.bytes() + self.b.bytes()) / u64::from(self.slots().max(1))
    }

    /// What it reads besides the linear's input and result.
    pub(crate) fn visit_own(&self, visit: SpanVisitor<'_>) {
        let StepState { params, row_seat, token_row, .. } = &self.state;
        for tensor in [&self.a, &self.b, params, row_seat, token_row] {
            visit(tensor.span, Access::Read);
        }
    }
}

impl Contract for Lora {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        require_matrices(&[(&self.x, "x"), (&self.base, "base"), (&self.y, "y")], Self::NAME)?;
        require_matrices(&[(&self.a, "a"), (&self.b, "b")], Self::NAME)?;
        require_shape_of(&self.y, &self.base, Self::NAME, "base")?;
        let inner = self.base.span.region == Region::Inside;
        require(inner || !self.copies(), Self::NAME, || "y is not in the place of base".into())?;
        require(self.x.rows == self.y.rows, Self::NAME, || "x and y differ in rows".into())?;
        require(self.a.cols == self.x.cols, Self::NAME, || {
            format!("a has {} columns, x has {}", self.a.cols, self.x.cols)
        })?;
        let (slots, n) = (self.slots(), self.y.cols);
        require(self.b.cols > 0 && slots * n == self.b.rows, Self::NAME, || {
            format!("b has {} rows, not a multiple of {n}", self.b.rows)
        })?;
        require(self.a.rows == slots * self.inner(), Self::NAME, || {
            format!("a has {} rows, not {} slots of {}", self.a.rows, slots, self.inner())
        })?;
        let whole = match &self.parts {
            LoraParts::Stacked(ends) => ends.is_sorted() && ends.last() == Some(&n),
            LoraParts::Turns(count) => *count > 0 && n.is_multiple_of(*count),
        };
        require(whole, Self::NAME, || format!("{:?} are no parts of {n} columns", self.parts))?;
        let limits = &self.state.limits;
        let most = if self.by_row { limits.rows } else { limits.tokens };
        require(self.x.rows <= most, Self::NAME, || {
            format!("{} rows, and tables for {most}", self.x.rows)
        })?;
        require_live(self.live, Self::NAME)?;
        require_scratch(self.scratch, Self::NAME)
    }

    fn describe(&self) -> String {
        let (slots, rank) = (self.slots(), self.b.cols);
        format!("lora {} → {}, {slots} adapters of rank {rank}", self.x, self.y)
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: self.adapter_bytes(), values: self.x.bytes() + 2 * self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn scratch_slot(&mut self) -> Option<&mut Option<Span>> {
        Some(&mut self.scratch)
    }

    fn scratch_bytes(&self, target: &Target) -> u64 {
        SEMAPHORE_BYTES + self.sums_bytes(target)
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        for tensor in [&self.x, &self.base] {
            visit(tensor.span, Access::Read);
        }
        self.visit_own(visit);
        if let Some(live) = self.live {
            visit(live, Access::Read);
        }
        if let Some(scratch) = self.scratch {
            visit(scratch, Access::Write);
        }
        visit(self.y.span, Access::Write);
    }

    fn in_place(&self) -> Option<(Tensor, Tensor)> {
        Some((self.base, self.y))
    }

    fn detach(&mut self) {
        self.live = None;
    }
}

impl Lora {
    /// The slot of a row's adapter, if it has one.
    fn slot(&self, tables: &Tables, row: usize) -> Option<usize> {
        let row = if self.by_row { row } else { tables.token_row.get(row) as usize };
        if row >= tables.limits.rows as usize {
            return None;
        }
        let seat = tables.row_seat.get(row);
        if seat >= tables.limits.seats {
            return None;
        }
        let adapter = tables.params.get((seat * PARAM_WORDS + param::ADAPTER) as usize);
        (1..=self.slots()).contains(&adapter).then(|| adapter as usize - 1)
    }

    /// Sums in f64, one element after the other.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let tables = Tables::new(memory, &self.state);
        let [x, base, a, b, y] =
            [&self.x, &self.base, &self.a, &self.b, &self.y].map(|t| Matrix::new(memory, t));
        let (inner, rank) = (self.inner() as usize, self.b.cols as usize);
        for row in 0..live_rows(memory, self.live, y.rows) {
            let Some(slot) = self.slot(&tables, row) else {
                let cols = if self.copies() { y.cols } else { 0 };
                (0..cols).for_each(|col| y.set(row, col, base.get(row, col)));
                continue;
            };
            let dot = |at: usize| {
                let term = |k| f64::from(x.get(row, k)) * f64::from(a.get(slot * inner + at, k));
                (0..x.cols).map(term).sum::<f64>() as f32
            };
            let sums: Vec<f32> = (0..inner).map(dot).collect();
            for col in 0..y.cols {
                let part = self.parts.of(col as u32) as usize;
                let sums = &sums[part * rank..][..rank];
                let of_rank =
                    |r: usize| f64::from(sums[r]) * f64::from(b.get(slot * y.cols + col, r));
                let sum: f64 = (0..rank).map(of_rank).sum();
                y.set(row, col, (f64::from(base.get(row, col)) + sum) as f32);
            }
        }
    }
}
