//! What seats carry on a device with recurrent layers: here a hash of the tokens that they were fed.

use super::FakeDevice;
use crate::oracle::Prefix;
use engine::exec::{Seat, StateCopy, Step};

/// Of every seat and of every copy; `None` where nothing was carried yet.
#[derive(Default)]
pub(crate) struct Carried {
    seats: Vec<Option<Prefix>>,
    copies: Vec<Option<Prefix>>,
}

impl Carried {
    pub(crate) fn new(seats: u32, copies: u32) -> Carried {
        Carried { seats: vec![None; seats as usize], copies: vec![None; copies as usize] }
    }

    pub(super) fn copies(&self) -> u32 {
        self.copies.len() as u32
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
                StateCopy::Restore { .. } => self.carried.seats[seat] = self.carried.copies[slot],
                StateCopy::Save { .. } => self.carried.copies[slot] = self.carried.seats[seat],
            }
        }
    }

    /// A seat is fed from behind `before`, its first `start` tokens, up to `after`: it must carry what they left.
    pub(super) fn carry_on(&mut self, seat: Seat, start: u32, before: Prefix, after: Prefix) {
        let Some(carried) = self.carried.seats.get(seat.0 as usize).copied() else { return };
        if start > 0 && carried != Some(before) {
            self.wrong(format!("{seat:?} carries another state at {start} than its tokens left"));
        }
        self.carried.seats[seat.0 as usize] = Some(after);
    }
}
