//! The CPU's second stream: one thread that copies while the pool may be running something else.

use super::memory::copy_bytes;
use crate::arena::ArenaInner;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// A copy between two spans of an arena that were checked and do not overlap.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) bytes: usize,
    /// One of them is host-mapped.
    pub(super) shared: bool,
    /// Keeps both alive until the copy is done.
    pub(super) _arena: Arc<ArenaInner>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    job: Option<Job>,
    busy: bool,
    ends: bool,
}

/// The copying thread. Dropping it waits for the copies it was given.
#[derive(Debug)]
pub(super) struct Beside {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn wait<'a>(shared: &Shared, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    shared.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Beside {
    /// Starts the thread.
    pub(super) fn new() -> std::io::Result<Beside> {
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let thread = std::thread::Builder::new().name("copy".into()).spawn(move || run(&theirs))?;
        Ok(Beside { shared, thread: Some(thread) })
    }

    /// Gives the thread a copy; waits for the previous one first.
    pub(super) fn start(&self, job: Job) {
        let mut state = self.idle();
        state.job = Some(job);
        self.shared.changed.notify_all();
    }

    /// Waits for every copy given to the thread: the edge from this stream to the other.
    pub(super) fn wait(&self) {
        drop(self.idle());
    }

    fn idle(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.shared);
        while state.job.is_some() || state.busy {
            state = wait(&self.shared, state);
        }
        state
    }
}

fn run(shared: &Shared) {
    let mut state = lock(shared);
    loop {
        if let Some(job) = state.job.take() {
            state.busy = true;
            drop(state);
            // SAFETY: the caller checked both ranges against the arena that the job holds; the device reads or writes
            // neither until it has waited for this copy.
            unsafe {
                copy_bytes(job.from as *const u8, job.to as *mut u8, job.bytes, job.shared);
            }
            drop(job);
            state = lock(shared);
            state.busy = false;
            shared.changed.notify_all();
        } else if state.ends {
            return;
        } else {
            state = wait(shared, state);
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        lock(&self.shared).ends = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread ends because of `ends`; a panic in it has been reported already.
            drop(thread.join());
        }
    }
}
