//! Checked scratch: poisoned before a step, with fences around what the step asked for. A step that writes outside of
//! that panics with the offset; one that reads what it did not write computes with NaN.

use super::asan;
use super::step::{Step, Team};

/// Bytes of the fence after every part, at least.
pub(super) const FENCE: usize = 4096;

/// The bytes of a fence.
const POST: u8 = 0xA5;
/// The bytes of scratch before a step: NaN in every float format.
const POISON: u8 = 0xFF;

/// Checks the scratch of every step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guard;

impl Guard {
    /// Runs a step; fills the fences before it and checks them after it.
    ///
    /// # Panics
    /// If a fence was written to.
    pub(super) fn run(&self, step: &dyn Step, team: &Team<'_>) {
        let Team { size, asked, .. } = *team;
        let parts = || {
            let own = (0..team.threads()).map(move |worker| {
                (
                    format!("worker {worker}'s scratch"),
                    size.shared + worker * size.own,
                    asked.own,
                    size.own,
                )
            });
            own.chain([("shared scratch".to_owned(), 0, asked.shared, size.shared)])
        };
        for (_, start, asked, size) in parts() {
            // SAFETY: a part of the scratch, of this size; no worker runs a chunk now.
            unsafe {
                let start = team.scratch.add(start);
                start.write_bytes(POISON, asked);
                start.add(asked).write_bytes(POST, size - asked);
                asan::fence(start.add(asked), size - asked);
            }
        }
        step.run(team);
        for (what, start, asked, size) in parts() {
            // SAFETY: as above; all chunks are done.
            let fence = unsafe {
                let fence = team.scratch.add(start + asked);
                asan::open(fence, size - asked);
                std::slice::from_raw_parts(fence, size - asked)
            };
            if let Some(at) = fence.iter().position(|byte| *byte != POST) {
                panic!("{what} of {asked} bytes: byte {} was written", asked + at);
            }
        }
    }
}
