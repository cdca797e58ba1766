//! Which graphs a lazy runner keeps, and who records them. The set is bounded by bytes. A new graph must be needed more than
//! twice as often as each graph it evicts, so that traffic which alternates between two sizes does not
//! record both again and again.
//!
//! A thread records and destroys graphs: both take milliseconds, for which no step waits. Until a graph is there, the steps
//! that need it run op by op.

use crate::backend::{BackendKind, Context, Recorded};
use crate::{Plan, ShapeKey};
use device::{Arena, Device, RecordOptions};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

/// Steps that must need a bucket before it is recorded.
pub(super) const EARN: u64 = 3;

/// How many steps needed each key since the runner started.
#[derive(Debug, Default)]
pub(super) struct Wants {
    steps: BTreeMap<ShapeKey, u64>,
    /// Bytes of every graph that was recorded once.
    bytes: BTreeMap<ShapeKey, u64>,
    /// Keys that are being recorded.
    pending: BTreeSet<ShapeKey>,
    /// Keys that could not be recorded.
    failed: BTreeSet<ShapeKey>,
}

impl Wants {
    /// Counts a step that needed the key; true if the key has earned a graph that may be recorded now. `kept` are the
    /// graphs there are, with their bytes.
    pub(super) fn want(
        &mut self,
        key: &ShapeKey,
        kept: &[(ShapeKey, u64)],
        budget: Option<u64>,
    ) -> bool {
        let count = self.used(key);
        let earned = count >= EARN && !self.pending.contains(key) && !self.failed.contains(key);
        // What did not fit once is not recorded again before it does.
        let fits = match (self.bytes.get(key), budget) {
            (Some(bytes), Some(budget)) => self.make_room(key, *bytes, kept, budget).is_some(),
            _ => true,
        };
        earned && fits && self.pending.insert(*key)
    }

    /// Counts a step that needed the key and had its graph; returns all that needed it.
    pub(super) fn used(&mut self, key: &ShapeKey) -> u64 {
        let count = self.steps.entry(*key).or_default();
        *count += 1;
        *count
    }

    /// A graph was recorded; returns the keys that must give way to it, `None` if it is not worth it.
    pub(super) fn recorded(
        &mut self,
        key: &ShapeKey,
        bytes: u64,
        kept: &[(ShapeKey, u64)],
        budget: Option<u64>,
    ) -> Option<Vec<ShapeKey>> {
        self.pending.remove(key);
        self.bytes.insert(*key, bytes);
        budget.map_or(Some(Vec::new()), |budget| self.make_room(key, bytes, kept, budget))
    }

    fn failed(&mut self, key: &ShapeKey) {
        self.pending.remove(key);
        self.failed.insert(*key);
    }

    /// Whether something is being recorded.
    pub(super) fn any_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Which of `kept` (key, bytes) to give back so that `needed` more bytes fit `budget`; `None` when
    /// the new key is not worth it. Evicts the least needed first, and only keys needed less than half
    /// as often as the new one.
    fn make_room(
        &self,
        newcomer: &ShapeKey,
        needed: u64,
        kept: &[(ShapeKey, u64)],
        budget: u64,
    ) -> Option<Vec<ShapeKey>> {
        let wanted = |key: &ShapeKey| self.steps.get(key).copied().unwrap_or(0);
        let mut used: u64 = kept.iter().map(|(_, bytes)| bytes).sum();
        let mut order: Vec<&(ShapeKey, u64)> = kept.iter().collect();
        order.sort_by_key(|(key, _)| wanted(key));
        let mut out = Vec::new();
        let mut order = order.into_iter();
        while used + needed > budget {
            let (key, bytes) = order.next()?;
            if wanted(key) * 2 >= wanted(newcomer) {
                return None;
            }
            used -= bytes;
            out.push(*key);
        }
        Some(out)
    }
}

/// What the thread is asked to do.
enum Job {
    Record(Box<Plan>),
    /// To give memory back, wait for the device.
    Drop(Recorded),
}

/// The thread that records.
#[derive(Debug)]
pub(super) struct Recorder {
    /// `None` when it is to end.
    jobs: Option<Sender<Job>>,
    done: Receiver<(ShapeKey, device::Result<Recorded>)>,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    pub(super) fn start(
        device: &Device,
        arena: &Arena,
        kind: BackendKind,
        options: RecordOptions,
    ) -> std::io::Result<Recorder> {
        let (jobs, todo) = channel::<Job>();
        let (send, done) = channel();
        let (device, arena) = (device.clone(), arena.clone());
        let work = move || {
            let cx = Context::new(&device, &arena, options);
            let mut backend = kind.create();
            for job in todo {
                let plan = match job {
                    Job::Record(plan) => plan,
                    Job::Drop(recorded) => {
                        drop(recorded);
                        continue;
                    }
                };
                let made = backend.prepare(&cx, &plan).and_then(|()| backend.make(&cx, &plan));
                // Without a receiver the runner is gone.
                let _ = send.send((plan.key, made));
            }
        };
        let thread = thread::Builder::new().name("dacapo-record".into()).spawn(work)?;
        Ok(Recorder { jobs: Some(jobs), done, thread: Some(thread) })
    }

    pub(super) fn record(&self, plan: &Plan) {
        self.send(Job::Record(Box::new(plan.clone())));
    }

    pub(super) fn destroy(&self, recorded: Recorded) {
        self.send(Job::Drop(recorded));
    }

    fn send(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            // It ends only after its last sender.
            let _ = jobs.send(job);
        }
    }

    /// The next plan that is done, if there is one; with `wait`, waits for it. One that failed is told, and not tried again.
    pub(super) fn next(&self, wants: &mut Wants, wait: bool) -> Option<(ShapeKey, Recorded)> {
        loop {
            let done = if wait && wants.any_pending() {
                self.done.recv().ok()
            } else {
                self.done.try_recv().ok()
            };
            match done? {
                (key, Ok(recorded)) => return Some((key, recorded)),
                (key, Err(problem)) => {
                    device::notice::say(format_args!(
                        "no graph of {key} was recorded: {problem} (its steps run op by op)"
                    ));
                    wants.failed(&key);
                }
            }
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It does not panic: what it runs returns errors.
            let _ = thread.join();
        }
    }
}
