//! Ctrl-C: outside an answer it ends the program; during an answer the first one ends the answer
//! and the second the program.

use crate::exit::INTERRUPTED;
use anyhow::{Context, Result};
use signal_hook::consts::SIGINT;
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The state of Ctrl-C handling.
#[derive(Clone, Debug)]
pub(crate) struct Interrupt {
    pressed: Arc<AtomicBool>,
    next_one_exits: Arc<AtomicBool>,
}

impl Interrupt {
    /// Installs the signal handlers.
    pub(crate) fn install() -> Result<Self> {
        let interrupt = Self::unarmed();
        let Self { pressed, next_one_exits } = interrupt.clone();
        // The order matters: a signal first checks whether to exit, and only then sets the flag for
        // the next one.
        flag::register_conditional_shutdown(SIGINT, INTERRUPTED.into(), next_one_exits.clone())
            .and_then(|_| flag::register(SIGINT, next_one_exits))
            .and_then(|_| flag::register(SIGINT, pressed))
            .context("installing the Ctrl-C handler")?;
        Ok(interrupt)
    }

    /// One without signal handlers.
    pub(crate) fn unarmed() -> Self {
        Self {
            pressed: Arc::new(AtomicBool::new(false)),
            next_one_exits: Arc::new(AtomicBool::new(true)),
        }
    }

    /// Until the guard is dropped, one Ctrl-C does not end the program and is recorded.
    pub(crate) fn guard(&self) -> Answering<'_> {
        self.pressed.store(false, Ordering::SeqCst);
        self.next_one_exits.store(false, Ordering::SeqCst);
        Answering(self)
    }
}

/// An answer that Ctrl-C may end.
pub(crate) struct Answering<'a>(&'a Interrupt);

impl Answering<'_> {
    /// Whether Ctrl-C was pressed.
    pub(crate) fn interrupted(&self) -> bool {
        self.0.pressed.load(Ordering::SeqCst)
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.0.next_one_exits.store(true, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctrl_c_is_recorded_only_during_an_answer() {
        let interrupt = Interrupt::unarmed();
        assert!(interrupt.next_one_exits.load(Ordering::SeqCst));
        let answering = interrupt.guard();
        assert!(!interrupt.next_one_exits.load(Ordering::SeqCst) && !answering.interrupted());
        interrupt.pressed.store(true, Ordering::SeqCst);
        assert!(answering.interrupted());
        drop(answering);
        assert!(interrupt.next_one_exits.load(Ordering::SeqCst));
        assert!(!interrupt.guard().interrupted(), "the flag is reset for each answer");
    }
}
