//! Connects the async server to the engine's thread. The engine never waits for a client: if a
//! client disconnects or falls too far behind, its request is cancelled.

mod call;
mod change;
mod changes;
mod snapshot;
mod thread;

pub use call::{Call, Reply};
pub(crate) use change::Running;
pub use change::{
    AdapterReader, Change, ChangeError, Changed, NewWeights, Parts, ReadAdapter, Rest, SharedPlace,
    SharedTensor,
};
pub use snapshot::{
    ConfigRow, DraftUse, ExpertUse, GraphInfo, Pages, Phase, PlanPicture, PrefixUse, Run, Snapshot,
    StepRecord, TierUse,
};
pub use thread::PUBLISH_CALLS;
pub(crate) use thread::spawn;

use crate::metrics::Metrics;
use engine::pages::CacheEvent;
use engine::request::{Event, Micros, Output, Request, RequestId};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

/// The engine as its thread uses it. One thread owns it, so it needs no locks.
pub trait Backend {
    /// Applies events in order, runs one step and returns its outputs. With `wait` it may block
    /// until the device has results; without, it returns at once.
    fn step(&mut self, now: Micros, events: Vec<Event>, wait: bool) -> Vec<Output>;
    /// Whether it has nothing to do until the next event.
    fn is_idle(&self) -> bool;
    /// The state for `/metrics` and the page; called between steps, about ten times a second.
    fn snapshot(&self) -> Snapshot;
    /// What was cached and evicted since the last call, in order. Called after each step if events are published.
    fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        Vec::new()
    }
    /// The reason if the backend has failed for good. Checked after each step; a failed backend is
    /// dropped.
    fn gone(&self) -> Option<String> {
        None
    }
    /// Changes its memory or its weights, after the steps under way. Sequences that run go on afterwards.
    fn change(&mut self, _change: &Change) -> Changed {
        Changed { outputs: Vec::new(), result: Err(ChangeError::Unsupported) }
    }
    /// What reads adapters for it, if it can use some.
    fn adapter_reader(&self) -> Option<AdapterReader> {
        None
    }
    /// Whether it can run steps.
    fn rest(&self) -> Rest {
        Rest::Awake
    }
    /// How often its weights were replaced.
    fn weight_version(&self) -> u64 {
        0
    }
}

/// Makes a backend on the engine's thread, at the start and after each failure. An error is final:
/// the server stays up and reports that it is not ready.
pub type Factory = Box<dyn FnMut() -> Result<Box<dyn Backend>, String> + Send>;

/// A factory for one existing backend, which cannot be restarted.
pub fn once(backend: impl Backend + Send + 'static) -> Factory {
    let mut backend = Some(backend);
    Box::new(move || match backend.take() {
        Some(backend) => Ok(Box::new(backend)),
        None => Err("the engine failed and cannot be restarted".into()),
    })
}

/// Whether the engine can take requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Health {
    /// The first backend is being made.
    Starting,
    /// The engine is running.
    Ready,
    /// The backend failed; a new one is being made.
    Restarting,
    /// The engine has stopped for good.
    Dead,
    /// A step has taken longer than `stall_ms`.
    Stalled,
    /// The operator put it to sleep.
    Asleep,
    /// The operator let it forget its weights.
    NoWeights,
}

impl Health {
    /// A description for error messages and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "the engine is starting",
            Self::Ready => "ready",
            Self::Restarting => "the engine failed and is restarting",
            Self::Dead => "the engine failed to start or has stopped",
            Self::Stalled => "the engine is stalled: a step has not returned",
            Self::Asleep => "the model is asleep: POST /wake_up first",
            Self::NoWeights => "the model has no weights: update them first",
        }
    }
}

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The limit of requests in flight is reached.
    Full {
        /// Requests in flight.
        inflight: u64,
    },
    /// The engine is not running.
    Down(Health),
}

pub(crate) enum Message {
    Submit {
        requests: Vec<Request>,
        replies: tokio::sync::mpsc::Sender<Reply>,
        /// Where the version of the weights is written that answer them.
        version: Arc<AtomicU64>,
    },
    /// The client has left.
    Cancel(Vec<RequestId>),
    /// The client wants no more tokens, but the end.
    #[cfg(feature = "grpc")]
    End(Vec<RequestId>),
    AbortAll(String),
    Change(Box<AskedChange>),
    Stop,
}

/// A change, and who waits for it.
pub(crate) struct AskedChange {
    change: Change,
    running: Running,
    reply: tokio::sync::oneshot::Sender<Result<(), ChangeError>>,
}

pub(crate) struct Shared {
    origin: Instant,
    next_id: AtomicU64,
    inflight: AtomicU64,
    health: AtomicU8,
    /// Woken at every change of `health`.
    changed: tokio::sync::Notify,
    /// The start time of the current step; 0 between steps.
    step_began: AtomicU64,
    closed: AtomicBool,
    /// Memory of the model was given back, by the operator or because nothing was asked for long enough.
    asleep: AtomicBool,
    /// The operator stopped all steps.
    paused: AtomicBool,
    /// How often the weights were replaced.
    weight_version: AtomicU64,
    snapshot: Mutex<Arc<Snapshot>>,
    adapter_reader: Mutex<Option<AdapterReader>>,
    metrics: Arc<Metrics>,
    max_inflight: u64,
    max_backlog: u64,
    stall: Micros,
}

tokio::task_local! {
    /// The version of the weights that answer the HTTP request of this task.
    pub(crate) static VERSION: Arc<AtomicU64>;
}

/// Who consumes the tokens of a call; decides how many may be queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Consumer {
    /// A client reading a stream: it loses the stream if it falls further behind than `backlog`.
    Client,
    /// The server, collecting a complete response: every token is queued, none is lost.
    Server,
}

/// A handle to the engine's thread. Cheap to clone.
#[derive(Clone)]
pub struct Link {
    messages: mpsc::Sender<Message>,
    shared: Arc<Shared>,
}

impl Link {
    /// The engine's clock: microseconds since the link was created.
    pub fn now(&self) -> Micros {
        self.shared.now()
    }

    /// Whether the engine can take requests.
    pub fn health(&self) -> Health {
        self.shared.health()
    }

    /// Waits until the first backend is made or has failed, and says which.
    pub async fn started(&self) -> Health {
        loop {
            let changed = self.shared.changed.notified();
            match self.health() {
                Health::Starting => changed.await,
                other => return other,
            }
        }
    }

    /// Requests accepted and not yet finished.
    pub fn inflight(&self) -> u64 {
        self.shared.inflight.load(Ordering::Relaxed)
    }

    /// Whether `more` requests would be accepted now.
    pub(crate) fn check_room(&self, more: u64) -> Result<(), Refusal> {
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

    /// The last published state of the engine.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.shared.snapshot.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// What reads adapters for the engine.
    pub(crate) fn adapter_reader(&self) -> Option<AdapterReader> {
        self.shared.adapter_reader.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Submits requests to the engine as one call and assigns consecutive ids to them. Dropping the
    /// call cancels its unfinished requests.
    pub(crate) fn submit(
        &self,
        mut requests: Vec<Request>,
        consumer: Consumer,
    ) -> Result<Call, Refusal> {
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
        let room = match consumer {
            Consumer::Client => tokens.min(shared.max_backlog.max(2 * count)),
            Consumer::Server => tokens,
        };
        let (replies, inbox) = tokio::sync::mpsc::channel(room as usize);
        let version = VERSION.try_with(Arc::clone).unwrap_or_default();
        if self.messages.send(Message::Submit { requests, replies, version }).is_err() {
            shared.inflight.fetch_sub(count, Ordering::Relaxed);
            return Err(Refusal::Down(Health::Dead));
        }
        Ok(Call::new(inbox, first, count, self.messages.clone()))
    }

    /// Ends these requests, whose clients still get the end; those that have finished are ignored.
    #[cfg(feature = "grpc")]
    pub(crate) fn end(&self, ids: Vec<RequestId>) {
        // A closed channel means that the thread has ended, with all requests.
        let _ = self.messages.send(Message::End(ids));
    }

    /// Cancels every live request, with a final reply that gives the reason.
    pub(crate) fn abort_all(&self, why: &str) {
        // A closed channel means that the thread has ended and already notified all calls.
        let _ = self.messages.send(Message::AbortAll(why.into()));
    }

    /// Changes memory or weights; returns when that is done. It is also done if the caller does not wait.
    pub(crate) async fn change(&self, change: Change, running: Running) -> Result<(), ChangeError> {
        let (reply, done) = tokio::sync::oneshot::channel();
        let asked = Box::new(AskedChange { change, running, reply });
        let ended = || ChangeError::Failed(Health::Dead.as_str().into());
        self.messages.send(Message::Change(asked)).map_err(|_| ended())?;
        done.await.unwrap_or_else(|_| Err(ended()))
    }

    /// How often the weights were replaced.
    pub fn weight_version(&self) -> u64 {
        self.shared.weight_version.load(Ordering::Relaxed)
    }

    /// Whether memory of the model was given back.
    pub fn is_asleep(&self) -> bool {
        self.shared.asleep.load(Ordering::Relaxed)
    }

    /// Whether the operator stopped all steps.
    pub fn is_paused(&self) -> bool {
        self.shared.paused.load(Ordering::Relaxed)
    }

    /// Lets the thread end once the engine is idle.
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
        self.changed.notify_waiters();
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
            5 => Health::Asleep,
            6 => Health::NoWeights,
            _ => Health::Dead,
        }
    }
}
