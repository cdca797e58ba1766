//! The step state's tables as views, resolved once.

use super::memory::CpuMemory;
use super::view::Words;
use crate::step::{StepLimits, StepState, count};

/// What a row feeds.
#[derive(Clone, Debug)]
pub(crate) struct Fed {
    pub(crate) row: usize,
    pub(crate) seat: usize,
    /// Their indices in the step.
    pub(crate) tokens: std::ops::Range<usize>,
    /// Tokens of the sequence before them.
    pub(crate) before: usize,
}

/// Views of every table of a [`StepState`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables {
    pub(crate) limits: StepLimits,
    pub(crate) seat_len: Words,
    pub(crate) seat_token: Words,
    pub(crate) page_table: Words,
    pub(crate) params: Words,
    pub(crate) biases: Words,
    pub(crate) seen: Option<Words>,
    pub(crate) counts: Words,
    pub(crate) row_seat: Words,
    pub(crate) row_flags: Words,
    pub(crate) row_q_len: Words,
    pub(crate) q_start: Words,
    pub(crate) kv_len: Words,
    pub(crate) last_index: Words,
    pub(crate) token: Words,
    pub(crate) position: Words,
    pub(crate) kv_slot: Words,
    pub(crate) token_row: Words,
    pub(crate) history: Option<Words>,
    pub(crate) row_drafts: Option<Words>,
    settled: Option<Words>,
    row_replay: Option<Words>,
    pub(crate) mail: [Words; 2],
    pub(crate) ring: Words,
    pub(crate) leave: Words,
}

impl Tables {
    /// Resolves the addresses of a state.
    pub(crate) fn new(memory: &CpuMemory, state: &StepState) -> Tables {
        let words = |tensor| Words::new(memory, tensor);
        Tables {
            limits: state.limits,
            seat_len: words(&state.seat_len),
            seat_token: words(&state.seat_token),
            page_table: words(&state.page_table),
            params: words(&state.params),
            biases: words(&state.biases),
            seen: state.seen.as_ref().map(words),
            counts: words(&state.counts),
            row_seat: words(&state.row_seat),
            row_flags: words(&state.row_flags),
            row_q_len: words(&state.row_q_len),
            q_start: words(&state.q_start),
            kv_len: words(&state.kv_len),
            last_index: words(&state.last_index),
            token: words(&state.token),
            position: words(&state.position),
            kv_slot: words(&state.kv_slot),
            token_row: words(&state.token_row),
            history: state.history.as_ref().map(words),
            row_drafts: state.row_drafts.as_ref().map(words),
            settled: state.settled.as_ref().map(words),
            row_replay: state.row_replay.as_ref().map(words),
            mail: state.mail.map(|bank| Words::of_span(memory, bank)),
            ring: Words::of_span(memory, state.ring),
            leave: Words::of_span(memory, state.leave),
        }
    }

    /// The number of the current launch.
    pub(crate) fn launch(&self) -> u64 {
        let half = |word: u32| u64::from(self.counts.get(word as usize));
        half(count::LAUNCH_LO) | half(count::LAUNCH_HI) << 32
    }

    /// The bank of launch `n`, if it holds mail for it.
    pub(crate) fn mail_for(&self, launch: u64) -> Option<Words> {
        let bank = self.mail[(launch % 2) as usize];
        (bank.load_u64(0) == launch).then_some(bank)
    }

    /// A seat's page for a position; the scratch page past the end of its table.
    pub(crate) fn page(&self, seat: usize, position: usize) -> usize {
        self.page_in(0, seat, position)
    }

    /// The same in one of several tables.
    pub(crate) fn page_in(&self, table: usize, seat: usize, position: usize) -> usize {
        let index = position / self.limits.page_size as usize;
        if index >= self.limits.pages_per_seat as usize {
            return 0;
        }
        self.page_table.get(self.entry(table, seat, index)) as usize
    }

    /// Where an entry of a page table lies.
    pub(crate) fn entry(&self, table: usize, seat: usize, index: usize) -> usize {
        let from = if table == 0 { 0 } else { table * self.limits.table_words() as usize };
        from + seat * self.limits.pages_per_seat as usize + index
    }

    /// Where the slots of a table begin.
    pub(crate) fn slots(&self, table: usize) -> usize {
        if table == 0 { 0 } else { table * self.limits.slot_words() as usize }
    }

    /// Tokens in a row's pages before the `q_len` of this step; `None` for a pad row, and for a row whose length is
    /// less than `q_len` or more than its page table can hold.
    pub(crate) fn kept(&self, row: usize, q_len: usize) -> Option<usize> {
        let kv_len = self.kv_len.get(row) as usize;
        let held = kv_len > 0 && kv_len <= self.limits.context() as usize;
        kv_len.checked_sub(q_len).filter(|_| held)
    }

    /// The tokens of a row, their seat and how many came before them; `None` for a row that has none or no seat of its
    /// own: such a row must not touch what seats carry. With `single` row r has token r.
    pub(crate) fn fed(&self, row: usize, single: bool) -> Option<Fed> {
        let tokens = match single {
            true => row..row + 1,
            false => self.q_start.get(row) as usize..self.q_start.get(row + 1) as usize,
        };
        let seat = self.row_seat.get(row) as usize;
        let before = self.kept(row, tokens.len())?;
        let live = !tokens.is_empty() && seat < self.limits.seats as usize;
        live.then_some(Fed { row, seat, tokens, before })
    }

    /// Writes a token of a seat's sequence into its history, where there is one.
    pub(crate) fn remember(&self, seat: usize, position: usize, token: u32) {
        let context = self.limits.context() as usize;
        if let Some(history) = self.history.filter(|_| position < context) {
            history.set(seat * context + position, token);
        }
    }

    /// Drafts of a row in this step that it may accept.
    pub(crate) fn drafts(&self, row: usize) -> u32 {
        self.row_drafts.map_or(0, |drafts| drafts.get(row))
    }

    /// What a seat carries holds the first `length` tokens of its sequence.
    pub(crate) fn settle(&self, seat: usize, length: usize) {
        if let Some(settled) = self.settled {
            settled.set(seat, length as u32);
        }
    }

    /// Notes which of the `length` tokens of a row's sequence its seat's recurrent states must take from their logs.
    pub(crate) fn plan_replay(&self, row: usize, seat: usize, length: usize) {
        if let (Some(settled), Some(replay)) = (self.settled, self.row_replay) {
            let behind = (length as u32).saturating_sub(settled.get(seat));
            replay.set(row, behind.min(self.limits.drafts()));
        }
    }

    /// A pad row takes none.
    pub(crate) fn clear_replay(&self, row: usize) {
        if let Some(replay) = self.row_replay {
            replay.set(row, 0);
        }
    }

    /// Tokens before those of a row that its seat's recurrent states take from their logs.
    pub(crate) fn replay(&self, row: usize) -> usize {
        self.row_replay.map_or(0, |replay| replay.get(row).min(self.limits.drafts()) as usize)
    }

    /// Marks a token as seen by a penalised seat; `answer` also counts it.
    pub(crate) fn mark_seen(&self, seat: usize, token: u32, answer: bool) {
        if let Some(seen) = &self.seen {
            let at = seat * self.limits.vocab as usize + token as usize;
            let count = (seen.get(at) & 0xffff) + u32::from(answer);
            seen.set(at, 1 << 31 | count.min(0xffff));
        }
    }
}
