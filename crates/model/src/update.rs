//! Weights that are replaced while the model stays on its device. The memory is the same, so graphs recorded before
//! compute with the new weights.

mod shared;

pub use shared::{SharedTensor, SharedUpdate};

use crate::LoadError;
use crate::executor::GraphExecutor;
use crate::sleep::Origin;
use crate::spec::Drafted;
use crate::stored::Files;
use crate::weights::WeightSpec;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Why weights were not replaced.
#[derive(Debug, thiserror::Error)]
pub enum UpdateError {
    /// Steps are in flight.
    #[error("steps are running: wait for their results first")]
    Busy,
    /// The weights have no memory.
    #[error("the model is asleep: wake up its weights first")]
    Asleep,
    /// There is no record of what the weights are made of.
    #[error("it is not known what this model's weights are made of")]
    NoOrigin,
    /// The files do not fit the model; nothing was changed.
    #[error(transparent)]
    Files(Box<LoadError>),
    /// It failed half way, and the old weights were put back.
    #[error("{0}; the old weights are in force")]
    Undone(#[source] Box<LoadError>),
    /// Some of the model's tensors, where the others are not in files.
    #[error("the weights came from another process: update all of them, or from there")]
    Partial,
    /// Copying failed half way: no step can run before another update.
    #[error("{0}; weights were overwritten. The model has no weights now")]
    Broken(#[source] Box<device::Error>),
    /// It failed half way, and so did putting the old weights back: no step can run before another update.
    #[error("{0}; the old weights could not be put back: {1}. The model has no weights now")]
    Lost(#[source] Box<LoadError>, Box<LoadError>),
}

/// Files that were checked against a model.
#[derive(Debug)]
pub struct Update {
    files: Files,
    /// The weights that change, by name.
    changed: BTreeSet<String>,
    /// Every tensor of the model is in the files.
    whole: bool,
}

impl Update {
    /// Weights of the program that change.
    pub fn weights(&self) -> usize {
        self.changed.len()
    }

    /// Whether it replaces all weights.
    pub fn is_whole(&self) -> bool {
        self.whole
    }
}

impl GraphExecutor {
    /// Opens a checkpoint with some or all of the model's tensors and compares it with the model. Reads no tensor and
    /// changes nothing.
    pub fn check_update(&self, path: &Path) -> Result<Update, UpdateError> {
        let Origin { model, drafted: Drafted { written, .. } } =
            self.holding.origin.as_ref().ok_or(UpdateError::NoOrigin)?;
        let files = Files::open(path).map_err(|error| UpdateError::Files(error.into()))?;
        let bindings = self.runners().bindings();
        model
            .check_update(&files, written, bindings)
            .map_err(|error| UpdateError::Files(error.into()))?;
        let has = |spec: &&WeightSpec| spec.parts.iter().any(|part| files.has(&part.tensor));
        let changed = written.weights.iter().filter(has).map(|spec| spec.name.clone()).collect();
        let mut parts = written.weights.iter().flat_map(|spec| &spec.parts);
        let whole = parts.all(|part| files.has(&part.tensor));
        if self.holding.foreign && !whole {
            return Err(UpdateError::Partial);
        }
        Ok(Update { files, changed, whole })
    }

    /// Replaces weights. What pages hold was computed by the old ones: [`engine::Engine::vacate`] before, and
    /// [`engine::Engine::renew`] after.
    pub fn update(&mut self, update: Update) -> Result<(), UpdateError> {
        if !self.is_at_rest() {
            return Err(UpdateError::Busy);
        }
        if self.asleep().weights {
            return Err(UpdateError::Asleep);
        }
        let Update { files, changed, whole } = update;
        let lost = self.holding.lost;
        // Weights that were forgotten are all written.
        let takes = |spec: &WeightSpec| lost || changed.contains(&spec.name);
        let origin = self.holding.origin.as_mut().ok_or(UpdateError::NoOrigin)?;
        let covered = origin.model.cover(files);
        let Err(problem) = self.fill_some(&takes) else {
            (self.holding.lost, self.holding.foreign) = (false, false);
            if let (true, Some(origin)) = (whole, &mut self.holding.origin) {
                origin.model.keep_latest();
            }
            return Ok(());
        };
        if let Some(origin) = &mut self.holding.origin {
            origin.model.uncover(covered);
        }
        // What another process gave is nowhere else.
        let again = match self.holding.foreign {
            true => Err(LoadError::Tensors { path: PathBuf::new(), problems: Vec::new() }),
            false => self.fill_some(&takes),
        };
        match again {
            Ok(()) => {
                self.holding.lost = false;
                Err(UpdateError::Undone(problem.into()))
            }
            Err(again) => {
                self.holding.lost = true;
                Err(UpdateError::Lost(problem.into(), again.into()))
            }
        }
    }

    fn fill_some(&self, takes: &dyn Fn(&WeightSpec) -> bool) -> Result<(), LoadError> {
        let Some(Origin { model, drafted }) = &self.holding.origin else { return Ok(()) };
        let written = &drafted.written;
        let (runners, nothing) = (self.runners(), |_| {});
        let (device, arena, bindings) = (self.device(), runners.arena(), runners.bindings());
        model.fill_some(written, takes, device, arena, bindings, &nothing)
    }
}
