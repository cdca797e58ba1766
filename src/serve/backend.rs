//! The engine as the server's backend.

use super::watched::{Traced, Watched};
use engine::exec::Executor;
use engine::request::{Event, Micros, Output};
use engine::{Engine, EngineConfig};
use server::link::{Backend, GraphInfo, Pages, PrefixUse, Snapshot};
use std::sync::Arc;

/// An engine that records its steps.
pub(crate) struct Serving<X: Executor + Traced> {
    engine: Engine<Watched<X>>,
    seats: u32,
    info: Arc<GraphInfo>,
}

impl<X: Executor + Traced> Serving<X> {
    /// Takes a loaded executor.
    pub(crate) fn new(executor: X, config: EngineConfig, info: GraphInfo) -> Self {
        let seats = executor.geometry().seats;
        let engine = Engine::new(Watched::new(executor), config);
        Self { engine, seats, info: Arc::new(info) }
    }
}

impl<X: Executor + Traced> Backend for Serving<X> {
    fn step(&mut self, now: Micros, events: Vec<Event>, wait: bool) -> Vec<Output> {
        self.engine.executor_mut().set_clock(now);
        match wait {
            true => self.engine.step_wait(now, events),
            false => self.engine.step(now, events),
        }
    }

    fn is_idle(&self) -> bool {
        self.engine.is_idle()
    }

    fn gone(&self) -> Option<String> {
        self.engine.gone().map(str::to_owned)
    }

    fn snapshot(&self) -> Snapshot {
        let stats = self.engine.stats();
        let pages = stats.pages;
        Snapshot {
            queue: stats.waiting.into(),
            running: stats.running.into(),
            seats: self.seats.into(),
            pages: Pages {
                used: (pages.held + pages.published - pages.unread).into(),
                cached: pages.unread.into(),
                free: pages.free.into(),
            },
            prefix: PrefixUse { looked_up: stats.prompt_tokens, found: stats.cached_tokens },
            preemptions: stats.preemptions,
            steps: self.engine.executor().records(),
            graph: self.info.clone(),
        }
    }
}
