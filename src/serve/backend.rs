//! The engine as the server's backend.

use super::watched::{Traced, Watched};
use device::DType;
use device::shared::SharedName;
use engine::exec::{Executor, Geometry};
use engine::pages::{CacheEvent, Medium};
use engine::request::{Event, Micros, Output};
use engine::store::StoreUse;
use engine::{Engine, EngineConfig};
use graph::runner::ExpertLoad;
use model::{Adapter, SharedTensor, SleepError, SpecUse, UpdateError};
use server::link::{
    AdapterReader, Backend, Change, ChangeError, Changed, DraftUse, ExpertUse, GraphInfo,
    NewWeights, Pages, PrefixUse, ReadAdapter, Rest, SharedPlace, Snapshot, TierUse,
};
use std::cell::RefCell;
use std::hash::{BuildHasher, Hasher};
use std::path::Path;
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
    /// How often the weights were replaced.
    weight_version: u64,
    /// What experts did, and when that was read.
    experts: RefCell<(Option<Instant>, Vec<ExpertUse>)>,
}

impl<X: Executor + Traced> Serving<X> {
    /// Takes a loaded executor.
    pub(crate) fn new(executor: X, config: EngineConfig, info: GraphInfo) -> Self {
        let Geometry { seats, page_size: page_tokens, .. } = executor.geometry();
        let engine = Engine::new(Watched::new(executor), config);
        let (info, experts) = (Arc::new(info), RefCell::default());
        Self { engine, seats, page_tokens, info, weight_version: 0, experts }
    }

    /// Replaces weights, after comparing what is new with the model.
    fn update<U>(
        &mut self,
        check: impl FnOnce(&X) -> Result<U, UpdateError>,
        replace: impl FnOnce(&mut X, U) -> Result<(), UpdateError>,
    ) -> (Vec<Output>, Result<(), ChangeError>) {
        let update = match check(self.engine.executor_mut().inner_mut()) {
            Ok(update) => update,
            Err(error) => return (Vec::new(), Err(ChangeError::Refused(error.to_string()))),
        };
        let outputs = self.engine.vacate();
        let result = replace(self.engine.executor_mut().inner_mut(), update);
        if result.is_ok() {
            self.weight_version += 1;
            // Random, so that no other process gives the same number to other weights.
            let number = std::hash::RandomState::new().build_hasher().finish() | 1;
            self.engine.renew(number);
        }
        (outputs, result.map_err(|error| ChangeError::Failed(error.to_string())))
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

    fn change(&mut self, change: &Change) -> Changed {
        let failed = |error: SleepError| ChangeError::Failed(error.to_string());
        let executor = Engine::executor_mut;
        let (outputs, result) = match change {
            Change::Sleep { parts, keep } => {
                let outputs = self.engine.vacate();
                let slept = executor(&mut self.engine).inner_mut().sleep(*parts, *keep);
                (outputs, slept.map_err(failed))
            }
            Change::Wake { parts, reload } => {
                let woken = executor(&mut self.engine).inner_mut().wake(*parts, *reload);
                (Vec::new(), woken.map_err(failed))
            }
            Change::Pause { keep: true } => (self.engine.settle(), Ok(())),
            Change::Pause { keep: false } => (self.engine.vacate(), Ok(())),
            Change::Resume => (Vec::new(), Ok(())),
            Change::Update { from: NewWeights::Files(path) } => self.update(
                |executor| executor.check_update(path),
                |executor, update| executor.update(update),
            ),
            Change::Update { from: NewWeights::Shared(tensors) } => match shared(tensors) {
                Ok(tensors) => self.update(
                    |executor| executor.check_shared(&tensors),
                    |executor, update| executor.update_shared(update),
                ),
                Err(why) => (Vec::new(), Err(ChangeError::Refused(why))),
            },
            Change::LoadAdapter { number, adapter } => {
                let result = match adapter.0.clone().downcast::<Adapter>() {
                    Ok(adapter) => {
                        executor(&mut self.engine).inner_mut().load_adapter(*number, adapter);
                        Ok(())
                    }
                    Err(_) => Err(ChangeError::Unsupported),
                };
                (Vec::new(), result)
            }
            Change::UnloadAdapter { number } if self.engine.needs_adapter(*number) => {
                let why = "requests that use the adapter are running".to_owned();
                (Vec::new(), Err(ChangeError::Refused(why)))
            }
            Change::UnloadAdapter { number } => {
                executor(&mut self.engine).inner_mut().unload_adapter(*number);
                (Vec::new(), Ok(()))
            }
        };
        Changed { outputs, result }
    }

    fn adapter_reader(&self) -> Option<AdapterReader> {
        let reader = self.engine.executor().adapter_reader().ok()?;
        Some(Arc::new(move |folder: &Path| match reader.read(folder) {
            Ok(adapter) => Ok(ReadAdapter(Arc::new(adapter))),
            Err(error) => Err(ChangeError::Refused(error.to_string())),
        }))
    }

    fn weight_version(&self) -> u64 {
        self.weight_version
    }

    fn rest(&self) -> Rest {
        self.engine.executor().rest()
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
            prefix: PrefixUse {
                looked_up: stats.prompt_tokens,
                found: stats.cached_tokens,
                states_saved: stats.states_saved,
                states_restored: stats.states_restored,
            },
            preemptions: stats.preemptions,
            tiers: self.engine.executor().store_uses().iter().map(tier_use).collect(),
            experts: self.experts(),
            drafts: self.engine.executor().spec_use().map(draft_use),
            steps: self.engine.executor().records(),
            graph: self.info.clone(),
        }
    }
}

/// Tensors as the model finds them.
fn shared(tensors: &[server::link::SharedTensor]) -> Result<Vec<SharedTensor>, String> {
    let tensor = |tensor: &server::link::SharedTensor| {
        let dtype = match tensor.dtype.as_str() {
            "F32" => DType::F32,
            "F16" => DType::F16,
            "BF16" => DType::BF16,
            other => return Err(format!("{}: type {other:?}", tensor.name)),
        };
        let memory = match &tensor.memory {
            SharedPlace::CudaIpc(handle) => SharedName::CudaIpc(*handle),
            SharedPlace::File(path) => SharedName::File(path.clone()),
        };
        let shape = tensor.shape.iter().map(|size| *size as usize).collect();
        let (name, offset) = (tensor.name.clone(), tensor.offset);
        Ok(SharedTensor { name, dtype, shape, memory, offset })
    };
    tensors.iter().map(tensor).collect()
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
