//! The key of a recorded graph.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The two kinds of step. A phase has its own runner, buckets and backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// One token per row, which the device sampled in the step before.
    Decode,
    /// Prompt chunks, with decode rows beside them or not.
    Prefill,
}

impl Phase {
    /// Both, in the order of every listing.
    pub const ALL: [Phase; 2] = [Phase::Decode, Phase::Prefill];

    /// The name in flags, metrics and documents.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Decode => "decode",
            Phase::Prefill => "prefill",
        }
    }

    /// What a bucket of this phase counts.
    pub const fn unit(self) -> &'static str {
        match self {
            Phase::Decode => "sequences",
            Phase::Prefill => "tokens",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is recorded around a plan's nodes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// Nothing.
    #[default]
    Once,
    /// In front, a copy of the host's inputs from staging block 0 or 1: a recorded copy has one source.
    Staged(u8),
    /// A loop: one launch is several steps.
    Repeated,
}

fn one() -> u32 {
    1
}

// The signature is serde's.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_one(value: &u32) -> bool {
    *value == 1
}

impl Form {
    fn is_once(&self) -> bool {
        *self == Form::Once
    }
}

/// Every choice the host makes before a step: two steps with equal keys may share a graph, two with
/// different keys may not. A choice that is not in the key would be baked into whichever step was
/// recorded first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ShapeKey {
    /// Which runner.
    pub phase: Phase,
    /// Tokens, padded to the bucket.
    pub tokens: u32,
    /// Rows (sequences), padded to the bucket.
    pub rows: u32,
    /// Tokens of every row of a decode step: more than one verifies drafts. Prefill steps have rows of any length, and 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub q_len: u32,
    /// The nodes of adapters are part of the plan.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adapters: bool,
    /// Kernels with one order of summation for every size of step: what a row computes depends on
    /// nothing but that row.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fixed: bool,
    /// What is recorded around the plan.
    #[serde(default, skip_serializing_if = "Form::is_once")]
    pub form: Form,
}

impl ShapeKey {
    /// A decode step of `rows` sequences.
    pub const fn decode(rows: u32) -> ShapeKey {
        Self::new(Phase::Decode, rows, rows)
    }

    /// A prefill step of `tokens` tokens in at most `rows` rows.
    pub const fn prefill(tokens: u32, rows: u32) -> ShapeKey {
        Self::new(Phase::Prefill, tokens, rows)
    }

    const fn new(phase: Phase, tokens: u32, rows: u32) -> ShapeKey {
        let (q_len, adapters, fixed, form) = (1, false, false, Form::Once);
        ShapeKey { phase, tokens, rows, q_len, adapters, fixed, form }
    }

    /// A decode step of `rows` sequences with `q_len` tokens each.
    pub const fn verify(rows: u32, q_len: u32) -> ShapeKey {
        ShapeKey { q_len, ..Self::new(Phase::Decode, rows.saturating_mul(q_len), rows) }
    }

    /// The same rows with `q_len` tokens each, if it is a decode step.
    pub const fn with_q_len(self, q_len: u32) -> ShapeKey {
        match self.phase {
            Phase::Decode => ShapeKey { q_len, tokens: self.rows.saturating_mul(q_len), ..self },
            Phase::Prefill => self,
        }
    }

    /// Whether every row has exactly one token.
    pub fn single(&self) -> bool {
        self.phase == Phase::Decode && self.q_len == 1
    }

    /// The same shape in another form.
    pub fn with(mut self, form: Form) -> ShapeKey {
        self.form = form;
        self
    }

    /// The same with or without fixed kernels.
    pub const fn with_fixed(self, fixed: bool) -> ShapeKey {
        ShapeKey { fixed, ..self }
    }

    /// The same with or without the nodes of adapters.
    pub(crate) const fn with_adapters(self, adapters: bool) -> ShapeKey {
        ShapeKey { adapters, ..self }
    }

    /// The key's size in the unit of its phase.
    pub const fn bucket(&self) -> u32 {
        match self.phase {
            Phase::Decode => self.rows,
            Phase::Prefill => self.tokens,
        }
    }
}

impl fmt::Display for ShapeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.phase {
            Phase::Decode => write!(f, "decode/{}", self.rows)?,
            Phase::Prefill => write!(f, "prefill/{}x{}", self.tokens, self.rows)?,
        }
        if self.q_len != 1 {
            write!(f, "/q_len={}", self.q_len)?;
        }
        if self.adapters {
            f.write_str("/adapters")?;
        }
        if self.fixed {
            f.write_str("/fixed")?;
        }
        match self.form {
            Form::Once => Ok(()),
            Form::Staged(block) => write!(f, "/staged={block}"),
            Form::Repeated => f.write_str("/repeated"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_says_only_what_is_unusual() {
        let text = |key: &ShapeKey| serde_json::to_string(key).unwrap();
        let plain = ShapeKey::decode(4);
        assert_eq!(plain.to_string(), "decode/4");
        assert_eq!(text(&plain), r#"{"phase":"decode","tokens":4,"rows":4}"#);
        let verify = ShapeKey { adapters: true, fixed: true, ..ShapeKey::verify(4, 3) };
        assert_eq!(verify.to_string(), "decode/4/q_len=3/adapters/fixed");
        assert_eq!((verify.tokens, verify.single(), plain.single()), (12, false, true));
        for key in [plain, verify, ShapeKey::prefill(16, 4)] {
            assert_eq!(serde_json::from_str::<ShapeKey>(&text(&key)).unwrap(), key);
        }
    }
}
