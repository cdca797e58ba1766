//! What seats carry on a device with recurrent layers: here a hash of the tokens that they were fed. Of a row with drafts it holds
//! the first token; those that were accepted after it are in a log, which copies do not have.

use super::FakeDevice;
use crate::oracle::Prefix;
use engine::exec::{Row, StateCopy, Step};
use engine::plant::{Plant, planted};

/// Of every seat and of every copy; `None` where nothing was carried yet.
#[derive(Default)]
pub(crate) struct Carried {
    seats: Vec<Option<Held>>,
    copies: Vec<Option<Prefix>>,
}

/// What a seat carries.
#[derive(Clone, Copy)]
struct Held {
    /// The state.
    settled: Prefix,
    /// The same after what is in the log.
    logged: Prefix,
}

impl Carried {
    pub(crate) fn new(seats: u32, copies: u32) -> Carried {
        Carried { seats: vec![None; seats as usize], copies: vec![None; copies as usize] }
    }

    pub(super) fn copies(&self) -> u32 {
        self.copies.len() as u32
    }

    /// What is in a slot.
    pub(crate) fn copy(&self, slot: u32) -> Option<Prefix> {
        self.copies[slot as usize]
    }

    /// Writes a slot.
    pub(crate) fn put(&mut self, slot: u32, state: Option<Prefix>) {
        self.copies[slot as usize] = state;
    }

    pub(super) fn lose(&mut self) {
        self.seats.fill(None);
        self.copies.fill(None);
    }
}

impl FakeDevice {
    /// Makes the copies of a step, in their order.
    pub(super) fn copy_states(&mut self, step: &Step) {
        for copy in &step.states {
            let (StateCopy::Restore { slot, seat } | StateCopy::Save { seat, slot }) = *copy;
            let rows = step.rows.iter().any(|row| row.seat == seat);
            if slot >= self.carried.copies() || !rows {
                self.wrong(format!("{copy:?} in a step without {seat:?}, or of no slot"));
                continue;
            }
            let (seat, slot) = (seat.0 as usize, slot as usize);
            match copy {
                StateCopy::Restore { .. } => {
                    let held = |settled| Held { settled, logged: settled };
                    self.carried.seats[seat] = self.carried.copies[slot].map(held);
                }
                StateCopy::Save { .. } => {
                    self.carried.copies[slot] = self.carried.seats[seat].map(|held| held.settled);
                }
            }
        }
    }

    /// A row is fed behind its first `start` tokens, and `kept` of its tokens stay; `passed` is what came before the first and before
    /// each further one. Its seat must carry what was before the first.
    pub(super) fn carry_on(&mut self, row: &Row, start: u32, passed: &[Prefix], kept: usize) {
        let seat = row.seat;
        let Some(carried) = self.carried.seats.get(seat.0 as usize).copied() else { return };
        if start > 0 && carried.is_none_or(|held| held.logged != passed[0]) {
            self.wrong(format!("{seat:?} carries another state at {start} than its tokens left"));
        }
        let kept = if planted(Plant::KeepRejected) { passed.len() - 1 } else { kept };
        let settled = if row.prompt.is_some() { kept } else { kept.min(1) };
        let held = Held { settled: passed[settled], logged: passed[kept] };
        self.carried.seats[seat.0 as usize] = Some(held);
    }
}
