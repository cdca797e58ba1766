//! The one table of options.

use super::{Decision, Facts, Source};
use crate::Prep;
use crate::backend::BackendKind;

/// What an option's text must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One of these words.
    Word(&'static [&'static str]),
    /// A bucket list.
    Buckets,
    /// A whole number from 1.
    Count,
    /// Up to four numbers of sequences, or `none`.
    Rows,
    /// A number from 0 to 1, or `none`.
    Ratio,
    /// A byte size such as `150MiB`, or `none`.
    Bytes,
    /// Op names, separated by commas.
    Ops,
    /// A whole number from 1 to [`MAX_STEPS`].
    Steps,
}

/// Most steps of one launch: the ring must hold the results of all of them and of the launch before.
pub const MAX_STEPS: u32 = device::step::ring::ENTRIES / 2;

/// From this many bytes of weights on, a GPU's steps are long: about 2 ms on an H200, and a loop adds half a percent.
const LONG_STEP: u64 = 8 << 30;

/// Sequences of a step that feeds prompts beside answers for a moderate number of clients.
const FEW_ROWS: u32 = 64;

/// One option.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Its place in the JSON, for example `decode.backend`.
    pub path: &'static str,
    /// Its flag without dashes; `None` where JSON is enough.
    pub flag: Option<&'static str>,
    /// What its text must be.
    pub kind: Kind,
    /// What it does, in a sentence.
    pub help: &'static str,
    /// The default as text, for documents.
    pub default_words: &'static str,
    default: fn(&Facts) -> (String, String),
}

const BACKENDS: &[&str] = &[
    BackendKind::Full.name(),
    BackendKind::Breakable.name(),
    BackendKind::Piecewise.name(),
    BackendKind::Disabled.name(),
];

const PREPS: &[&str] =
    &[Prep::Copy.name(), Prep::Fused.name(), Prep::Async.name(), Prep::Device.name()];

/// The op names of plans: where breaks may be placed.
pub(super) const OPS: &[&str] = &[
    "prologue",
    "embed",
    "rms_norm",
    "layer_norm",
    "linear",
    "activate",
    "rope_kv",
    "attention",
    "gather",
    "pool",
    "sample",
    "publish",
];

fn fixed(value: &str, why: &str) -> (String, String) {
    (value.to_owned(), why.to_owned())
}

/// All options, in the order of every listing.
pub(crate) const SETTINGS: &[Setting] = &[
    Setting {
        path: "decode.backend",
        flag: Some("graph-backend-decode"),
        kind: Kind::Word(BACKENDS),
        help: "How decode steps are recorded.",
        default_words: "full",
        default: |_| fixed("full", "a decode step has one shape per bucket"),
    },
    Setting {
        path: "decode.buckets",
        flag: Some("graph-buckets-decode"),
        kind: Kind::Buckets,
        help: "Which batch sizes get a graph, in sequences: auto, a list 1,2,4,8 or a range 8..64/8.",
        default_words: "auto",
        default: |_| fixed("auto", "as few as keep padding below a quarter"),
    },
    Setting {
        path: "decode.max",
        flag: Some("graph-max-decode"),
        kind: Kind::Count,
        help: "The largest decode step, in sequences.",
        default_words: "what the scheduler may run at once",
        default: |facts| {
            (facts.sequences.to_string(), "what the scheduler may run at once".to_owned())
        },
    },
    Setting {
        path: "decode.max_padding_ratio",
        flag: None,
        kind: Kind::Ratio,
        help: "The largest share of a decode bucket that may be padding; a step that would waste more does not replay. It also sets how dense `auto` is.",
        default_words: "none",
        default: |_| fixed("none", "replaying with padding beats not replaying"),
    },
    Setting {
        path: "decode.break_at",
        flag: None,
        kind: Kind::Ops,
        help: "Ops at which breakable breaks and piecewise splits a decode step.",
        default_words: "attention",
        default: |_| fixed("attention", "the op whose work varies most"),
    },
    Setting {
        path: "decode.prep",
        flag: Some("graph-prep"),
        kind: Kind::Word(PREPS),
        help: "Who prepares a decode step's inputs: the host, sent as six copies before each replay, as one copy in the graph or as one copy on a second stream; or the device, which has them already.",
        default_words: "device",
        default: |_| fixed("device", "all state lives there; the others are for comparison"),
    },
    Setting {
        path: "decode.steps",
        flag: Some("graph-steps"),
        kind: Kind::Steps,
        help: "Most decode steps of one launch. A launch has fewer steps while requests come and go, and ends early when a request stops, needs a page or arrives.",
        default_words: "16 on a GPU with 8 GiB of weights or more, else 1",
        default: |facts| {
            if facts.capability.is_some() && facts.weights >= LONG_STEP {
                (
                    MAX_STEPS.to_string(),
                    "a loop adds little to a long step and saves the host launches".into(),
                )
            } else {
                fixed("1", "with two launches in flight the device does not wait for the host")
            }
        },
    },
    Setting {
        path: "prefill.backend",
        flag: Some("graph-backend-prefill"),
        kind: Kind::Word(BACKENDS),
        help: "How prefill steps are recorded.",
        default_words: "full",
        default: |_| {
            fixed("full", "attention reads row boundaries on the device, so any mix replays")
        },
    },
    Setting {
        path: "prefill.buckets",
        flag: Some("graph-buckets-prefill"),
        kind: Kind::Buckets,
        help: "Which step sizes get a graph, in tokens: auto, a list 64,128,256 or a range 64..512/64.",
        default_words: "auto",
        default: |_| fixed("auto", "as few as keep padding below a quarter"),
    },
    Setting {
        path: "prefill.max",
        flag: Some("graph-max-prefill"),
        kind: Kind::Count,
        help: "The largest prefill step, in tokens.",
        default_words: "what the scheduler puts into a step",
        default: |facts| {
            (facts.tokens.to_string(), "what the scheduler puts into a step".to_owned())
        },
    },
    Setting {
        path: "prefill.rows",
        flag: Some("graph-rows-prefill"),
        kind: Kind::Rows,
        help: "Numbers of sequences for which every prefill bucket is recorded besides the largest: a step with few sequences has a smaller head.",
        default_words: "64 on a GPU that runs more sequences, else none",
        default: |facts| match facts.capability {
            Some(_) if facts.sequences > FEW_ROWS => {
                (FEW_ROWS.to_string(), "the head of 256 sequences takes a millisecond more".into())
            }
            _ => fixed("none", "one graph for each size"),
        },
    },
    Setting {
        path: "prefill.max_padding_ratio",
        flag: None,
        kind: Kind::Ratio,
        help: "The same for prefill buckets.",
        default_words: "none",
        default: |_| fixed("none", "replaying with padding beats not replaying"),
    },
    Setting {
        path: "prefill.break_at",
        flag: None,
        kind: Kind::Ops,
        help: "Ops at which breakable breaks and piecewise splits a prefill step.",
        default_words: "attention",
        default: |_| fixed("attention", "the op whose work varies most"),
    },
    Setting {
        path: "memory.budget",
        flag: Some("graph-memory-budget"),
        kind: Kind::Bytes,
        help: "Bytes all graphs together may take; the buckets kept are those that save the most padding.",
        default_words: "none",
        default: |_| fixed("none", "graphs are small; their exact bytes are reported"),
    },
    Setting {
        path: "capture",
        flag: Some("graph-capture"),
        kind: Kind::Word(&["startup", "lazy"]),
        help: "When graphs are recorded: all before the first step, or each after a few steps have needed it.",
        default_words: "startup",
        default: |_| fixed("startup", "recording needs no warm-up runs, so it is quick"),
    },
    Setting {
        path: "fallback",
        flag: Some("graph-fallback"),
        kind: Kind::Word(&["warn", "error", "allow"]),
        help: "What happens to a step that no graph covers: it runs op by op with a warning, is refused, or runs and is only counted.",
        default_words: "warn",
        default: |_| fixed("warn", "fallbacks are reported"),
    },
    Setting {
        path: "kernels",
        flag: Some("graph-kernels"),
        kind: Kind::Word(&["auto", "fixed"]),
        help: "Kernels: the fastest for each bucket, or one with one order of summation for all, so that a request's tokens depend on nothing else in the batch (--deterministic).",
        default_words: "auto",
        default: |_| fixed("auto", "every bucket has the kernels that are fastest for it"),
    },
    Setting {
        path: "debug",
        flag: Some("graph-debug"),
        kind: Kind::Word(&["off", "eager", "verify"]),
        help: "Run every step op by op, or both ways and compare.",
        default_words: "off",
        default: |_| fixed("off", ""),
    },
    Setting {
        path: "pdl",
        flag: Some("graph-pdl"),
        kind: Kind::Word(&["on", "off"]),
        help: "Dependent launch: a kernel starts while the one before it ends.",
        default_words: "on",
        default: |_| fixed("on", "weights are fetched before the previous kernel ends"),
    },
    Setting {
        path: "layers",
        flag: Some("graph-layers"),
        kind: Kind::Word(&["auto", "nodes", "one"]),
        help: "Layers of a decode step: five nodes each; all layers as one node wherever the GPU has a kernel for that (small bf16 models, at most 8 sequences); or whichever was measured to be faster.",
        default_words: "auto",
        default: |_| fixed("auto", "one node where the table of measured choices says so"),
    },
];

/// The options that have a flag.
pub fn flags() -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().filter(|setting| setting.flag.is_some())
}

/// An option by path.
pub(super) fn setting(path: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.path == path)
}

/// Stage 2.
pub(super) fn fill_defaults(draft: &mut Vec<Decision>, facts: &Facts) {
    for setting in SETTINGS {
        if draft.iter().all(|decision| decision.path != setting.path) {
            let (value, why) = (setting.default)(facts);
            draft.push(Decision { path: setting.path, value, source: Source::Default, why });
        }
    }
    let place = |path: &str| SETTINGS.iter().position(|setting| setting.path == path);
    draft.sort_by_key(|decision| place(decision.path));
}

/// A flag's help, with its values and default.
pub fn help(setting: &Setting) -> String {
    let values = match setting.kind {
        Kind::Word(words) => format!(" [{}]", words.join("|")),
        _ => String::new(),
    };
    format!("{}{values} [default: {}]", setting.help, setting.default_words)
}
