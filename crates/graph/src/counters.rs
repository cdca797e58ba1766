//! What happened to every step: replayed or not, why not, which bucket, how many pad rows. Every
//! fallback is counted.

use crate::ShapeKey;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Why a step did not replay a recorded graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The phase's backend is `disabled`.
    Disabled,
    /// Larger than the largest bucket.
    NotCovered,
    /// The bucket would waste more than `max-padding-ratio`.
    Padding,
    /// Capture is lazy and this bucket has not earned its graph yet.
    NotRecorded,
    /// The memory budget left no room for this bucket's graph.
    OverBudget,
    /// `--graph-debug eager`.
    Debug,
    /// Rows of more than one token, or a shape of the other phase.
    WrongPhase,
    /// It replayed, and then its end ran op by op for the log-probabilities of prompt tokens.
    Scored,
    /// Its nodes were timed one by one (`--profile-steps`).
    Profiled,
}

impl Reason {
    /// All, in listing order.
    pub const ALL: [Reason; 9] = [
        Reason::Disabled,
        Reason::NotCovered,
        Reason::Padding,
        Reason::NotRecorded,
        Reason::OverBudget,
        Reason::Debug,
        Reason::WrongPhase,
        Reason::Scored,
        Reason::Profiled,
    ];

    /// The label in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Reason::Disabled => "disabled",
            Reason::NotCovered => "not_covered",
            Reason::Padding => "padding",
            Reason::NotRecorded => "not_recorded",
            Reason::OverBudget => "over_budget",
            Reason::Debug => "debug",
            Reason::WrongPhase => "wrong_phase",
            Reason::Scored => "scored",
            Reason::Profiled => "profiled",
        }
    }

    /// Whether this is an unintended fallback, to which `--graph-fallback` applies.
    pub const fn is_fallback(self) -> bool {
        matches!(self, Reason::NotCovered | Reason::Padding | Reason::OverBudget)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Steps of one bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BucketCount {
    /// Steps replayed.
    pub replayed: u64,
    /// Live units (sequences or tokens) in them.
    pub live: u64,
    /// Pad units in them.
    pub padded: u64,
}

/// What a runner has done so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Steps in all.
    pub steps: u64,
    /// Steps that replayed a recorded graph.
    pub replayed: u64,
    /// Graphs recorded, also those that were given up since.
    pub recorded: u64,
    /// Steps that did not, by reason.
    pub eager: BTreeMap<Reason, u64>,
    /// Replays by bucket.
    #[serde(serialize_with = "keys_as_text")]
    pub buckets: BTreeMap<ShapeKey, BucketCount>,
    /// Sizes seen, in the phase's unit: what `graph tune` reads.
    pub sizes: BTreeMap<u32, u64>,
}

fn keys_as_text<S: serde::Serializer>(
    buckets: &BTreeMap<ShapeKey, BucketCount>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(buckets.iter().map(|(key, count)| (key.to_string(), count)))
}

impl Counters {
    /// Counts a replay of `key` by a step of `size` units.
    pub fn replayed(&mut self, key: &ShapeKey, size: u32) {
        self.steps += 1;
        self.replayed += 1;
        *self.sizes.entry(size).or_default() += 1;
        let count = match self.buckets.get_mut(key) {
            Some(count) => count,
            None => self.buckets.entry(*key).or_default(),
        };
        count.replayed += 1;
        count.live += u64::from(size);
        count.padded += u64::from(key.bucket() - size);
    }

    /// Counts a step of `size` units that ran op by op.
    pub fn eager(&mut self, reason: Reason, size: u32) {
        self.steps += 1;
        *self.eager.entry(reason).or_default() += 1;
        *self.sizes.entry(size).or_default() += 1;
    }

    /// The end of the step that was counted last ran again, op by op.
    pub(crate) fn scored(&mut self) {
        self.replayed -= 1;
        *self.eager.entry(Reason::Scored).or_default() += 1;
    }

    /// Pad units over all units replayed.
    pub fn padding_ratio(&self) -> f64 {
        let (live, padded) = self
            .buckets
            .values()
            .fold((0, 0), |(live, padded), b| (live + b.live, padded + b.padded));
        if live + padded == 0 { 0.0 } else { padded as f64 / (live + padded) as f64 }
    }
}
