//! Drafts tokens from the sequences themselves (prompt lookup), for a step whose rows feed `q_len` tokens each: one that
//! is known and drafts after it. For each live row, with n tokens in its history, the one it feeds included:
//!
//! 1. It may accept as many drafts as its flags say ([`crate::step::row::drafts`]), at most q_len − 1, and no more than
//!    there are positions with a page after that of the token it feeds.
//! 2. Drafts of a `PROMPT` row are in the mail; the prologue has put them in place.
//! 3. Otherwise the position p < n − 1 is searched where most tokens up to p equal the last ones of the history, at most
//!    [`LONGEST`], the latest among equals. Draft j is the token at p + j; past the end of the history the drafts themselves
//!    continue it. Without a token that equals the last one there are no drafts, but for those that a benchmark forces the
//!    row to accept.
//!
//! `row_drafts` gets the number of drafts; pad rows get 0. Tokens of a row after its drafts keep what the prologue wrote:
//! they are computed and never accepted.

mod cuda;

use super::{Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::cpu::tables::Tables;
use crate::operand::{Binder, Bound, OperandVisitor, Operands, unset};
use crate::step::{count, row};
use crate::{Result, StepState};
use serde::{Deserialize, Serialize};

/// Most tokens that are compared at a position: more would not make a draft likelier.
pub(crate) const LONGEST: u32 = 8;

/// Drafts tokens from the sequences themselves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Draft<O: Operands = Bound> {
    /// Histories, page tables, and the tokens it completes.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// Rows of the bucket.
    #[serde(skip_serializing_if = "unset")]
    pub rows: O::Late<u32>,
    /// Tokens of every row.
    #[serde(skip_serializing_if = "unset")]
    pub q_len: O::Late<u32>,
}

impl<O: Operands> Bindable for Draft<O> {
    type O = O;
    type Bound = Draft;

    fn operands(&mut self, _visit: OperandVisitor<'_, O>) {}

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Draft, B::Error> {
        let size = to.size();
        Ok(Draft { state: to.state(), rows: size.rows, q_len: size.q_len })
    }
}

impl Contract for Draft {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        let limits = &self.state.limits;
        let (rows, q_len) = (self.rows, self.q_len);
        require(q_len > 1 && q_len <= limits.tokens_per_row, Self::NAME, || {
            format!("{q_len} tokens per row; rows return up to {}", limits.tokens_per_row)
        })?;
        let fits = rows <= limits.rows && rows.saturating_mul(q_len) <= limits.tokens;
        require(fits, Self::NAME, || {
            let (most, tokens) = (limits.rows, limits.tokens);
            format!("{rows} rows of {q_len} tokens exceed the limits {most} and {tokens}")
        })
    }

    fn describe(&self) -> String {
        format!("draft {} for each of {} rows", self.q_len - 1, self.rows)
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn step_size(&self) -> StepSize {
        StepSize { rows: Some(self.rows), tokens: Some(self.rows * self.q_len) }
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let s = &self.state;
        for table in [&s.counts, &s.seat_len, &s.row_seat, &s.row_flags, &s.q_start, &s.page_table]
        {
            visit(table.span, Access::Read);
        }
        if let Some(history) = &s.history {
            visit(history.span, Access::Read);
        }
        visit(s.token.span, Access::Update);
        if let Some(drafts) = &s.row_drafts {
            visit(drafts.span, Access::Write);
        }
    }
}

impl Draft {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, Draft::reference)
    }

    /// Both the reference and the CPU version: a pass over the history of each row.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let tables = Tables::new(memory, &self.state);
        let live = tables.counts.get(count::ROWS as usize).min(self.rows) as usize;
        let drafts = tables.row_drafts.expect("checked with the op");
        for r in 0..live {
            drafts.set(r, self.draft(&tables, r));
        }
        (live..self.rows as usize).for_each(|r| drafts.set(r, 0));
    }

    /// Drafts for one row; returns how many.
    fn draft(&self, tables: &Tables, r: usize) -> u32 {
        let (seat, flags) = (tables.row_seat.get(r) as usize, tables.row_flags.get(r));
        let len = tables.seat_len.get(seat) as usize;
        let asked = row::drafts(flags).min(self.q_len - 1) as usize;
        let most = (1..=asked).take_while(|j| tables.page(seat, len + j) != 0).count();
        if flags & row::PROMPT != 0 || most == 0 || len >= tables.limits.context() as usize {
            return most as u32;
        }
        let history = tables.history.expect("checked with the op");
        let first = seat * tables.limits.context() as usize;
        let known = |position: usize| history.get(first + position);
        let equal = |p: usize| {
            let same = |i: &usize| known(p - i) == known(len - i);
            (0..=p.min(LONGEST as usize - 1)).take_while(same).count()
        };
        let best = (0..len).map(|p| (equal(p), p)).max();
        let Some((_, p)) = best.filter(|(found, _)| *found > 0) else {
            return row::forced(flags).min(most as u32);
        };
        let start = tables.q_start.get(r) as usize;
        for j in 1..=most {
            let at = p + j;
            let token = if at <= len { known(at) } else { tables.token.get(start + at - len) };
            tables.token.set(start + j, token);
        }
        most as u32
    }
}
