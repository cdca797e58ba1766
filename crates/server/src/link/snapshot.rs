//! The published state of the engine, for `/metrics`, the page and traces.

use engine::request::Micros;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::sync::Arc;

/// The state at one moment.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Snapshot {
    /// Requests waiting to be admitted.
    pub queue: u64,
    /// Sequences that have a seat.
    pub running: u64,
    /// Seats in total.
    pub seats: u64,
    /// KV pages by state.
    pub pages: Pages,
    /// Tokens of a page.
    pub page_tokens: u64,
    /// Prompt tokens looked up and found in the prefix tree, since the start.
    pub prefix: PrefixUse,
    /// Sequences preempted (their pages went to others), since the start.
    pub preemptions: u64,
    /// What the memory for evicted pages did, since the start; empty without any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tiers: Vec<TierUse>,
    /// What the experts of each layer did, since the start; empty for a model without experts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<ExpertUse>,
    /// What drafts did, since the start; `None` if steps have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafts: Option<DraftUse>,
    /// The last few hundred steps, oldest first, numbered without gaps.
    #[serde(skip)]
    pub steps: Vec<StepRecord>,
    /// Data that does not change after the start.
    #[serde(skip)]
    pub graph: Arc<GraphInfo>,
}

/// KV pages by state; the three add up to all pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// Held by live sequences.
    pub used: u64,
    /// Held only by the prefix tree; evicted on demand.
    pub cached: u64,
    /// Free.
    pub free: u64,
}

impl Pages {
    /// All of them.
    pub(crate) fn total(&self) -> u64 {
        self.used + self.cached + self.free
    }
}

/// Lookups in the prefix tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixUse {
    /// Prompt tokens looked up.
    pub looked_up: u64,
    /// Prompt tokens found.
    pub found: u64,
    /// Copies of recurrent state that were saved behind prefixes.
    #[serde(default)]
    pub states_saved: u64,
    /// Sequences that began with such a copy.
    #[serde(default)]
    pub states_restored: u64,
}

/// What a memory for evicted pages did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TierUse {
    /// `host` or `disk`.
    pub tier: &'static str,
    /// Pages it holds.
    pub pages: u64,
    /// Pages it has room for.
    pub room: u64,
    /// Pages saved.
    pub saved: u64,
    /// Pages loaded.
    pub loaded: u64,
    /// Pages given up for others.
    pub evicted: u64,
    /// Pages that could not be saved or were found damaged.
    pub failed: u64,
}

/// What drafts did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DraftUse {
    /// Drafts that were verified.
    pub drafted: u64,
    /// Those that were accepted.
    pub accepted: u64,
    /// Decode steps by drafts of each row.
    pub steps: Vec<(u32, u64)>,
    /// How many drafts the last decode step had, and why.
    pub choice: String,
}

/// What the experts of a layer did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertUse {
    /// The layer.
    pub layer: u32,
    /// How many experts it has.
    pub experts: u32,
    /// Steps that it ran in.
    pub steps: u64,
    /// Experts that had tokens, added up over the steps.
    pub chosen: u64,
    /// Tokens of all experts.
    pub tokens: u64,
    /// Tokens of the expert that had most.
    pub busiest: u64,
    /// Experts that have had none.
    pub idle: u32,
}

/// The phase of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// One token per row.
    Decode,
    /// Prompt chunks, with or without decode rows.
    Prefill,
}

impl Phase {
    /// The name used in flags, metrics and records.
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
    /// The ops of the plan were launched one by one, for this reason.
    Eager(String),
}

/// One step, as recorded in traces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRecord {
    /// The number of the step, from 1.
    pub step: u64,
    /// When it was launched, on the server's clock; for a launch of several steps, when this one
    /// began.
    pub at: Micros,
    /// The phase.
    pub phase: Phase,
    /// Rows of the bucket it ran in.
    pub bucket_rows: u32,
    /// Tokens of the bucket it ran in (equal to the rows when decoding).
    pub bucket_tokens: u32,
    /// Rows of live sequences.
    pub live_rows: u32,
    /// Tokens of live sequences; 0 in traces of before it was recorded.
    #[serde(default)]
    pub live_tokens: u32,
    /// Why it feeds as many prompt tokens as it does: `alone`, `full`, `traffic`, `backlog` or `gap`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Cow<'static, str>>,
    /// Drafts of each row of a decode step, and why so many; `None` if steps have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafts: Option<Cow<'static, str>>,
    /// Padding rows.
    pub padded_rows: u32,
    /// Replayed, or eager with the reason.
    pub run: Run,
    /// Host time of the step, in microseconds; the steps of one launch share its time equally.
    pub host_us: u32,
    /// Device time of the step, in microseconds.
    pub device_us: u32,
}

/// Data that does not change after the engine started.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GraphInfo {
    /// Model, device and other facts, one row each.
    pub about: Vec<ConfigRow>,
    /// The resolved graph configuration, with the reason for every value.
    pub config: Vec<ConfigRow>,
    /// Drawings of the plans, by bucket.
    pub plans: Vec<PlanPicture>,
}

/// One resolved setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigRow {
    /// The setting.
    pub key: String,
    /// The value.
    pub value: String,
    /// The reason for the value.
    pub reason: String,
}

/// A drawing of the Plan of one bucket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanPicture {
    /// The bucket's name, such as `decode/8`.
    pub bucket: String,
    /// An SVG document.
    pub svg: String,
}
