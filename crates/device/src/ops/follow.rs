//! After a step, what a drafter is fed that reads hidden states of the model that verifies: for each token of the step the states
//! after the token before it. Its state is exchanged, as that of [`crate::op::DraftRows`]. Token t at position q of a row
//! is fed with the states of position q − 1, at position q − 1, as such drafters are trained:
//!
//! 1. Those of a row's first token are what its seat kept of the step before (`Features::last`), if that was of position q − 1; the
//!    others are the step's own (`Features::token`). Where there are none (the first token of a sequence, one after a
//!    cached prefix) y is zero and the token's keys go to the scratch page.
//! 2. The seat keeps the states of its last token that was accepted, and how long the sequence is with it.
//!
//! Pad tokens are as a prologue leaves them; tables of rows are not written, because nothing attends.
//!
//! A drafter that makes something of the states before it reads them does so once for each token: an op with `own` gives it the
//! states after the tokens themselves and writes the tables, and one with `x`, which was made of them, does the rest. Seats
//! then keep x.

mod cuda;

use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require, require_fit,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Matrix, Words};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::step::count;
use crate::{Result, StepState};
use serde::{Deserialize, Serialize};

/// Feeds a drafter the tokens of a step with the states before them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Follow<O: Operands = Bound> {
    /// What takes the place of the step's own states.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub x: Option<O::Value>,
    /// Whether y is the states after the tokens themselves; nothing is kept then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own: bool,
    /// A row for each token of the step.
    pub y: O::Value,
    /// The tables of both models.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
}

impl<O: Operands> Bindable for Follow<O> {
    type O = O;
    type Bound = Follow;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        if let Some(x) = &mut self.x {
            visit(Operand::Value(x, Access::Read));
        }
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Follow, B::Error> {
        let x = self.x.map(|x| to.value(x)).transpose()?;
        Ok(Follow { x, own: self.own, y: to.value(self.y)?, state: to.state() })
    }
}

impl Contract for Follow {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        require_fit(&self.y, Self::NAME, "y")?;
        let (y, state) = (&self.y, &self.state);
        let Some(features) = state.features.filter(|_| state.drafting.is_some()) else {
            return require(false, Self::NAME, || "no tables for hidden states".into());
        };
        let kept = self.x.unwrap_or(features.token);
        if self.x.is_some() {
            require_fit(&kept, Self::NAME, "x")?;
            require(kept.rows == y.rows && !self.own, Self::NAME, || {
                format!("{kept} in place of the states of {y}")
            })?;
        }
        let last = self.own || y.cols == features.last.cols;
        let fits = y.rows <= state.limits.tokens && y.cols == kept.cols && last;
        let types = y.dtype == kept.dtype && y.dtype == features.last.dtype && y.dtype.is_plain();
        require(fits && types, Self::NAME, || format!("{y} of {kept}, seats: {}", features.last))
    }

    fn describe(&self) -> String {
        match self.own {
            true => format!("states {} of the tokens", self.y),
            false => format!("follow {} of the tokens before", self.y),
        }
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: 2 * self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize { rows: None, tokens: Some(self.y.rows) }
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let s = &self.state;
        for table in [&s.seat_len, &s.row_seat, &s.page_table] {
            visit(table.span, Access::Read);
        }
        let tables = [&s.counts, &s.token, &s.position, &s.kv_slot, &s.token_row];
        for table in tables.into_iter().filter(|_| self.x.is_none()) {
            visit(table.span, Access::Write);
        }
        if let Some(verified) = &s.drafting {
            let tables = [&verified.counts, &verified.q_start, &verified.token];
            let tables = tables.into_iter().chain([&verified.position, &verified.token_row]);
            tables.for_each(|table| visit(table.span, Access::Read));
        }
        if let Some(features) = &s.features {
            visit(self.x.unwrap_or(features.token).span, Access::Read);
            let keeps = if self.own { Access::Read } else { Access::Update };
            visit(features.last.span, keeps);
            visit(features.last_len.span, keeps);
        }
        visit(self.y.span, Access::Write);
    }
}

impl Follow {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, Follow::reference)
    }

    /// Both the reference and the CPU version: copies of rows.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let features = self.state.features.expect("checked with the op");
        let verified = self.state.exchanged().expect("checked with the op");
        let (fed, verified) = (Tables::new(memory, &self.state), Tables::new(memory, &verified));
        let kept = Matrix::new(memory, &self.x.unwrap_or(features.token));
        let last = Matrix::new(memory, &features.last);
        let last_len = Words::new(memory, &features.last_len);
        let (y, size) = (Matrix::new(memory, &self.y), fed.limits.page_size as usize);
        let bytes = y.dtype.bytes(y.cols);
        let live = verified.counts.get(count::TOKENS as usize).min(self.y.rows) as usize;
        for t in 0..y.rows {
            let row = verified.token_row.get(t) as usize;
            let seat = if t < live { verified.row_seat.get(row) } else { fed.limits.seats };
            let seat = seat.min(fed.limits.seats) as usize;
            let position = if t < live { verified.position.get(t) as usize } else { 0 };
            let first = t >= live || t == verified.q_start.get(row) as usize;
            let continues = t < live && position > 0 && last_len.get(seat) as usize == position;
            let known = !first || continues;
            let from = match first {
                _ if self.own => (t < live).then(|| kept.at(t, 0)),
                false => Some(kept.at(t - 1, 0)),
                true => known.then(|| last.at(seat, 0)),
            };
            // SAFETY: both rows lie inside their tensors, which were checked with the op; y is no table of the step state, and
            // x another value.
            unsafe {
                match from {
                    Some(from) => std::ptr::copy_nonoverlapping(from, y.at(t, 0), bytes),
                    None => std::ptr::write_bytes(y.at(t, 0), 0, bytes),
                }
            }
            if self.x.is_none() {
                let slot = match known {
                    true => fed.page(seat, position - 1) * size + (position - 1) % size,
                    false => t % size,
                };
                fed.token.set(t, if t < live { verified.token.get(t) } else { 0 });
                fed.position.set(t, position.saturating_sub(1) as u32);
                fed.kv_slot.set(t, slot as u32);
                fed.token_row.set(t, if t < live { row as u32 } else { fed.limits.rows });
            }
            if first && t < live && !self.own {
                // The sampler has advanced the seat.
                let len = fed.seat_len.get(seat) as usize;
                let at = (t + len).checked_sub(position + 1).filter(|at| *at < live);
                let at = at.filter(|at| *at >= t);
                last_len.set(seat, at.map_or(0, |_| len as u32));
                if let Some(at) = at {
                    // SAFETY: as above.
                    unsafe {
                        std::ptr::copy_nonoverlapping(kept.at(at, 0), last.at(seat, 0), bytes);
                    }
                }
            }
        }
        if self.x.is_none() {
            fed.counts.set(count::ROWS as usize, verified.counts.get(count::ROWS as usize));
            fed.counts.set(count::TOKENS as usize, live as u32);
        }
    }
}
