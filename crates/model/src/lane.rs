//! A thread that does one job after the other and reports each.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// What a job is told: whether its result is still wanted.
pub(crate) type Job<R> = Box<dyn FnOnce(bool) -> R + Send>;

/// A thread. Dropping it waits for the jobs it was given.
#[derive(Debug)]
pub(crate) struct Lane<R> {
    jobs: Option<Sender<Job<R>>>,
    thread: Option<JoinHandle<()>>,
}

impl<R: Send + 'static> Lane<R> {
    /// Starts the thread, which sends what jobs return to `reports`. Jobs that begin while `unwanted` is set are told so.
    pub(crate) fn new(name: &str, reports: Sender<R>, unwanted: Arc<AtomicBool>) -> Lane<R> {
        let (jobs, inbox) = channel::<Job<R>>();
        let work = move || {
            for job in inbox {
                // The receiver is gone only when its owner is.
                let _ = reports.send(job(!unwanted.load(Ordering::Acquire)));
            }
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(work);
        let thread = thread.expect("cannot start a thread");
        Lane { jobs: Some(jobs), thread: Some(thread) }
    }

    /// Gives the thread a job.
    pub(crate) fn give(&self, job: Job<R>) {
        let jobs = self.jobs.as_ref().expect("it is there until the lane is dropped");
        jobs.send(job).expect("the thread ends only with its lane");
    }
}

impl<R> Drop for Lane<R> {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A panic in it has been reported already.
            drop(thread.join());
        }
    }
}
