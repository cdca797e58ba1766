//! Sleeping, waking and pausing on the engine's thread: when a change may be made, what happens to requests meanwhile, and an
//! engine that falls asleep by itself.

use super::thread::{End, Worker, panic_text};
use super::{
    AskedChange, Backend, Change, ChangeError, Changed, Health, Message, Parts, Rest, Running,
};
use engine::request::RequestId;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Whether steps may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sleep {
    Awake,
    /// It fell asleep by itself: the next request wakes it.
    Dozing,
    /// It was put to sleep: it wakes when it is told to.
    Asleep,
}

/// The changes that were asked for, and what the last one led to.
pub(super) struct Changes {
    waiting: VecDeque<Box<AskedChange>>,
    sleep: Sleep,
    /// No step runs; requests are accepted and wait.
    paused: bool,
    /// It falls asleep when nothing was asked for so long.
    sleep_after: Option<Duration>,
    last_seen: Instant,
    /// Requests that came while the weights are about to be replaced.
    held: Vec<Message>,
}

impl Changes {
    pub(super) fn new(sleep_after: Option<Duration>) -> Changes {
        let (waiting, last_seen) = (VecDeque::new(), Instant::now());
        let (sleep, held) = (Sleep::Awake, Vec::new());
        Changes { waiting, sleep, paused: false, sleep_after, last_seen, held }
    }

    /// A new backend is awake.
    pub(super) fn begin_again(&mut self) {
        (self.sleep, self.paused) = (Sleep::Awake, false);
    }

    /// Something was asked for.
    pub(super) fn seen(&mut self) {
        self.last_seen = Instant::now();
    }

    /// Whether requests wait until the weights were replaced, or steps stopped.
    pub(super) fn holds(&self) -> bool {
        let stops =
            |change: &Change| matches!(change, Change::Update { .. } | Change::Pause { .. });
        self.refuses().is_none() && self.waiting.iter().any(|asked| stops(&asked.change))
    }

    /// Whether steps stopped. Requests that are dropped for a change need some to end.
    fn stands_still(&self) -> bool {
        self.paused && !self.waiting.iter().any(|asked| asked.running == Running::Drop)
    }

    pub(super) fn hold(&mut self, submit: Message) {
        self.held.push(submit);
    }

    /// The requests that were held.
    pub(super) fn let_go(&mut self) -> Vec<Message> {
        std::mem::take(&mut self.held)
    }

    /// Forgets held requests whose clients have left; returns how many.
    pub(super) fn give_up(&mut self, ids: &[RequestId]) -> u64 {
        let mut left = 0;
        for message in &mut self.held {
            if let Message::Submit { requests, .. } = message {
                let before = requests.len();
                requests.retain(|request| !ids.contains(&request.id));
                left += (before - requests.len()) as u64;
            }
        }
        left
    }

    /// Why no request is taken, if so.
    pub(super) fn refuses(&self) -> Option<&'static str> {
        let goes = |change: &Change| matches!(change, Change::Sleep { .. });
        let going = self.waiting.iter().any(|asked| goes(&asked.change));
        let refuses = self.sleep == Sleep::Asleep || going;
        refuses.then_some(Health::Asleep.as_str())
    }
}

fn is_about_memory(change: &Change) -> bool {
    match change {
        Change::Sleep { .. } | Change::Wake { .. } | Change::Update { .. } => true,
        Change::Pause { .. } | Change::Resume => false,
        Change::LoadAdapter { .. } | Change::UnloadAdapter { .. } => false,
    }
}

impl Worker {
    /// Whether there is nothing to do until the next message.
    pub(super) fn is_quiet(&self, backend: &dyn Backend) -> bool {
        self.changes.sleep == Sleep::Asleep
            || self.changes.stands_still()
            || self.has_nothing(backend)
    }

    fn has_nothing(&self, backend: &dyn Backend) -> bool {
        self.events.is_empty() && backend.is_idle()
    }

    /// Takes a change that is to be made as soon as it may be.
    pub(super) fn begin_change(&mut self, asked: Box<AskedChange>) {
        if let Change::Sleep { .. } = asked.change {
            // New requests are refused from now on.
            self.shared.set_health(Health::Asleep);
        }
        if asked.running == Running::Drop {
            self.abort_all("dropped for a change of the model");
            for message in self.changes.let_go() {
                self.refuse(message, "dropped for a change of the model");
            }
        }
        self.changes.waiting.push_back(asked);
    }

    /// Makes the changes that may be made now.
    pub(super) fn make_changes(&mut self, backend: &mut dyn Backend) -> Option<End> {
        while let Some(first) = self.changes.waiting.front() {
            let at_once = first.running == Running::Pause;
            if !at_once && !self.is_quiet(backend) {
                return None;
            }
            let finish =
                first.running == Running::Finish && !matches!(first.change, Change::Resume);
            let never = finish && self.changes.paused && !self.has_nothing(backend);
            let AskedChange { change, reply, .. } = *self.changes.waiting.pop_front()?;
            if never {
                let why = "generation is paused, so running requests do not finish: resume it first, or let them be \
                           kept or aborted";
                if self.changes.refuses().is_none() {
                    self.shared.set_health(Health::Ready);
                }
                let _ = reply.send(Err(ChangeError::Refused(why.into())));
                continue;
            }
            let result = match self.make(backend, &change) {
                Ok(result) => result,
                Err(end) => {
                    let _ = reply.send(Err(ChangeError::Failed("the engine failed".into())));
                    return Some(end);
                }
            };
            match (&change, &result) {
                (Change::Pause { .. }, Ok(())) => self.changes.paused = true,
                (Change::Resume, Ok(())) => self.changes.paused = false,
                _ => {}
            }
            self.shared.paused.store(self.changes.paused, Ordering::Relaxed);
            self.changes.sleep = match backend.rest() {
                // What it did by itself is not changed by adapters that come and go, or by pauses.
                _ if self.changes.sleep == Sleep::Dozing && !is_about_memory(&change) => {
                    Sleep::Dozing
                }
                Rest::Awake => Sleep::Awake,
                Rest::Asleep | Rest::NoWeights => Sleep::Asleep,
            };
            if self.changes.refuses().is_none() {
                self.shared.set_health(Health::Ready);
            } else if backend.rest() == Rest::NoWeights {
                self.shared.set_health(Health::NoWeights);
            }
            self.publish(backend);
            // Who asked may have left.
            let _ = reply.send(result);
        }
        for message in self.changes.let_go() {
            self.take(message);
        }
        None
    }

    fn make(
        &mut self,
        backend: &mut dyn Backend,
        change: &Change,
    ) -> Result<Result<(), ChangeError>, End> {
        let began = Instant::now();
        let made = catch_unwind(AssertUnwindSafe(|| backend.change(change)));
        let Changed { outputs, result } = made.map_err(|panic| End::Failed(panic_text(&*panic)))?;
        self.hand_out(backend, outputs);
        let ms = began.elapsed().as_secs_f64() * 1e3;
        match &result {
            Ok(()) => tracing::info!(?change, ms, "the model was changed"),
            Err(why) => tracing::warn!(?change, ms, %why, "the model was not changed"),
        }
        self.shared.weight_version.store(backend.weight_version(), Ordering::Relaxed);
        self.shared.asleep.store(backend.rest() != Rest::Awake, Ordering::Relaxed);
        Ok(result)
    }

    /// Falls asleep if nothing was asked for long enough.
    pub(super) fn doze_if_due(&mut self, backend: &mut dyn Backend) -> Option<End> {
        let after = self.changes.sleep_after?;
        let quiet = self.live.is_empty() && self.changes.waiting.is_empty();
        if self.changes.sleep != Sleep::Awake || !quiet || self.changes.last_seen.elapsed() < after
        {
            return None;
        }
        match self.make(backend, &Change::Sleep { parts: Parts::ALL, keep: true }) {
            Ok(Ok(())) => self.changes.sleep = Sleep::Dozing,
            // It would fail again: said once, by `make`.
            Ok(Err(_)) => {
                self.changes.sleep_after = None;
                return self.wake(backend);
            }
            Err(end) => return Some(end),
        }
        None
    }

    /// Wakes an engine that fell asleep by itself; if that fails, so do the requests.
    pub(super) fn rouse(&mut self, backend: &mut dyn Backend) -> Option<End> {
        match self.changes.sleep {
            Sleep::Dozing => self.wake(backend),
            Sleep::Awake | Sleep::Asleep => None,
        }
    }

    fn wake(&mut self, backend: &mut dyn Backend) -> Option<End> {
        match self.make(backend, &Change::Wake { parts: Parts::ALL, reload: true }) {
            Ok(Ok(())) => self.changes.sleep = Sleep::Awake,
            Ok(Err(why)) => {
                self.changes.sleep = Sleep::Dozing;
                self.fail_all(&format!("the model does not wake up: {why}"));
            }
            Err(end) => return Some(end),
        }
        None
    }
}
