//! Adapters move to the device while steps run.

use crate::engine::Engine;
use crate::exec::Executor;

impl<X: Executor> Engine<X> {
    /// Takes the slots that were filled; with `wait` waits a moment for one.
    pub(crate) fn take_filled(&mut self, wait: bool) {
        if !self.sched.is_filling() {
            return;
        }
        match self.executor.poll_adapters(&mut self.filled, wait) {
            Ok(()) => {
                for (slot, adapter) in self.filled.drain(..) {
                    self.sched.filled(slot, adapter);
                }
            }
            Err(error) => {
                let unreported = self.sched.in_flight();
                self.sched.restart(&error.to_string(), unreported);
            }
        }
    }

    /// Begins to fill the slots that waiting requests need.
    pub(crate) fn fill_slots(&mut self) {
        // Steps from before a restart may still read what is there.
        if self.sched.stale_in_flight > 0 {
            return;
        }
        while let Some((slot, adapter)) = self.sched.next_to_fill() {
            self.executor.begin_adapter(slot, adapter);
        }
    }

    /// Waits until no slot is being filled.
    pub(crate) fn settle_slots(&mut self) {
        while self.sched.is_filling() {
            self.take_filled(true);
        }
    }
}
