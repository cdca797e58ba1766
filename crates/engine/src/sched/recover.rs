//! What happens when a device fails.

use super::Scheduler;
use crate::plant::{Plant, planted};
use crate::request::{Finish, RequestId};
use crate::sequence::{Key, Leaving, Place};

impl Scheduler {
    /// The formed step was not launched. False when no retries are left.
    pub(crate) fn not_launched(&mut self) -> bool {
        self.tries += 1;
        self.stats.retries += 1;
        if planted(Plant::DropUnlaunched) {
            self.launched();
            if let Some(flight) = self.flights.pop_back() {
                for row in flight.rows {
                    if let Some(at) = self.sequences[row.key].seated_mut() {
                        at.flying -= 1;
                        at.ahead -= row.most;
                    }
                }
            }
            return true;
        }
        self.tries <= self.config.launch_retries
    }

    /// The formed step can never run: its requests fail, whole, because choices that split off in
    /// it share pages it would have filled.
    pub(crate) fn refuse(&mut self, why: &str) {
        self.stalled = false;
        let rows = std::mem::take(&mut self.forming.rows);
        for row in &rows {
            if let Some(at) = self.sequences[row.key].seated_mut() {
                at.flying -= 1;
                at.ahead -= row.most;
            }
        }
        let ids: Vec<RequestId> = rows.iter().map(|row| self.sequences[row.key].id).collect();
        for id in ids {
            self.end_request(id, &Finish::Failed(why.to_owned()));
        }
        // Sequences that had already ended were only waiting for this row.
        for row in &rows {
            self.vacate_if_done(row.key);
        }
    }

    /// The device's state is lost. All sequences wait again with the tokens confirmed so far; what was in
    /// flight is computed again. After too many restarts without a confirmed step
    /// everything fails. `unreported` steps are still running on the device.
    pub(crate) fn restart(&mut self, why: &str, unreported: usize) {
        self.stats.restarts += 1;
        self.strikes += 1;
        self.unseat_all(unreported);
        if self.strikes > self.config.restarts {
            self.strikes = 0;
            self.fail_all(why);
        }
    }

    /// All sequences wait again with the tokens confirmed so far, and no page is cached. Nothing may be in flight, and
    /// no page being copied.
    pub(crate) fn vacate_all(&mut self) {
        // What was loaded for waiting requests is forgotten with the tree; the store keeps what it has.
        let stale = self.store_stale;
        self.unseat_all(0);
        self.store_stale = stale;
    }

    /// Other weights compute from now on: pages in the store that were computed before are not found again.
    pub(crate) fn renew(&mut self, weights: u64) {
        self.pool.renew(weights);
    }

    fn unseat_all(&mut self, unreported: usize) {
        self.void = self.numbered;
        self.stalled = false;
        self.forming.rows.clear();
        self.flights.clear();
        self.slots.clear();
        self.stale_in_flight = unreported;
        for seat in 0..self.seats.len() {
            let Some(key) = self.seats[seat] else { continue };
            if planted(Plant::KeepSeats) && self.keep_seat(key) {
                continue;
            }
            self.seats[seat] = None;
            self.unseat(key);
        }
        if !planted(Plant::KeepSeats) {
            self.seated = 0;
            self.reserved = 0;
            self.leaving = 0;
            self.pool.reset();
            self.forget_copies();
        }
        self.refused = None;
        self.rejoin_forks();
    }

    /// Ends every request; nothing may be in flight.
    pub(crate) fn fail_all(&mut self, why: &str) {
        let all: Vec<RequestId> = self.live.keys().copied().collect();
        for id in all {
            self.end_request(id, &Finish::Failed(why.to_owned()));
        }
    }

    fn unseat(&mut self, key: Key) {
        let place = std::mem::replace(&mut self.sequences[key].place, Place::Waiting);
        let Place::Seated(at) = place else { return };
        let cold = &mut self.sequences[key].cold;
        cold.reserve.clear();
        // The pool forgets all copies.
        (cold.marks, cold.restore) = ([0; 2], None);
        cold.saved.clear();
        if at.leaving == Some(Leaving::Ended) {
            self.sequences.remove(key);
        } else {
            self.wait_again(key);
        }
    }

    /// Choices whose prompt was never confirmed are merged back: they split off again when it is, so that
    /// a client gets no token before the prompt is reported done.
    fn rejoin_forks(&mut self) {
        for live in self.live.values_mut() {
            let parent = live.sequences[0];
            if live.sequences.len() == 1 || self.sequences[parent].announced {
                continue;
            }
            for key in live.sequences.drain(1..) {
                let fork = self.sequences.remove(key);
                self.queue.remove(fork.rank());
                self.sequences[parent].cold.unforked += 1;
            }
        }
    }

    /// The planted bug: treats confirmed tokens as still on the device.
    fn keep_seat(&mut self, key: Key) -> bool {
        let sequence = &mut self.sequences[key];
        let Place::Seated(at) = &mut sequence.place else { return false };
        (at.flying, at.ahead) = (0, 0);
        at.fed = at.confirmed;
        at.primed = at.fed + 1 == sequence.tokens.len() as u32;
        if at.leaving.is_some() {
            self.vacate(key);
        }
        true
    }
}
