//! The engine: a scheduler and a device, driven by a caller that owns the clock.

use crate::exec::{ExecError, Executor};
use crate::pages::{CacheEvent, CachedPage, PageCounts};
use crate::plant::{Plant, planted};
use crate::request::{Event, Micros, Output, RequestId};
use crate::sched::{EngineConfig, EngineStats, Holding, Reports, Scheduler};
use crate::store::Moved;

/// Many requests on one device.
///
/// Deterministic: the same executor results, events and times give the same
/// outputs. Every accepted continuation ends with exactly one [`Output::Finished`].
pub struct Engine<X: Executor> {
    pub(crate) executor: X,
    pub(crate) sched: Scheduler,
    /// Kept between calls: copies of the store that are done.
    pub(crate) moved: Vec<Moved>,
    /// The same: slots of adapters that were filled.
    pub(crate) filled: Vec<(u32, u64)>,
    /// Why the device will never run a step again.
    gone: Option<String>,
}

impl<X: Executor> Engine<X> {
    /// An engine over a device that is ready.
    pub fn new(mut executor: X, mut config: EngineConfig) -> Self {
        config.depth = config.depth.clamp(1, X::DEPTH.max(1));
        let reports = Reports {
            scores: executor.scores_prompts(),
            hidden: executor.hidden().unwrap_or(0),
            whole: executor.whole_prompts(),
            carries: executor.carries_state(),
            states: executor.state_copies(),
            steps: executor.steps(),
            tokens: executor.tokens_per_row().max(1),
            store: executor.store().is_some(),
            adapters: executor.adapters(),
        };
        let buckets = executor.prefill_buckets();
        let sched =
            Scheduler::new(executor.geometry(), executor.coverage(), reports, buckets, config);
        Self { executor, sched, moved: Vec::new(), filled: Vec::new(), gone: None }
    }

    /// Takes what happened, applies finished steps, launches new ones. Never waits.
    pub fn step(&mut self, now: Micros, events: Vec<Event>) -> Vec<Output> {
        self.advance(now, events, false)
    }

    /// As [`Engine::step`], but when there is no output yet and work is in flight, waits for the device
    /// once, so that a thread with nothing else to do need not spin.
    pub fn step_wait(&mut self, now: Micros, events: Vec<Event>) -> Vec<Output> {
        self.advance(now, events, true)
    }

    fn advance(&mut self, now: Micros, events: Vec<Event>, wait: bool) -> Vec<Output> {
        self.take_results(false);
        for event in events {
            self.sched.event(event);
        }
        self.sched.time(now);
        self.take_filled(false);
        self.make_way();
        self.launch();
        self.fill_slots();
        // At depth 1 a launch returns when it is done: its result is returned before the next launch.
        let ahead = self.sched.depth() > 1;
        if wait && (self.sched.out.is_empty() || !ahead) && self.sched.in_flight() > 0 {
            self.take_results(true);
            if ahead {
                self.make_way();
                self.launch();
            }
        } else if wait && self.sched.out.is_empty() && self.sched.in_flight() == 0 {
            self.take_filled(true);
            if let Some(store) = self.executor.store() {
                store.rest();
            }
        }
        self.sched.check();
        std::mem::take(&mut self.sched.out)
    }

    /// Empties the device's pages: waits for steps in flight, saves cached pages to the store if there is one, and sends
    /// running sequences back to the queue with the tokens they have. Afterwards no page holds anything and none is
    /// cached, so the caller may give the memory of pages away and back before the next step.
    pub fn vacate(&mut self) -> Vec<Output> {
        self.wait_for_steps();
        self.settle_store();
        self.sched.vacate_all();
        self.sched.check();
        std::mem::take(&mut self.sched.out)
    }

    /// Waits for the steps in flight. The device then does nothing before the next step; sequences keep their seats and
    /// pages.
    pub fn settle(&mut self) -> Vec<Output> {
        self.wait_for_steps();
        self.sched.check();
        std::mem::take(&mut self.sched.out)
    }

    fn wait_for_steps(&mut self) {
        while self.sched.in_flight() > 0 {
            self.executor.stop_loop();
            self.take_results(true);
        }
        self.settle_slots();
    }

    /// The device has other weights since [`Engine::vacate`]. `weights` is a number that tells them from all others of
    /// this and of other processes, and is not 0: kept pages of other weights are never found again.
    pub fn renew(&mut self, weights: u64) {
        self.sched.renew(weights);
    }

    /// Takes back a list of outputs that was read, so that the next call need not allocate one.
    pub fn recycle(&mut self, mut outputs: Vec<Output>) {
        if self.sched.out.is_empty() && outputs.capacity() > self.sched.out.capacity() {
            outputs.clear();
            self.sched.out = outputs;
        }
    }

    /// Ends a launch of several steps early when a request could be seated or a sequence is leaving. This
    /// includes a launch from before a restart: all requests wait for its end.
    fn make_way(&mut self) {
        let repeating = self.sched.repeating() || self.sched.stale_in_flight > 0;
        if repeating && self.sched.is_urgent() && !planted(Plant::NeverLeave) {
            self.executor.stop_loop();
        }
    }

    fn take_results(&mut self, mut wait: bool) {
        while self.sched.in_flight() > 0 {
            match self.executor.poll(std::mem::take(&mut wait)) {
                Ok(Some(mut result)) => {
                    if let Err(why) = self.sched.apply(&mut result) {
                        // This result was taken; the steps after it will still be reported.
                        let reported = usize::from(!result.more_follow);
                        let unreported = self.sched.in_flight() - reported;
                        self.sched.restart(&why, unreported);
                    }
                    self.executor.recycle(result);
                }
                Ok(None) => return,
                Err(error) => self.sched.restart(&error.to_string(), 0),
            }
        }
    }

    /// Fails all requests with the reason if the device is gone.
    fn fail_if_gone(&mut self) {
        if let Some(why) = &self.gone {
            self.sched.fail_all(why);
        }
    }

    fn launch(&mut self) {
        if self.gone.is_some() && !planted(Plant::LaunchWhenGone) {
            return self.fail_if_gone();
        }
        // Steps from before a restart may still write pages that are now free.
        if self.sched.stale_in_flight > 0 {
            return;
        }
        self.tend_store();
        // After a launch of several steps the next step's position is known only at its last step.
        while self.sched.in_flight() < self.sched.depth() && !self.sched.repeating() {
            if !self.sched.stalled && !self.sched.form() {
                return;
            }
            match self.executor.launch(&self.sched.step) {
                Ok(()) => self.sched.launched(),
                Err(ExecError::Gone(why)) => {
                    self.sched.restart(&why, 0);
                    self.gone = Some(why);
                    return self.fail_if_gone();
                }
                Err(ExecError::NotLaunched(why)) => {
                    if !self.sched.not_launched() {
                        let unreported = self.sched.in_flight();
                        self.sched.restart(&why, unreported);
                    }
                    return;
                }
                Err(ExecError::NotCovered(why)) => self.sched.refuse(&why),
                Err(ExecError::StateLost(why)) => {
                    self.sched.restart(&why, 0);
                    return;
                }
            }
        }
    }

    /// What was cached and evicted since the last call, in order; empty unless
    /// [`EngineConfig::cache_events`] is set.
    pub fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        let mut events = self.sched.take_cache_events();
        if let Some(store) = self.executor.store() {
            let told = store.take_events();
            if self.sched.tells() {
                events.extend(told);
            }
        }
        events
    }

    /// Why the device will never run a step again, if so: then every request fails.
    pub fn gone(&self) -> Option<&str> {
        self.gone.as_deref()
    }

    /// Whether no request is live, no step is in flight and no page is held.
    pub fn is_idle(&self) -> bool {
        self.sched.is_idle()
    }

    /// Whether a request that has not ended uses this adapter.
    pub fn needs_adapter(&self, adapter: u64) -> bool {
        self.sched.needs_adapter(adapter)
    }

    /// Whether a request was accepted and has not ended.
    pub fn holds(&self, id: RequestId) -> bool {
        self.sched.holds(id)
    }

    /// Counters and current state.
    pub fn stats(&self) -> EngineStats {
        self.sched.stats()
    }

    /// Pages by state.
    pub fn pages(&self) -> PageCounts {
        self.sched.stats().pages
    }

    /// The device.
    pub fn executor(&self) -> &X {
        &self.executor
    }

    /// The device. Do not launch or poll here: the engine would lose track of steps in flight.
    pub fn executor_mut(&mut self) -> &mut X {
        &mut self.executor
    }

    /// Recounts pages, holders and seats from scratch; an error names what does not add up. For tests: it
    /// costs far more than a step.
    pub fn audit(&self) -> Result<(), String> {
        self.sched.audit()
    }

    /// What every living sequence holds. For tests.
    pub fn holdings(&self) -> Vec<Holding> {
        self.sched.holdings()
    }

    /// Every cached page. For tests.
    pub fn cached_pages(&self) -> Vec<CachedPage> {
        self.sched.cached()
    }
}
