//! Copies of what seats carry, where layers are recurrent: a prompt saves its state where another may go on.

use super::Scheduler;
use crate::exec::StateCopy;
use crate::plant::{Plant, planted};
use crate::sequence::{Key, Saved};

/// Pages of tokens that a copy must spare the next sequence, at least.
const LEAST_SPARED: u32 = 4;

impl Scheduler {
    /// Whether the device carries states and has room for copies of them.
    fn copies_states(&self) -> bool {
        self.reports.carries && self.reports.states > 0
    }

    /// The positions at which a prompt saves its state: where it leaves what others had before it, `reach` pages from the
    /// start, and its last page boundary. It was seated with `cached` pages.
    pub(super) fn set_marks(&mut self, key: Key, cached: u32, reach: u32) {
        let page_size = self.geometry.page_size;
        let on = self.copies_states() && self.config.prefix_cache;
        let sequence = &mut self.sequences[key];
        sequence.cold.marks = [0; 2];
        if !on {
            return;
        }
        // The last token is always fed.
        let last = sequence.goal().saturating_sub(1) / page_size;
        let mut known = cached;
        for (mark, pages) in sequence.cold.marks.iter_mut().zip([reach.min(last), last]) {
            if pages.saturating_sub(known) >= LEAST_SPARED {
                *mark = pages * page_size;
                known = pages;
            }
        }
    }

    /// Where a chunk of a prompt that may go up to `end` ends, so that its state can be saved.
    pub(super) fn cut_at_mark(&self, key: Key, start: u32, end: u32) -> u32 {
        let marks = self.sequences[key].cold.marks.iter().copied();
        marks.filter(|&mark| start < mark).fold(end, u32::min)
    }

    /// The state that a seat begins with is copied there before the step.
    pub(super) fn restore_state(&mut self, key: Key) {
        let sequence = &mut self.sequences[key];
        let Some(slot) = sequence.cold.restore.take() else { return };
        let Some(at) = sequence.seated() else { return };
        if !planted(Plant::ForgetState) {
            self.step.states.push(StateCopy::Restore { slot, seat: at.seat });
        }
        self.stats.states_restored += 1;
        // The step that is being formed.
        self.pool.touch_state(slot, self.numbered + 1);
        // Copies are made in order: one that replaces it is made later.
        self.pool.unpin_state(slot);
    }

    /// Before a chunk is fed at a mark, what the seat carries is saved, if there is room.
    pub(super) fn save_state(&mut self, key: Key, start: u32) {
        let sequence = &mut self.sequences[key];
        let Some(mark) = sequence.cold.marks.iter_mut().find(|mark| **mark == start && start > 0)
        else {
            return;
        };
        *mark = 0;
        let Some(at) = sequence.seated() else { return };
        let Some(slot) = self.pool.take_state(self.numbered + 1) else { return };
        let pages = start / self.geometry.page_size - u32::from(planted(Plant::SaveOtherPage));
        // Where results come back before the next step is formed, the page is published already.
        let node = at.cursor.node().filter(|_| at.published == pages);
        let seat = at.seat;
        sequence.cold.saved.push(Saved { pages, slot, node });
        self.step.states.push(StateCopy::Save { seat, slot });
        self.stats.states_saved += 1;
    }

    /// Copies are in the tree once the step that they were made before has run.
    pub(super) fn attach_states(&mut self, key: Key) {
        let page_size = self.geometry.page_size;
        let sequence = &mut self.sequences[key];
        let Some(confirmed) = sequence.seated().map(|at| at.confirmed) else { return };
        sequence.cold.saved.retain(|saved| match saved.node {
            Some(node) if confirmed > saved.pages * page_size => {
                self.pool.attach_state(node, saved.slot);
                false
            }
            _ => true,
        });
    }

    /// Pages of tokens up to which another sequence's state is still to come, at most `most`.
    pub(super) fn state_coming(&self, key: Key, most: u32) -> u32 {
        let cold = &self.sequences[key].cold;
        let marks = cold.marks.iter().map(|mark| mark / self.geometry.page_size);
        let saved = cold.saved.iter().map(|saved| saved.pages);
        marks.chain(saved).filter(|&pages| pages <= most).max().unwrap_or(0)
    }

    /// A sequence leaves its seat: copies that belong to no page are free.
    pub(super) fn drop_states(&mut self, key: Key) {
        let cold = &mut self.sequences[key].cold;
        cold.marks = [0; 2];
        if let Some(slot) = cold.restore.take() {
            self.pool.unpin_state(slot);
        }
        for saved in cold.saved.drain(..) {
            self.pool.release_state(saved.slot);
        }
    }
}
