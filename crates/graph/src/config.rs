//! How graphs are configured. One table of options ([`options`]) gives flags, JSON keys, help and
//! documents; one table of named rules (`rules`) says which options exclude each other. Settings are
//! resolved in four stages:
//!
//! 1. **parse**: `--graph-config` (JSON or `@file`) and flags become texts by path. JSON beats flags; a
//!    conflict is a warning that names both.
//! 2. **default**: what was not given gets a default, with the reason for it.
//! 3. **compatibility**: a rule may change a default. It never changes what the user asked for: that is
//!    an error that names the rule.
//! 4. **validate**: texts become values; an invalid one is an error that names the nearest valid one.
//!
//! Every decision keeps its source, so the table printed at start says why each value is what it is.

mod nearest;
pub mod options;
mod parse;
pub(crate) mod rules;
#[cfg(test)]
mod tests;
mod validate;

pub use options::{Kind, MAX_STEPS, Setting, flags, help};

use crate::bucket::{BucketError, BucketSpec, Buckets};
use crate::runner::{Capture, Debug, Fallback, RunnerConfig};
use crate::{BackendKind, Phase, Prep};
use device::{RecordOptions, StepLimits};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// What was given on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Given {
    /// `--graph-config`: JSON, or `@` and a file name.
    pub config: Option<String>,
    /// Flags by their name without dashes, for example `graph-backend-decode`.
    pub flags: BTreeMap<String, String>,
}

/// What is known of the machine and the engine before graphs are configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The compute capability, if the device is a GPU: what its [`device::Target`] says.
    pub capability: Option<(u32, u32)>,
    /// Sequences the scheduler may run at once.
    pub sequences: u32,
    /// Tokens the scheduler may put into one step.
    pub tokens: u32,
    /// Bytes of the model's weights.
    pub weights: u64,
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// `--graph-config`.
    Json,
    /// A flag, named with its dashes.
    Flag(String),
    /// Not given: the option's default.
    Default,
    /// A rule changed the default.
    Rule(&'static str),
}

impl Source {
    /// Whether the user gave it.
    pub(crate) fn is_explicit(&self) -> bool {
        matches!(self, Source::Json | Source::Flag(_))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Json => f.write_str("--graph-config"),
            Source::Flag(flag) => f.write_str(flag),
            Source::Default => f.write_str("default"),
            Source::Rule(name) => write!(f, "rule {name}"),
        }
    }
}

/// A value with its source and reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The option's path, for example `decode.backend`.
    pub path: &'static str,
    /// Its text.
    pub value: String,
    /// Where from.
    pub source: Source,
    /// Why, for defaults and rules.
    pub why: String,
}

/// Why a configuration was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, or not an object.
    #[error("--graph-config: {problem}")]
    Json {
        /// The parser's message.
        problem: String,
    },
    /// A file that cannot be read.
    #[error("--graph-config @{path}: {problem}")]
    File {
        /// The file.
        path: String,
        /// What happened.
        problem: String,
    },
    /// A key, phase or flag that does not exist.
    #[error("{place} has no `{name}`; did you mean `{nearest}`?")]
    Unknown {
        /// Where it was found.
        place: String,
        /// What was written.
        name: String,
        /// What exists and is nearest.
        nearest: String,
    },
    /// A value an option cannot have.
    #[error("{path} = `{given}` ({source_text}): {expected}")]
    Value {
        /// The option.
        path: &'static str,
        /// What was written.
        given: String,
        /// Where.
        source_text: String,
        /// What it can be.
        expected: String,
    },
    /// A rule forbids what the user asked for.
    #[error(
        "rule {rule}: {path} = `{value}` ({source_text}) is not possible; it would have to be `{wanted}`, because {why}"
    )]
    Rule {
        /// The rule.
        rule: &'static str,
        /// The option.
        path: &'static str,
        /// What was asked for.
        value: String,
        /// Where.
        source_text: String,
        /// The value the rule requires.
        wanted: String,
        /// Why.
        why: &'static str,
    },
    /// An invalid bucket list.
    #[error(transparent)]
    Buckets(#[from] BucketError),
}

/// One phase's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseSettings {
    /// How plans are recorded.
    pub backend: BackendKind,
    /// Which sizes get a graph.
    pub buckets: BucketSpec,
    /// The largest step, in the phase's unit.
    pub max: u32,
    /// Of prefill: numbers of rows that get graphs of their own.
    pub rows: Vec<u32>,
    /// The largest share of a bucket that may be padding.
    pub max_padding: Option<f64>,
    /// Op names `breakable` breaks and `piecewise` splits at.
    pub break_at: BTreeSet<String>,
}

/// A configuration that holds together.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// Decode.
    pub decode: PhaseSettings,
    /// Prefill.
    pub prefill: PhaseSettings,
    /// When graphs are recorded.
    pub capture: Capture,
    /// What happens to uncovered steps.
    pub fallback: Fallback,
    /// Kernels and splits are the same for every bucket.
    pub fixed: bool,
    /// What is checked at every step.
    pub debug: Debug,
    /// Dependent launch between kernels.
    pub pdl: bool,
    /// Who prepares decode steps.
    pub prep: Prep,
    /// Most decode steps of one launch.
    pub steps: u32,
    /// When all layers of a decode step become one node.
    pub merge: crate::compile::merge::Merge,
    /// Bytes all graphs together may take.
    pub budget: Option<u64>,
    /// Every value with its source and reason, in the order of the options.
    pub decisions: Vec<Decision>,
    /// Conflicts that were settled by precedence.
    pub warnings: Vec<String>,
}

/// All four stages.
pub fn resolve(given: &Given, facts: &Facts) -> Result<Resolved, ConfigError> {
    let (mut draft, warnings) = parse::parse(given)?;
    options::fill_defaults(&mut draft, facts);
    rules::apply(&mut draft, facts)?;
    validate::validate(draft, warnings)
}

impl Resolved {
    /// A phase's settings.
    pub fn phase(&self, phase: Phase) -> &PhaseSettings {
        match phase {
            Phase::Decode => &self.decode,
            Phase::Prefill => &self.prefill,
        }
    }

    /// What a runner of this phase needs. The budget is shared: decode may take three quarters of it,
    /// because every token but the first is decoded.
    pub fn runner(&self, phase: Phase, limits: &StepLimits) -> Result<RunnerConfig, ConfigError> {
        let settings = self.phase(phase);
        let most = match phase {
            Phase::Decode => limits.rows,
            Phase::Prefill => limits.tokens,
        };
        let max = settings.max.min(most);
        let mut buckets = Buckets::generate(&settings.buckets, phase, max, settings.max_padding)?;
        buckets.fixed = self.fixed;
        buckets.rows.clone_from(&settings.rows);
        let share = |bytes: u64| match phase {
            Phase::Decode => bytes / 4 * 3,
            Phase::Prefill => bytes / 4,
        };
        Ok(RunnerConfig {
            backend: settings.backend,
            buckets,
            max_padding: settings.max_padding,
            capture: self.capture,
            fallback: self.fallback,
            debug: self.debug,
            replays: 1,
            budget: self.budget.map(share),
            break_at: Some(settings.break_at.clone()),
            options: RecordOptions { dependent_launch: self.pdl },
            prep: if phase == Phase::Decode { self.prep } else { Prep::Device },
            steps: if phase == Phase::Decode { self.steps } else { 1 },
            q_lens: Vec::new(),
            most_verified: u32::MAX,
            adapters: false,
        })
    }

    /// The table printed at start.
    pub fn table(&self) -> String {
        let width =
            |of: &dyn Fn(&Decision) -> usize| self.decisions.iter().map(of).max().unwrap_or(0);
        let (paths, values) = (width(&|d| d.path.len()), width(&|d| d.value.chars().count()));
        let mut text = String::new();
        for Decision { path, value, source, why } in &self.decisions {
            let reason =
                if why.is_empty() { source.to_string() } else { format!("{source}: {why}") };
            text.push_str(&format!("{path:<paths$}  {value:<values$}  {reason}\n"));
        }
        text
    }
}
