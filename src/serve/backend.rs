//! The engine as the server's backend.

use super::watched::{Traced, Watched};
use engine::exec::{Executor, Geometry};
use engine::pages::{CacheEvent, Medium};
use engine::request::{Event, Micros, Output};
use engine::store::StoreUse;
use engine::{Engine, EngineConfig};
use graph::runner::ExpertLoad;
use model::SpecUse;
use server::link::{Backend, DraftUse, ExpertUse, GraphInfo, Pages, PrefixUse, Snapshot, TierUse};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reading what experts did waits for the step under way, so it is done this rarely.
const READ_EXPERTS: Duration = Duration::from_secs(1);

/// An engine that records its steps.
pub(crate) struct Serving<X: Executor + Traced> {
    engine: Engine<Watched<X>>,
    seats: u32,
    page_tokens: u32,
    info: Arc<GraphInfo>,
    /// What experts did, and when that was read.
    experts: RefCell<(Option<Instant>, Vec<ExpertUse>)>,
}

impl<X: Executor + Traced> Serving<X> {
    /// Takes a loaded executor.
    pub(crate) fn new(executor: X, config: EngineConfig, info: GraphInfo) -> Self {
        let Geometry { seats, page_size: page_tokens, .. } = executor.geometry();
        let engine = Engine::new(Watched::new(executor), config);
        Self { engine, seats, page_tokens, info: Arc::new(info), experts: RefCell::default() }
    }

    fn experts(&self) -> Vec<ExpertUse> {
        let (read, experts) = &mut *self.experts.borrow_mut();
        if read.is_none_or(|read| read.elapsed() >= READ_EXPERTS) {
            *experts = self.engine.executor().expert_loads().iter().map(expert_use).collect();
            *read = Some(Instant::now());
        }
        experts.clone()
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

    fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        self.engine.take_cache_events()
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
            page_tokens: self.page_tokens.into(),
            prefix: PrefixUse { looked_up: stats.prompt_tokens, found: stats.cached_tokens },
            preemptions: stats.preemptions,
            tiers: self.engine.executor().store_uses().iter().map(tier_use).collect(),
            experts: self.experts(),
            drafts: self.engine.executor().spec_use().map(draft_use),
            steps: self.engine.executor().records(),
            graph: self.info.clone(),
        }
    }
}

fn tier_use(used: &StoreUse) -> TierUse {
    TierUse {
        tier: match used.medium {
            Medium::Device => "device",
            Medium::Host => "host",
            Medium::Disk => "disk",
        },
        pages: used.pages,
        room: used.room,
        saved: used.saved,
        loaded: used.loaded,
        evicted: used.evicted,
        failed: used.failed,
    }
}

fn draft_use(used: &SpecUse) -> DraftUse {
    DraftUse {
        drafted: used.drafted,
        accepted: used.accepted,
        steps: used.steps.iter().map(|(drafts, steps)| (*drafts, *steps)).collect(),
        choice: used.last.to_string(),
    }
}

fn expert_use(load: &ExpertLoad) -> ExpertUse {
    ExpertUse {
        layer: load.layer,
        experts: load.tokens.len() as u32,
        steps: load.steps,
        chosen: load.chosen,
        tokens: load.tokens.iter().sum(),
        busiest: load.tokens.iter().copied().max().unwrap_or(0),
        idle: load.tokens.iter().filter(|tokens| **tokens == 0).count() as u32,
    }
}
