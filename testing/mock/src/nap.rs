//! The mock's memory: none, but it can be given back.

use server::link::{Change, ChangeError, NewWeights, Rest};

/// What was given back.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Nap {
    weights: bool,
    kv: bool,
    /// The weights were forgotten.
    lost: bool,
    /// How often they were replaced.
    pub(crate) version: u64,
}

impl Nap {
    pub(crate) fn change(&mut self, change: &Change, cannot_wake: bool) -> Result<(), ChangeError> {
        match *change {
            Change::Sleep { parts, keep } => {
                self.lost |= parts.weights && !self.weights && !keep;
                self.weights |= parts.weights;
                self.kv |= parts.kv;
            }
            Change::Wake { .. } if cannot_wake => {
                return Err(ChangeError::Failed("no memory".into()));
            }
            Change::Wake { parts, reload } => {
                self.weights &= !parts.weights;
                self.kv &= !parts.kv;
                self.lost &= !(parts.weights && reload);
            }
            Change::Update { from: NewWeights::Files(ref path) } if path.join("wrong").exists() => {
                return Err(ChangeError::Refused("the tensors do not fit".into()));
            }
            Change::Pause { .. } | Change::Resume => {}
            Change::LoadAdapter { .. } | Change::UnloadAdapter { .. } => {}
            Change::Update { .. } => {
                self.lost = false;
                self.version += 1;
            }
        }
        Ok(())
    }

    pub(crate) fn rest(&self) -> Rest {
        match (self.weights || self.kv, self.lost) {
            (true, _) => Rest::Asleep,
            (false, true) => Rest::NoWeights,
            (false, false) => Rest::Awake,
        }
    }
}
