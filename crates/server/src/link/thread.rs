//! The engine's thread: it owns the backend, steps it, and hands out what it says.

use super::{Backend, Factory, Health, Link, Message, Reply, Shared};
use crate::config::Limits;
use crate::metrics::Metrics;
use crate::trace::TraceWriter;
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

/// How often the state is published while steps are taken.
const PUBLISH: Duration = Duration::from_millis(100);
/// Publish at least this often in calls of the backend, so that no record falls out of its ring unseen.
pub const PUBLISH_CALLS: u32 = 128;
/// Messages taken between two steps: a flood of submissions does not hold up those who run.
const MESSAGES_PER_STEP: usize = 4096;

/// Starts the engine's thread. It ends after [`Link::stop`] or when every link is gone.
pub fn spawn(
    factory: Factory,
    limits: &Limits,
    metrics: Arc<Metrics>,
    trace: Option<TraceWriter>,
) -> (Link, JoinHandle<()>) {
    let (messages, inbox) = mpsc::channel();
    let shared = Arc::new(Shared {
        origin: Instant::now(),
        next_id: AtomicU64::new(1),
        inflight: AtomicU64::new(0),
        health: AtomicU8::new(Health::Starting as u8),
        step_began: AtomicU64::new(0),
        closed: AtomicBool::new(false),
        snapshot: Mutex::default(),
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
        trace,
        last_step: 0,
        stopping: false,
    };
    let thread = std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || worker.run(factory))
        .expect("a thread can be started");
    (Link { messages, shared }, thread)
}

struct Worker {
    inbox: Receiver<Message>,
    shared: Arc<Shared>,
    live: HashMap<RequestId, Live>,
    events: Vec<Event>,
    trace: Option<TraceWriter>,
    /// The last step record that was counted.
    last_step: u64,
    stopping: bool,
}

/// A request the backend has not finished with.
struct Live {
    /// `None` once the reader is gone or too far behind.
    replies: Option<Sender<Reply>>,
    choices_left: u32,
    submitted: Micros,
    /// Per continuation, when its last token came.
    last_token: Vec<Micros>,
}

/// Why a backend's life ended.
enum End {
    Stopped,
    Died(String),
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
                    tracing::error!(why, "there is no engine");
                    self.shared.set_health(Health::Dead);
                    return self.refuse_forever(&why);
                }
            };
            self.last_step = 0;
            self.shared.set_health(Health::Ready);
            let before = self.shared.metrics.generated_tokens.get();
            let end = self.live_on(&mut *backend);
            let dropped = catch_unwind(AssertUnwindSafe(move || drop(backend)));
            self.shared.step_began.store(0, Ordering::Relaxed);
            match end {
                End::Stopped => return self.shared.closed.store(true, Ordering::Relaxed),
                End::Died(why) => {
                    self.shared.set_health(Health::Restarting);
                    self.shared.metrics.engine_restarts.inc();
                    tracing::error!(why, clean = dropped.is_ok(), "the engine failed");
                    self.lose_everyone(&format!("the engine failed: {why}"));
                }
            }
            // A backend that worked is replaced at once; one that did not is given time.
            let worked = self.shared.metrics.generated_tokens.get() > before;
            failures = if worked { 0 } else { failures + 1 };
            let pause = Duration::from_millis(10) * 2u32.pow(failures.min(8));
            if self.wait_out(pause) {
                return;
            }
        }
    }

    /// Steps the backend until it dies or is no longer wanted.
    fn live_on(&mut self, backend: &mut dyn Backend) -> End {
        let mut published = Instant::now() - PUBLISH;
        let mut unpublished = 0u32;
        loop {
            let idle = self.events.is_empty() && backend.is_idle();
            if idle {
                if unpublished > 0 {
                    self.publish(backend);
                    (published, unpublished) = (Instant::now(), 0);
                }
                if self.stopping {
                    return End::Stopped;
                }
                match self.inbox.recv_timeout(Duration::from_millis(500)) {
                    Ok(message) => self.take(message),
                    Err(RecvTimeoutError::Timeout) => self.publish(backend),
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
            if self.events.is_empty() && backend.is_idle() {
                continue;
            }
            let now = self.shared.now();
            self.shared.step_began.store(now.max(1), Ordering::Relaxed);
            let events = std::mem::take(&mut self.events);
            let wait = taken < MESSAGES_PER_STEP;
            let outputs = match catch_unwind(AssertUnwindSafe(|| backend.step(now, events, wait))) {
                Ok(outputs) => outputs,
                Err(panic) => return End::Died(panic_text(&*panic)),
            };
            self.shared.step_began.store(0, Ordering::Relaxed);
            let now = self.shared.now();
            for output in outputs {
                self.hand_out(output, now);
            }
            if let Some(why) = backend.gone() {
                return End::Died(why);
            }
            unpublished += 1;
            if unpublished >= PUBLISH_CALLS || published.elapsed() >= PUBLISH {
                self.publish(backend);
                (published, unpublished) = (Instant::now(), 0);
            }
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Submit { requests, replies } => {
                for request in requests {
                    self.accept(request, replies.clone());
                }
            }
            Message::Cancel(ids) => {
                for id in ids {
                    if let Some(live) = self.live.get_mut(&id) {
                        live.replies = None;
                        self.events.push(Event::Cancel(id));
                    }
                }
            }
            Message::AbortAll(why) => {
                let ids: Vec<_> = self.live.keys().copied().collect();
                for id in ids {
                    if let Some(live) = self.live.get_mut(&id) {
                        if let Some(replies) = live.replies.take() {
                            let _ = replies.try_send(Reply::Lost { id, why: why.clone() });
                        }
                        self.events.push(Event::Cancel(id));
                    }
                }
            }
            Message::Stop => self.stopping = true,
        }
    }

    fn accept(&mut self, request: Request, replies: Sender<Reply>) {
        let choices = request.choices.max(1);
        let live = Live {
            replies: Some(replies),
            choices_left: choices,
            submitted: self.shared.now(),
            last_token: vec![0; choices as usize],
        };
        self.live.insert(request.id, live);
        self.events.push(Event::Submit(Box::new(request)));
    }

    /// Gives one output to its reader, without ever waiting for it.
    fn hand_out(&mut self, output: Output, now: Micros) {
        let id = match &output {
            Output::Rejected { id, .. }
            | Output::Prefilled { id, .. }
            | Output::Embedded { id, .. }
            | Output::Token { id, .. }
            | Output::Finished { id, .. } => *id,
        };
        let Some(live) = self.live.get_mut(&id) else {
            tracing::warn!(id = id.0, ?output, "the engine spoke of a request that is not live");
            return;
        };
        let metrics = &self.shared.metrics;
        let mut over = false;
        match &output {
            Output::Rejected { .. } => over = true,
            Output::Prefilled { prompt_tokens, cached_tokens, .. } => {
                metrics.prompt_tokens.inc_by(u64::from(*prompt_tokens));
                metrics.cached_tokens.inc_by(u64::from(*cached_tokens));
            }
            Output::Embedded { .. } => {}
            Output::Token { choice, .. } => {
                metrics.generated_tokens.inc();
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
                metrics.finished(finish_word(finish));
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

    fn publish(&mut self, backend: &mut dyn Backend) {
        let Ok(snapshot) = catch_unwind(AssertUnwindSafe(|| backend.snapshot())) else {
            // The next step will meet the same trouble and end this backend's life.
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

    fn lose_everyone(&mut self, why: &str) {
        for (id, live) in self.live.drain() {
            if let Some(replies) = live.replies {
                // Full: its reader finds the channel closed and says so.
                let _ = replies.try_send(Reply::Lost { id, why: why.into() });
            }
            self.shared.inflight.fetch_sub(1, Ordering::Relaxed);
        }
        self.events.clear();
    }

    fn refuse(&mut self, message: Message, why: &str) -> bool {
        match message {
            Message::Submit { requests, replies } => {
                for request in requests {
                    let lost = Reply::Lost { id: request.id, why: why.into() };
                    let _ = replies.try_send(lost);
                    self.shared.inflight.fetch_sub(1, Ordering::Relaxed);
                }
                false
            }
            Message::Cancel(_) | Message::AbortAll(_) => false,
            Message::Stop => true,
        }
    }

    /// Answers messages while there is no backend; true when the thread should end.
    fn wait_out(&mut self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            match self.inbox.recv_timeout(left) {
                Ok(message) => {
                    if self.refuse(message, "the engine is being started again") {
                        return true;
                    }
                }
                Err(RecvTimeoutError::Timeout) => return false,
                Err(RecvTimeoutError::Disconnected) => return true,
            }
        }
    }

    fn refuse_forever(&mut self, why: &str) {
        while let Ok(message) = self.inbox.recv() {
            if self.refuse(message, why) {
                return;
            }
        }
    }
}

fn finish_word(finish: &Finish) -> &'static str {
    match finish {
        Finish::Stop(_) => "stop",
        Finish::Length => "length",
        Finish::Cancelled => "cancelled",
        Finish::Deadline => "deadline",
        Finish::Failed(_) => "failed",
        Finish::Grammar(_) => "grammar",
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).into()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "a panic without words".into()
    }
}
