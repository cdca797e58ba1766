//! A model that sleeps: its memory goes back to the system and comes back at the same addresses. Graphs hold addresses,
//! so they are not recorded again.

use crate::LoadError;
use crate::executor::GraphExecutor;
use crate::open::OpenModel;
use crate::spec::Drafted;
use device::Region;

/// Parts of a model's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Weights and tables.
    pub weights: bool,
    /// KV pages, and the values within a step.
    pub kv: bool,
}

impl Parts {
    /// Everything that can be given back.
    pub const ALL: Parts = Parts { weights: true, kv: true };
    /// Nothing.
    pub const NONE: Parts = Parts { weights: false, kv: false };
}

/// Why a model did not fall asleep or wake up.
#[derive(Debug, thiserror::Error)]
pub enum SleepError {
    /// Steps are in flight.
    #[error("steps are running: wait for their results first")]
    Busy,
    /// The device refused.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// The weights could not be read again.
    #[error("the weights cannot be read again: {0}")]
    Reload(#[source] LoadError),
    /// There is nothing to read them from.
    #[error("the weights were forgotten, and nothing is known to read them from")]
    NoOrigin,
}

/// Where the weights on a device come from, so that they can be read again.
#[derive(Debug)]
pub(crate) struct Origin {
    pub(crate) model: OpenModel,
    pub(crate) drafted: Drafted,
}

/// What is known about a model's weights.
#[derive(Debug, Default)]
pub(crate) struct Holding {
    pub(crate) origin: Option<Origin>,
    /// Their memory was given back without keeping them: until they are read again no step may run.
    pub(crate) lost: bool,
    /// Some came from the memory of another process: they cannot be read again.
    pub(crate) foreign: bool,
}

impl GraphExecutor {
    /// The same, knowing where its weights come from.
    pub(crate) fn with_origin(mut self, origin: Origin) -> GraphExecutor {
        self.holding.origin = Some(origin);
        self
    }

    /// Gives memory back, except what was given back already. With `keep` the weights are kept in host memory, else they
    /// are forgotten. What pages hold is forgotten in any case: [`engine::Engine::vacate`] before.
    pub fn sleep(&mut self, parts: Parts, keep: bool) -> Result<(), SleepError> {
        if !self.is_at_rest() {
            return Err(SleepError::Busy);
        }
        let (device, arena) = (self.device().clone(), self.runners().arena().clone());
        // The weights first: keeping them may fail for want of host memory, and then nothing was changed.
        if parts.weights && !arena.is_released(Region::Weights) {
            device.release(&arena, Region::Weights, keep)?;
            self.holding.lost |= !keep;
        }
        if parts.kv {
            device.release(&arena, Region::Kv, false)?;
            device.release(&arena, Region::Workspace, false)?;
        }
        Ok(())
    }

    /// Brings memory back. Weights that were forgotten are read again from the model's files, unless `reload` is false:
    /// then no step can run before they are updated. An error leaves asleep what could not be brought back.
    pub fn wake(&mut self, parts: Parts, reload: bool) -> Result<(), SleepError> {
        let (device, arena) = (self.device().clone(), self.runners().arena().clone());
        if parts.kv {
            device.restore(&arena, Region::Workspace)?;
            device.restore(&arena, Region::Kv)?;
        }
        if parts.weights {
            device.restore(&arena, Region::Weights)?;
            if self.holding.lost && reload {
                self.reload()?;
            }
        }
        Ok(())
    }

    fn reload(&mut self) -> Result<(), SleepError> {
        if self.holding.foreign {
            return Err(SleepError::NoOrigin);
        }
        let Origin { model, drafted } = self.holding.origin.as_ref().ok_or(SleepError::NoOrigin)?;
        let (runners, nothing) = (self.runners(), |_| {});
        let (device, arena, bindings) = (self.device(), runners.arena(), runners.bindings());
        drafted.fill(model, device, arena, bindings, &nothing).map_err(SleepError::Reload)?;
        self.holding.lost = false;
        Ok(())
    }

    /// What has no memory now.
    pub fn asleep(&self) -> Parts {
        let arena = self.runners().arena();
        let kv = [Region::Kv, Region::Workspace].iter().any(|region| arena.is_released(*region));
        Parts { weights: arena.is_released(Region::Weights), kv }
    }

    /// Whether the weights were forgotten and not read again.
    pub fn lacks_weights(&self) -> bool {
        self.holding.lost
    }

    /// Why no step can run now, if so.
    pub(crate) fn cannot_run(&self) -> Option<&'static str> {
        match (self.asleep(), self.lacks_weights()) {
            (Parts::NONE, false) => None,
            (Parts::NONE, true) => Some("the model's weights were forgotten and not updated"),
            _ => Some("the model is asleep"),
        }
    }
}
