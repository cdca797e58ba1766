//! Runs steps. A runner has one phase's buckets, plans and backend; [`Runners`] has both and the
//! mailbox they share. A step takes the smallest bucket it fits; when it cannot replay, the reason is
//! counted and `--graph-fallback` decides whether it may run at all.

mod base;
mod decode;
mod lazy;
mod pair;
mod prefill;
mod profile;

pub use base::{Progress, Ran, Runner, RunnerConfig};
pub use decode::Decode;
pub use pair::{Coverage, ExpertLoad, Launched, Runners};
pub use prefill::Prefill;
pub use profile::{Profile, ProfiledNode, ProfiledStep};

use crate::compile::CompileError;
use crate::mail::MailError;
use crate::verify::Mismatch;
use crate::{Phase, Reason, ShapeKey};
use device::StepLimits;
use serde::{Deserialize, Serialize};

/// The shape of a step, before a bucket is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// Which runner it is for.
    pub phase: Phase,
    /// Rows.
    pub rows: u32,
    /// Tokens.
    pub tokens: u32,
    /// Some row has an adapter.
    pub adapters: bool,
}

/// What differs between the phases.
pub trait PhaseRule: std::fmt::Debug + Send {
    /// Which phase.
    const PHASE: Phase;
    /// Whether a step is of this phase at all.
    fn admits(shape: &StepShape) -> bool;
    /// Its size in the phase's unit.
    fn size(shape: &StepShape) -> u32;
    /// The key for exactly this step, without a bucket: what an uncovered step runs under.
    fn exact(shape: &StepShape, limits: &StepLimits) -> ShapeKey;
}

/// When graphs are recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Capture {
    /// All of them, before the first step.
    #[default]
    Startup,
    /// Each after a few steps have needed it, within the memory budget.
    Lazy,
}

/// What happens to a step that no graph covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fallback {
    /// It runs op by op; the first of each reason is reported.
    #[default]
    Warn,
    /// It is refused.
    Error,
    /// It runs op by op and is only counted.
    Allow,
}

/// How steps are debugged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Debug {
    /// Nothing.
    #[default]
    Off,
    /// Every step runs the plan of its bucket op by op.
    Eager,
    /// Every step runs both ways from the same state, and the results are compared.
    Verify,
}

/// Why a step did not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// `--graph-fallback error`, and no graph covers the step.
    #[error("no recorded graph covers {rows} rows of {tokens} tokens: {reason}")]
    NotCovered {
        /// Rows of the step.
        rows: u32,
        /// Tokens of the step.
        tokens: u32,
        /// Why not.
        reason: Reason,
    },
    /// No plan could be made.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The mail could not be sent or the ring not be read.
    #[error(transparent)]
    Mail(#[from] MailError),
    /// `--graph-debug verify` found a difference.
    #[error(transparent)]
    Mismatch(#[from] Box<Mismatch>),
    /// The device failed; its state may be lost.
    #[error(transparent)]
    Device(#[from] device::Error),
}
