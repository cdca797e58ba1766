//! The engine's thread: owns the backend, steps it and delivers its outputs.

use super::changes::Changes;
use super::{Backend, ChangeError, Factory, Health, Link, Message, Reply, Shared};
use crate::app::AdapterNames;
use crate::config::Limits;
use crate::kv_events::EventSink;
use crate::metrics::{AdapterCounters, Metrics};
use crate::trace::TraceWriter;
use engine::pages::CacheEvent;
use engine::request::{Event, Finish, Micros, Output, Request, RequestId};
use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

/// How often the state is published while steps run.
const PUBLISH: Duration = Duration::from_millis(100);
/// The most calls of the backend between two publications, so that no step record is overwritten in
/// the ring before it is read.
pub const PUBLISH_CALLS: u32 = 128;
/// The most messages handled between two steps, so that many submissions do not delay running
/// requests.
const MESSAGES_PER_STEP: usize = 4096;

/// Starts the engine's thread. It ends after [`Link::stop`] or when every link is dropped.
pub(crate) fn spawn(
    factory: Factory,
    limits: &Limits,
    sleep_after: Option<Duration>,
    metrics: Arc<Metrics>,
    adapters: AdapterNames,
    trace: Option<TraceWriter>,
    kv_events: Option<EventSink>,
) -> (Link, JoinHandle<()>) {
    let (messages, inbox) = mpsc::channel();
    let shared = Arc::new(Shared {
        origin: Instant::now(),
        next_id: AtomicU64::new(1),
        inflight: AtomicU64::new(0),
        health: AtomicU8::new(Health::Starting as u8),
        step_began: AtomicU64::new(0),
        changed: tokio::sync::Notify::new(),
        closed: AtomicBool::new(false),
        asleep: AtomicBool::new(false),
        paused: AtomicBool::new(false),
        weight_version: AtomicU64::new(0),
        snapshot: Mutex::default(),
        adapter_reader: Mutex::default(),
        metrics,
        max_inflight: limits.inflight,
        max_backlog: limits.backlog,
        stall: limits.stall_ms * 1000,
    });
    let worker = Worker {
        inbox,
        shared: shared.clone(),
        live: HashMap::new(),
        events: Vec::new(),
        adapters,
        trace,
        kv_events,
        last_step: 0,
        stopping: false,
        changes: Changes::new(sleep_after),
    };
    let thread = std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || worker.run(factory))
        .expect("cannot start the engine's thread");
    (Link { messages, shared }, thread)
}

pub(super) struct Worker {
    inbox: Receiver<Message>,
    pub(super) shared: Arc<Shared>,
    pub(super) live: HashMap<RequestId, Live>,
    pub(super) events: Vec<Event>,
    adapters: AdapterNames,
    trace: Option<TraceWriter>,
    kv_events: Option<EventSink>,
    /// The last step record that was counted.
    last_step: u64,
    stopping: bool,
    pub(super) changes: Changes,
}

/// A request that the backend has not finished.
pub(super) struct Live {
    /// `None` once the client has disconnected or fallen too far behind.
    replies: Option<Sender<Reply>>,
    choices_left: u32,
    submitted: Micros,
    /// Per choice, the time of its last token.
    last_token: Vec<Micros>,
    /// The version of the weights that answer it.
    version: Arc<AtomicU64>,
    /// Of its adapter, if it has one.
    counters: Option<AdapterCounters>,
}

/// Why the loop over a backend ended.
pub(super) enum End {
    Stopped,
    Failed(String),
}

impl Worker {
    fn run(mut self, mut factory: Factory) {
        let mut failures = 0u32;
        loop {
            let made = catch_unwind(AssertUnwindSafe(&mut factory));
            let made = made.unwrap_or_else(|panic| Err(panic_text(&*panic)));
            let mut backend = match made {
                Ok(backend) => backend,
                Err(why) => {
                    tracing::error!(why, "the engine failed to start");
                    self.shared.set_health(Health::Dead);
                    return self.refuse_until_stopped(&why);
                }
            };
            self.last_step = 0;
            if let Some(sink) = &mut self.kv_events {
                // Subscribers may know blocks of an earlier engine.
                sink.publish(vec![CacheEvent::Cleared]);
            }
            *self.shared.adapter_reader.lock().unwrap_or_else(|e| e.into_inner()) =
                backend.adapter_reader();
            // Routers ask for the size of the cache as soon as it is ready.
            self.publish(&mut *backend);
            self.shared.set_health(Health::Ready);
            self.changes.begin_again();
            self.shared.asleep.store(false, Ordering::Relaxed);
            self.shared.paused.store(false, Ordering::Relaxed);
            let before = self.shared.metrics.generated_tokens.get();
            let end = self.step_until_end(&mut *backend);
            let dropped = catch_unwind(AssertUnwindSafe(move || drop(backend)));
            self.shared.step_began.store(0, Ordering::Relaxed);
            match end {
                End::Stopped => return self.shared.closed.store(true, Ordering::Relaxed),
                End::Failed(why) => {
                    self.shared.set_health(Health::Restarting);
                    self.shared.metrics.engine_restarts.inc();
                    tracing::error!(why, clean = dropped.is_ok(), "the engine failed");
                    self.fail_all(&format!("the engine failed: {why}"));
                }
            }
            // A backend that generated tokens is replaced at once; after repeated failures the
            // pause grows.
            let worked = self.shared.metrics.generated_tokens.get() > before;
            failures = if worked { 0 } else { failures + 1 };
            let pause = Duration::from_millis(10) * 2u32.pow(failures.min(8));
            if self.refuse_for(pause) {
                return;
            }
        }
    }

    /// Steps the backend until it fails or the thread is stopped.
    fn step_until_end(&mut self, backend: &mut dyn Backend) -> End {
        let mut published = Instant::now() - PUBLISH;
        let mut unpublished = 0u32;
        loop {
            if let Some(end) = self.make_changes(backend) {
                return end;
            }
            if self.is_quiet(backend) {
                if unpublished > 0 {
                    self.publish(backend);
                    (published, unpublished) = (Instant::now(), 0);
                }
                if self.stopping {
                    return End::Stopped;
                }
                match self.inbox.recv_timeout(Duration::from_millis(500)) {
                    Ok(message) => self.take(message),
                    Err(RecvTimeoutError::Timeout) => {
                        self.publish(backend);
                        if let Some(end) = self.doze_if_due(backend) {
                            return end;
                        }
                    }
                    Err(RecvTimeoutError::Disconnected) => return End::Stopped,
                }
            }
            let mut taken = 0;
            while taken < MESSAGES_PER_STEP
                && let Ok(message) = self.inbox.try_recv()
            {
                taken += 1;
                self.take(message);
            }
            if self.is_quiet(backend) {
                continue;
            }
            if let Some(end) = self.rouse(backend) {
                return end;
            }
            // Where it did not wake up, its requests have failed.
            if self.is_quiet(backend) {
                continue;
            }
            let now = self.shared.now();
            self.shared.step_began.store(now.max(1), Ordering::Relaxed);
            let events = std::mem::take(&mut self.events);
            let wait = taken < MESSAGES_PER_STEP;
            let outputs = match catch_unwind(AssertUnwindSafe(|| backend.step(now, events, wait))) {
                Ok(outputs) => outputs,
                Err(panic) => return End::Failed(panic_text(&*panic)),
            };
            self.shared.step_began.store(0, Ordering::Relaxed);
            self.hand_out(backend, outputs);
            if let Some(why) = backend.gone() {
                return End::Failed(why);
            }
            unpublished += 1;
            if unpublished >= PUBLISH_CALLS || published.elapsed() >= PUBLISH {
                self.publish(backend);
                (published, unpublished) = (Instant::now(), 0);
            }
        }
    }

    /// Publishes cache events and delivers outputs.
    pub(super) fn hand_out(&mut self, backend: &mut dyn Backend, outputs: Vec<Output>) {
        if let Some(sink) = &mut self.kv_events {
            sink.publish(backend.take_cache_events());
        }
        let now = self.shared.now();
        for output in outputs {
            self.deliver(output, now);
        }
    }

    pub(super) fn take(&mut self, message: Message) {
        self.changes.seen();
        match message {
            submit @ Message::Submit { .. } if self.changes.holds() => self.changes.hold(submit),
            Message::Submit { requests, replies, version } => {
                if let Some(why) = self.changes.refuses() {
                    self.refuse(Message::Submit { requests, replies, version }, why);
                    return;
                }
                for request in requests {
                    self.accept(request, replies.clone(), version.clone());
                }
            }
            Message::Cancel(ids) => {
                let left = self.changes.give_up(&ids);
                self.shared.inflight.fetch_sub(left, Ordering::Relaxed);
                for id in ids {
                    if let Some(live) = self.live.get_mut(&id) {
                        live.replies = None;
                        self.events.push(Event::Cancel(id));
                    }
                }
            }
            #[cfg(feature = "grpc")]
            Message::End(ids) => {
                let live = ids.into_iter().filter(|id| self.live.contains_key(id));
                self.events.extend(live.map(Event::Cancel));
            }
            Message::AbortAll(why) => self.abort_all(&why),
            Message::Change(asked) => self.begin_change(asked),
            Message::Stop => self.stopping = true,
        }
    }

    /// Cancels every live request, with a final reply that gives the reason.
    pub(super) fn abort_all(&mut self, why: &str) {
        let ids: Vec<_> = self.live.keys().copied().collect();
        for id in ids {
            if let Some(live) = self.live.get_mut(&id) {
                if let Some(replies) = live.replies.take() {
                    let _ = replies.try_send(Reply::Lost { id, why: why.into() });
                }
                self.events.push(Event::Cancel(id));
            }
        }
    }

    fn accept(&mut self, request: Request, replies: Sender<Reply>, version: Arc<AtomicU64>) {
        let choices = request.choices.max(1);
        let label = (request.adapter != 0).then(|| self.adapters.label(request.adapter)).flatten();
        let counters = label.map(|label| self.shared.metrics.adapter(&label));
        if let Some(counters) = &counters {
            counters.requests.inc();
        }
        let live = Live {
            replies: Some(replies),
            choices_left: choices,
            submitted: self.shared.now(),
            last_token: vec![0; choices as usize],
            version,
            counters,
        };
        self.live.insert(request.id, live);
        self.events.push(Event::Submit(Box::new(request)));
    }

    /// Sends one output to its call, without waiting.
    fn deliver(&mut self, output: Output, now: Micros) {
        let id = output.id();
        let Some(live) = self.live.get_mut(&id) else {
            tracing::warn!(
                id = id.0,
                ?output,
                "internal error: output for a request that is not live"
            );
            return;
        };
        let metrics = &self.shared.metrics;
        let weights = self.shared.weight_version.load(Ordering::Relaxed);
        live.version.store(weights, Ordering::Relaxed);
        let mut over = false;
        match &output {
            Output::Rejected { .. } => over = true,
            Output::Prefilled { prompt_tokens, cached_tokens, .. } => {
                metrics.prompt_tokens.inc_by(u64::from(*prompt_tokens));
                if let Some(counters) = &live.counters {
                    counters.prompt_tokens.inc_by(u64::from(*prompt_tokens));
                }
                metrics.cached_tokens.inc_by(u64::from(*cached_tokens));
            }
            Output::Embedded { .. } => {}
            Output::Token { choice, .. } => {
                metrics.generated_tokens.inc();
                if let Some(counters) = &live.counters {
                    counters.tokens.inc();
                }
                if let Some(last) = live.last_token.get_mut(*choice as usize) {
                    let (since, times) = match *last {
                        0 => (live.submitted, &metrics.first_token_seconds),
                        last => (last, &metrics.inter_token_seconds),
                    };
                    times.observe(now.saturating_sub(since) as f64 * 1e-6);
                    *last = now.max(1);
                }
            }
            Output::Finished { finish, .. } => {
                metrics.finished(finish_label(finish));
                live.choices_left = live.choices_left.saturating_sub(1);
                over = live.choices_left == 0;
            }
        }
        if let Some(replies) = &live.replies {
            match replies.try_send(Reply::Output(output)) {
                Ok(()) => {}
                Err(e) => {
                    if matches!(e, TrySendError::Full(_)) {
                        metrics.slow_readers.inc();
                    }
                    live.replies = None;
                    if !over {
                        self.events.push(Event::Cancel(id));
                    }
                }
            }
        }
        if over {
            let seconds = now.saturating_sub(live.submitted) as f64 * 1e-6;
            metrics.request_seconds.observe(seconds);
            self.live.remove(&id);
            self.shared.inflight.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(super) fn publish(&mut self, backend: &mut dyn Backend) {
        let Ok(snapshot) = catch_unwind(AssertUnwindSafe(|| backend.snapshot())) else {
            // The next step will fail as well and end this backend.
            return;
        };
        for record in &snapshot.steps {
            if record.step > self.last_step {
                self.shared.metrics.step(record);
                if let Some(trace) = &mut self.trace {
                    trace.write(record);
                }
                self.last_step = record.step;
            }
        }
        *self.shared.snapshot.lock().unwrap_or_else(|e| e.into_inner()) = Arc::new(snapshot);
    }

    pub(super) fn fail_all(&mut self, why: &str) {
        for message in self.changes.let_go() {
            self.refuse(message, why);
        }
        for (id, live) in self.live.drain() {
            if let Some(replies) = live.replies {
                // If the channel is full, the call finds it closed and reports an error.
                let _ = replies.try_send(Reply::Lost { id, why: why.into() });
            }
            self.shared.inflight.fetch_sub(1, Ordering::Relaxed);
        }
        self.events.clear();
    }

    pub(super) fn refuse(&mut self, message: Message, why: &str) -> bool {
        match message {
            Message::Submit { requests, replies, .. } => {
                for request in requests {
                    let lost = Reply::Lost { id: request.id, why: why.into() };
                    let _ = replies.try_send(lost);
                    self.shared.inflight.fetch_sub(1, Ordering::Relaxed);
                }
                false
            }
            Message::Cancel(_) | Message::AbortAll(_) => false,
            Message::Change(asked) => {
                let _ = asked.reply.send(Err(ChangeError::Failed(why.into())));
                false
            }
            #[cfg(feature = "grpc")]
            Message::End(_) => false,
            Message::Stop => true,
        }
    }

    /// Refuses messages while there is no backend; true if the thread should end.
    fn refuse_for(&mut self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            match self.inbox.recv_timeout(left) {
                Ok(message) => {
                    if self.refuse(message, "the engine is restarting") {
                        return true;
                    }
                }
                Err(RecvTimeoutError::Timeout) => return false,
                Err(RecvTimeoutError::Disconnected) => return true,
            }
        }
    }

    fn refuse_until_stopped(&mut self, why: &str) {
        while let Ok(message) = self.inbox.recv() {
            if self.refuse(message, why) {
                return;
            }
        }
    }
}

fn finish_label(finish: &Finish) -> &'static str {
    match finish {
        Finish::Stop(_) => "stop",
        Finish::Length => "length",
        Finish::Cancelled => "cancelled",
        Finish::Deadline => "deadline",
        Finish::Failed(_) => "failed",
        Finish::Grammar(_) => "grammar",
    }
}

pub(super) fn panic_text(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).into()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "a panic without a message".into()
    }
}
