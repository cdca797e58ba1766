//! Choices of a request that split off from the first one after its prompt.

use super::{FlightRow, Scheduler};
use crate::exec::{SCRATCH_PAGE, Seat};
use crate::request::Drafts;
use crate::sequence::{ColdState, Key, Place, Seated, Sequence};
use std::sync::Arc;

impl Scheduler {
    /// Gives copied pages back, then splits the choices off whose prompt was just launched: they
    /// share its pages and feed the last prompt token again, each with its own seed.
    pub(super) fn fork_all(&mut self) {
        for index in 0..self.step.copies.len() {
            self.pool.give(self.step.copies[index].0);
        }
        // Only sequences with unforked choices have reserved seats.
        let rows = if self.reserved > 0 { self.forming.rows.len() } else { 0 };
        for index in 0..rows {
            let FlightRow { key, most, .. } = self.forming.rows[index];
            if most > 0 && self.sequences[key].cold.unforked > 0 {
                let count = std::mem::take(&mut self.sequences[key].cold.unforked);
                let first = self.sequences[key].choice + 1;
                for choice in first..first + count {
                    self.fork(key, choice);
                }
            }
        }
    }

    fn fork(&mut self, parent: Key, choice: u32) {
        if self.reports.carries {
            return self.fork_to_queue(parent, choice);
        }
        let index = self.seats.iter().position(Option::is_none).expect("a seat was reserved");
        if let Some(at) = self.sequences[parent].seated_mut() {
            at.shared = true;
        }
        let sequence = &self.sequences[parent];
        let Some(at) = sequence.seated() else { return };
        let fed = sequence.len() - 1;
        let pages = fed.div_ceil(self.geometry.page_size) * self.geometry.kept.width();
        let table = at.table[..pages as usize].to_vec();
        for &page in table.iter().filter(|page| **page != SCRATCH_PAGE) {
            self.pool.share(page);
        }
        let cursor = self.pool.fork(&at.cursor);
        let (published, freed) = (at.published, at.freed);
        let place = Place::Seated(Seated {
            table,
            seat: Seat(index as u32),
            sent: 0,
            freed,
            fed,
            confirmed: 0,
            flying: 0,
            ahead: 0,
            published,
            shared: true,
            joined: false,
            primed: false,
            leaving: None,
            cursor,
        });
        let key = self.add_fork(parent, choice, place);
        self.seats[index] = Some(key);
        self.seated += 1;
        self.reserved -= 1;
    }

    /// A choice whose seat cannot have the state that its parent carries: it waits, and feeds the prompt itself.
    fn fork_to_queue(&mut self, parent: Key, choice: u32) {
        let key = self.add_fork(parent, choice, Place::Waiting);
        self.reserved -= 1;
        self.wait_again(key);
    }

    fn add_fork(&mut self, parent: Key, choice: u32, place: Place) -> Key {
        let sequence = &self.sequences[parent];
        let fork = Sequence {
            tokens: sequence.tokens.clone(),
            id: sequence.id,
            may_stop: sequence.may_stop,
            choice,
            prompt_len: sequence.prompt_len,
            max_len: sequence.max_len,
            // Emitted once, by the sequence it splits from.
            announced: true,
            due: sequence.due,
            guided: sequence.guided,
            plain: sequence.plain,
            place,
            cold: Box::new(ColdState {
                spec: Arc::clone(&sequence.cold.spec),
                limit: sequence.cold.limit,
                matcher: sequence.cold.matcher.clone(),
                thought: sequence.cold.thought,
                arrival: sequence.cold.arrival,
                turn: sequence.cold.turn,
                unforked: 0,
                overtaken: 0,
                sent_back: 0,
                looked_up: None,
                fetches: 0,
                cached: sequence.cold.cached,
                scores: Vec::new(),
                hidden: Vec::new(),
                copies: Vec::new(),
                reserve: Vec::new(),
                marks: [0; 2],
                restore: None,
                saved: Vec::new(),
                passed: 0,
                drafts: Drafts::default(),
            }),
        };
        let id = fork.id;
        let key = self.sequences.insert(fork);
        self.live.get_mut(&id).expect("its parent lives").sequences.push(key);
        key
    }
}
