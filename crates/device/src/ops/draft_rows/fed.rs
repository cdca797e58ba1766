//! What a model that drafts is fed: the same tables as a prologue's, for as many tokens of each row.

use crate::cpu::memory::CpuMemory;
use crate::cpu::tables::Tables;
use crate::ops::{Access, SpanVisitor, require};
use crate::step::count;
use crate::{Result, StepState};

/// The tables that are being written.
pub(in crate::ops) struct Fed {
    pub(in crate::ops) tables: Tables,
    /// Live rows.
    pub(in crate::ops) live: usize,
    rows: usize,
    each: usize,
    longest: usize,
}

impl Fed {
    /// For a bucket of `rows` with `each` tokens each.
    pub(in crate::ops) fn new(memory: &CpuMemory, state: &StepState, rows: u32, each: u32) -> Fed {
        let tables = Tables::new(memory, state);
        let verified = state.exchanged().expect("checked with the op");
        let live = Tables::new(memory, &verified).counts.get(count::ROWS as usize).min(rows);
        Fed { tables, live: live as usize, rows: rows as usize, each: each as usize, longest: 0 }
    }

    /// The seat of row `r` and its tokens in pages.
    pub(in crate::ops) fn seat(&self, r: usize) -> (usize, usize) {
        let seat = self.tables.row_seat.get(r) as usize;
        (seat, self.tables.seat_len.get(seat) as usize)
    }

    /// Token `j` of row `r`; without a position it is a pad token.
    pub(in crate::ops) fn put(&self, r: usize, j: usize, position: Option<usize>, token: u32) {
        let (tables, at) = (&self.tables, r * self.each + j);
        let size = tables.limits.page_size as usize;
        let seat = tables.row_seat.get(r) as usize;
        let slot = match position {
            Some(position) => tables.page(seat, position) * size + position % size,
            None => at % size,
        };
        tables.token.set(at, token);
        tables.position.set(at, position.unwrap_or(0) as u32);
        tables.kv_slot.set(at, slot as u32);
        tables.token_row.set(at, r as u32);
    }

    /// Row `r`, whose last token makes its sequence `len` tokens long: it sees nothing where its page table is shorter.
    pub(in crate::ops) fn end_row(&mut self, r: usize, len: usize) {
        let tables = &self.tables;
        let kv_len = if len <= tables.limits.context() as usize { len } else { 0 };
        tables.q_start.set(r, (r * self.each) as u32);
        tables.kv_len.set(r, kv_len as u32);
        tables.last_index.set(r, ((r + 1) * self.each - 1) as u32);
        self.longest = self.longest.max(kv_len);
    }

    /// Pad rows, pad tokens and counts.
    pub(in crate::ops) fn end(self) {
        let Fed { tables, live, rows, each, longest } = self;
        let size = tables.limits.page_size as usize;
        for r in live..rows {
            tables.kv_len.set(r, 0);
            tables.last_index.set(r, 0);
        }
        (live..=rows).for_each(|r| tables.q_start.set(r, (live * each) as u32));
        for at in live * each..rows * each {
            tables.token.set(at, 0);
            tables.position.set(at, 0);
            tables.kv_slot.set(at, (at % size) as u32);
            tables.token_row.set(at, tables.limits.rows);
        }
        let counts = |word: u32, value: usize| tables.counts.set(word as usize, value as u32);
        counts(count::ROWS, live);
        counts(count::TOKENS, live * each);
        counts(count::MAX_KV, longest);
        // The CPU divides attention by head and row only, so one split covers the whole context.
        counts(count::SPLIT, longest.next_multiple_of(size).max(size));
    }
}

/// Refuses a state without the tables of both models, and more rows or drafts than it has room for.
pub(in crate::ops) fn check(state: &StepState, rows: u32, drafts: u32, op: &str) -> Result<()> {
    state.check()?;
    let limits = &state.limits;
    require(state.drafting.is_some(), op, || "no tables for a model that drafts".into())?;
    require(drafts > 0 && drafts < limits.tokens_per_row, op, || {
        format!("{drafts} drafts; rows return up to {} tokens", limits.tokens_per_row)
    })?;
    require(rows <= limits.rows, op, || format!("{rows} rows; {} are most", limits.rows))
}

/// The spans that are read and written to derive what is fed.
pub(in crate::ops) fn visit(state: &StepState, visit: SpanVisitor<'_>) {
    let StepState { counts, q_start, kv_len, last_index, .. } = state;
    let StepState { token, position, kv_slot, token_row, .. } = state;
    for table in [counts, q_start, kv_len, last_index, token, position, kv_slot, token_row] {
        visit(table.span, Access::Write);
    }
    for table in [&state.seat_len, &state.row_seat, &state.row_flags, &state.page_table] {
        visit(table.span, Access::Read);
    }
    if let Some(verified) = &state.drafting {
        visit(verified.counts.span, Access::Read);
    }
}
