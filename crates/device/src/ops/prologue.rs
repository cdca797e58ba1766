//! Starts a step. In this order:
//!
//! 1. `counts.LAUNCH += 1`; call the new value n (the device counts launches itself, from 1).
//! 2. If mail bank n mod 2 carries launch number n, apply it: joins (seat_len, seat_token, params;
//!    a joined seat's page table becomes scratch, its bias count comes with the params, its `seen` row
//!    is zeroed if penalised), page entries, biases, seen tokens (u32: count in the answer in the low
//!    half, bit 31 set), then the row list if it changed (row_seat, row_q_len, row_flags, counts.ROWS;
//!    rows past it up to the bucket become pad rows: seat = `seats`, q_len 0, flags 0).
//!    Without mail everything stays: the row list of the last step is this step's.
//! 3. Derive: q_start (exclusive sum of q_len; entries past the live rows hold the live token count),
//!    counts.TOKENS, per row kv_len = seat_len + q_len, last_index = q_start + q_len − 1, per token
//!    token_row, position = seat_len + j, kv_slot = page_table[seat][position / page_size] · page_size
//!    + position % page_size, token = the mail's next prompt token for `PROMPT` rows (the mail holds
//!    the tokens of its `PROMPT` rows one after the other, in row order), else seat_token.
//!    Pad rows: kv_len 0, last_index 0. Pad tokens: id 0, position 0, slot = index % page_size (inside
//!    page 0), token_row = the `rows` limit. counts.MAX_KV and counts.SPLIT (the attention split).
//!
//! Rows past the live ones are made pad rows in every step, so a bucket never sees a stale row.
//! Row lists never exceed the bucket and q_len never exceeds the tokens of the bucket: the runner
//! guarantees it; the op clamps rather than writing outside its tables.

pub(crate) mod cuda;

use super::{Access, Contract, SpanVisitor, require};
use crate::Result;
use crate::op::Prologue;

impl Contract for Prologue {
    const NAME: &'static str = "prologue";

    fn check(&self) -> Result<()> {
        let limits = &self.state.limits;
        require(self.rows <= limits.rows && self.tokens <= limits.tokens, Self::NAME, || {
            format!(
                "bucket of {} rows and {} tokens exceeds the limits {} and {}",
                self.rows, self.tokens, limits.rows, limits.tokens
            )
        })
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let s = &self.state;
        let tables = [
            &s.seat_len,
            &s.seat_token,
            &s.page_table,
            &s.params,
            &s.biases,
            &s.counts,
            &s.row_seat,
            &s.row_flags,
            &s.row_q_len,
            &s.q_start,
            &s.kv_len,
            &s.last_index,
            &s.token,
            &s.position,
            &s.kv_slot,
            &s.token_row,
        ];
        for table in tables {
            visit(table.span, Access::Update);
        }
        if let Some(seen) = &s.seen {
            visit(seen.span, Access::Update);
        }
        for bank in s.mail {
            visit(bank, Access::Read);
        }
    }
}
