//! The engine's state as the outside may see it: for `/metrics`, the page and traces.

use engine::request::Micros;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The state at one moment.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Snapshot {
    /// Requests waiting to be admitted.
    pub queue: u64,
    /// Sequences that have a seat.
    pub running: u64,
    /// Seats that exist.
    pub seats: u64,
    /// KV pages by state.
    pub pages: Pages,
    /// Prompt tokens looked up and found in the prefix tree, since the start.
    pub prefix: PrefixUse,
    /// Sequences that lost their pages to others, since the start.
    pub preemptions: u64,
    /// The last few hundred steps, oldest first, numbered without gaps.
    #[serde(skip)]
    pub steps: Vec<StepRecord>,
    /// What does not change after the start.
    #[serde(skip)]
    pub graph: Arc<GraphInfo>,
}

/// KV pages by state; the three add up to all pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// Held by live sequences.
    pub used: u64,
    /// Held by the prefix tree alone; given back on demand.
    pub cached: u64,
    /// Nobody's.
    pub free: u64,
}

/// How much the prefix tree saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixUse {
    /// Prompt tokens looked up.
    pub looked_up: u64,
    /// Of these, found.
    pub found: u64,
}

/// The phase a step belonged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// One token per row.
    Decode,
    /// Prompt chunks, with decode rows beside them or not.
    Prefill,
}

impl Phase {
    /// The word used in flags, metrics and records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
        }
    }
}

/// How a step ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Run {
    /// A recorded graph was replayed.
    Replayed,
    /// The plan ran op by op, for this reason.
    Eager(String),
}

/// One step, as traces keep it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Counts from 1.
    pub step: u64,
    /// When it was launched, or began in a launch of several, on the server's clock.
    pub at: Micros,
    /// Which phase.
    pub phase: Phase,
    /// Rows of the bucket it ran in.
    pub bucket_rows: u32,
    /// Tokens of the bucket it ran in (equal to the rows when decoding).
    pub bucket_tokens: u32,
    /// Rows that were somebody's.
    pub live_rows: u32,
    /// Rows that were nobody's.
    pub padded_rows: u32,
    /// Replayed, or eager and why.
    pub run: Run,
    /// Host time of the step, in microseconds; steps of one launch share what it took.
    pub host_us: u32,
    /// Device time of the step, in microseconds.
    pub device_us: u32,
}

/// What is fixed once the engine is up.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GraphInfo {
    /// Model, device and such, one line each.
    pub about: Vec<ConfigRow>,
    /// The resolved graph configuration, with the reason for every value.
    pub config: Vec<ConfigRow>,
    /// Plans as pictures, by bucket.
    pub plans: Vec<PlanPicture>,
}

/// One resolved setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigRow {
    /// The setting.
    pub key: String,
    /// What it came out as.
    pub value: String,
    /// Why.
    pub reason: String,
}

/// The picture of one bucket's Plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanPicture {
    /// The bucket's name, such as `decode/8`.
    pub bucket: String,
    /// An SVG document.
    pub svg: String,
}
