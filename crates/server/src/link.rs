//! Between tokio and the engine: the engine runs on a thread of its own and never waits for a
//! reader; a reader that is gone or too far behind is cancelled.

mod call;
mod snapshot;
mod thread;

pub use call::{Call, Reply};
pub use snapshot::{
    ConfigRow, GraphInfo, Pages, Phase, PlanPicture, PrefixUse, Run, Snapshot, StepRecord,
};
pub use thread::{PUBLISH_CALLS, spawn};

use crate::metrics::Metrics;
use engine::request::{Event, Micros, Output, Request, RequestId};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

/// What the engine looks like from its thread. One backend, one thread, no locks.
pub trait Backend {
    /// Takes events in their order, works, and tells what happened. With `wait` the backend may
    /// block until the device has something to tell; without, it returns at once.
    fn step(&mut self, now: Micros, events: Vec<Event>, wait: bool) -> Vec<Output>;
    /// Whether there is nothing to do until the next event.
    fn is_idle(&self) -> bool;
    /// The state for `/metrics` and the page. Called some ten times a second, between steps.
    fn snapshot(&self) -> Snapshot;
    /// Why it will never answer anybody again, if so: it is asked after each step, and then dropped.
    fn gone(&self) -> Option<String> {
        None
    }
}

/// Makes a backend on the engine's thread: once at the start and again after each that is gone. An error
/// means that there will be none; the server stays up and says that it is not ready.
pub type Factory = Box<dyn FnMut() -> Result<Box<dyn Backend>, String> + Send>;

/// A factory for a backend that exists already and cannot be made again.
pub fn once(backend: impl Backend + Send + 'static) -> Factory {
    let mut backend = Some(backend);
    Box::new(move || match backend.take() {
        Some(backend) => Ok(Box::new(backend)),
        None => Err("the engine failed and cannot be started again".into()),
    })
}

/// Whether the engine can take requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Health {
    /// The first backend is being made.
    Starting,
    /// Steps are taken.
    Ready,
    /// A panic; a new backend is being made.
    Restarting,
    /// There will be no other backend.
    Dead,
    /// A step has not come back for longer than the limit.
    Stalled,
}

impl Health {
    /// In words, for people and for logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "the engine is starting",
            Self::Ready => "ready",
            Self::Restarting => "the engine failed and is being started again",
            Self::Dead => "the engine failed",
            Self::Stalled => "a step of the engine has not come back",
        }
    }
}

/// Why a call was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// As many are in flight as may be.
    Full {
        /// How many.
        inflight: u64,
    },
    /// The engine is not there.
    Down(Health),
}

pub(crate) enum Message {
    Submit { requests: Vec<Request>, replies: tokio::sync::mpsc::Sender<Reply> },
    Cancel(Vec<RequestId>),
    AbortAll(String),
    Stop,
}

pub(crate) struct Shared {
    origin: Instant,
    next_id: AtomicU64,
    inflight: AtomicU64,
    health: AtomicU8,
    /// When the step now running began; 0 between steps.
    step_began: AtomicU64,
    closed: AtomicBool,
    snapshot: Mutex<Arc<Snapshot>>,
    metrics: Arc<Metrics>,
    max_inflight: u64,
    max_backlog: u64,
    stall: Micros,
}

/// Who takes an answer's tokens as they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// A client, as fast as its line: past the backlog it has lost its stream.
    Client,
    /// The server itself, which holds the whole answer anyway: however late its turn comes, nothing is
    /// lost.
    Server,
}

/// The way in to the engine's thread. Cheap to clone.
#[derive(Clone)]
pub struct Link {
    messages: mpsc::Sender<Message>,
    shared: Arc<Shared>,
}

impl Link {
    /// Microseconds since this link began: the engine's time.
    pub fn now(&self) -> Micros {
        self.shared.now()
    }

    /// Whether the engine can take requests.
    pub fn health(&self) -> Health {
        self.shared.health()
    }

    /// Requests taken and not finished.
    pub fn inflight(&self) -> u64 {
        self.shared.inflight.load(Ordering::Relaxed)
    }

    /// Whether `more` requests would be too many now.
    pub fn check_room(&self, more: u64) -> Result<(), Refusal> {
        match self.health() {
            Health::Ready => {}
            other => return Err(Refusal::Down(other)),
        }
        let inflight = self.inflight();
        if inflight + more > self.shared.max_inflight {
            return Err(Refusal::Full { inflight });
        }
        Ok(())
    }

    /// The engine's last published state.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.shared.snapshot.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Hands requests to the engine as one call. Their ids are chosen here, consecutive from the
    /// call's first. Dropping the call cancels what is left of it.
    pub fn submit(&self, mut requests: Vec<Request>, reader: Reader) -> Result<Call, Refusal> {
        let count = requests.len() as u64;
        let shared = &self.shared;
        self.check_room(count)?;
        let before = shared.inflight.fetch_add(count, Ordering::Relaxed);
        if before + count > shared.max_inflight {
            shared.inflight.fetch_sub(count, Ordering::Relaxed);
            return Err(Refusal::Full { inflight: before });
        }
        let first = shared.next_id.fetch_add(count, Ordering::Relaxed);
        let mut tokens = 0u64;
        for (request, id) in requests.iter_mut().zip(first..) {
            request.id = RequestId(id);
            request.call = Some(RequestId(first));
            tokens += u64::from(request.choices) * (u64::from(request.sampling.max_tokens) + 2) + 2;
        }
        let room = match reader {
            Reader::Client => tokens.min(shared.max_backlog.max(2 * count)),
            Reader::Server => tokens,
        };
        let (replies, inbox) = tokio::sync::mpsc::channel(room as usize);
        if self.messages.send(Message::Submit { requests, replies }).is_err() {
            shared.inflight.fetch_sub(count, Ordering::Relaxed);
            return Err(Refusal::Down(Health::Dead));
        }
        Ok(Call::new(inbox, first, count, self.messages.clone()))
    }

    /// Ends every live request with a final reply that says why.
    pub fn abort_all(&self, why: &str) {
        // A closed channel means that the thread has told everyone already.
        let _ = self.messages.send(Message::AbortAll(why.into()));
    }

    /// Lets the thread end once its channel is empty.
    pub fn stop(&self) {
        let _ = self.messages.send(Message::Stop);
    }
}

impl Shared {
    fn now(&self) -> Micros {
        self.origin.elapsed().as_micros() as Micros
    }

    fn set_health(&self, health: Health) {
        self.health.store(health as u8, Ordering::Release);
    }

    fn health(&self) -> Health {
        let began = self.step_began.load(Ordering::Relaxed);
        if self.closed.load(Ordering::Relaxed) {
            return Health::Dead;
        }
        match self.health.load(Ordering::Acquire) {
            0 => Health::Starting,
            1 if began > 0 && self.now().saturating_sub(began) > self.stall => Health::Stalled,
            1 => Health::Ready,
            2 => Health::Restarting,
            _ => Health::Dead,
        }
    }
}
