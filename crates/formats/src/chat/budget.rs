//! The budget of one rendering: steps, bytes read, memory held, time.
//!
//! Templates and messages are untrusted, so every value that a rendering makes is charged here before
//! it exists, and its memory is given back when it is dropped.

use super::fault::{Fault, Outcome};
use crate::limits;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct Budget {
    steps: Cell<u64>,
    work: Cell<u64>,
    held: Arc<AtomicUsize>,
    deadline: Instant,
}

/// Memory that a value takes up; given back when this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    total: Arc<AtomicUsize>,
    bytes: usize,
}

impl Budget {
    pub(super) fn new() -> Self {
        Self {
            steps: Cell::new(limits::TEMPLATE_STEPS),
            work: Cell::new(limits::TEMPLATE_WORK),
            held: Arc::default(),
            deadline: Instant::now() + Duration::from_secs(limits::TEMPLATE_SECONDS),
        }
    }

    /// Charges one step.
    pub(super) fn step(&self) -> Outcome<()> {
        let Some(left) = self.steps.get().checked_sub(1) else {
            let cap = limits::TEMPLATE_STEPS;
            return Err(Fault::new(format!("found more than {cap} steps, allowed: at most {cap}")));
        };
        self.steps.set(left);
        // Asking for the time takes longer than most steps.
        if left % 1_024 == 0 { self.look_at_the_clock() } else { Ok(()) }
    }

    /// Charges reading or writing `bytes`.
    pub(super) fn work(&self, bytes: usize) -> Outcome<()> {
        let Some(left) = self.work.get().checked_sub(bytes as u64) else {
            let cap = limits::TEMPLATE_WORK;
            let words = format!("found more than {cap} bytes of text read, allowed: at most {cap}");
            return Err(Fault::new(words));
        };
        let chunk = |bytes: u64| bytes >> 24;
        let looks = chunk(left) != chunk(self.work.get());
        self.work.set(left);
        if looks { self.look_at_the_clock() } else { Ok(()) }
    }

    fn look_at_the_clock(&self) -> Outcome<()> {
        if Instant::now() <= self.deadline {
            return Ok(());
        }
        let cap = limits::TEMPLATE_SECONDS;
        Err(Fault::new(format!(
            "found more than {cap} seconds of rendering, allowed: at most {cap}"
        )))
    }

    /// Takes `bytes` of memory, and the time to fill them.
    pub(super) fn hold(&self, bytes: usize) -> Outcome<Held> {
        let mut held = Held { total: Arc::clone(&self.held), bytes: 0 };
        self.grow(&mut held, bytes)?;
        Ok(held)
    }

    /// Takes `bytes` more.
    pub(super) fn grow(&self, held: &mut Held, bytes: usize) -> Outcome<()> {
        self.work(bytes)?;
        let total = self.held.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        held.bytes += bytes;
        if total > limits::TEMPLATE_MEMORY {
            let cap = limits::TEMPLATE_MEMORY;
            let words = format!("found more than {cap} bytes of values, allowed: at most {cap}");
            return Err(Fault::new(words));
        }
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
