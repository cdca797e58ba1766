//! What a grammar may ask for before anything is compiled.

use crate::source::Grammar;
use crate::{regex, schema};
use std::time::Duration;

/// How large a grammar may be, and what compiling it may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of its text.
    pub bytes: u64,
    /// Schemas nested in each other, with references followed.
    pub depth: u64,
    /// Schemas in all, values of `enum` counted as such.
    pub schemas: u64,
    /// Properties of one object.
    pub properties: u64,
    /// Alternatives that `anyOf`, `oneOf`, `enum` and `allOf` make together in one place.
    pub alternatives: u64,
    /// Comparisons of alternatives of `oneOf` with each other.
    pub comparisons: u64,
    /// Schemas in one place after alternatives and references there are merged.
    pub merged: u64,
    /// Properties named by patterns, in the whole schema: each is compared with each other.
    pub patterns: u64,
    /// Bytes of all regular expressions together.
    pub regex_bytes: u64,
    /// The largest `multipleOf`: an automaton has a state for each remainder.
    pub multiple_of: u64,
    /// Groups nested in each other in a regular expression or a Lark grammar.
    pub groups: u64,
    /// How long a compilation may take.
    pub time: Duration,
    /// Compilations at once.
    pub threads: usize,
    /// Compiled grammars that are kept.
    pub kept: usize,
    /// Bytes of the texts of all compiled grammars that are kept or in use. A compiled grammar takes up
    /// to some hundred times the memory of its text.
    pub live_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 256 * 1024,
            depth: 128,
            schemas: 4096,
            properties: 512,
            alternatives: 1024,
            comparisons: 1 << 20,
            merged: 16 * 1024,
            patterns: 16,
            regex_bytes: 16 * 1024,
            multiple_of: 10_000,
            groups: 64,
            time: Duration::from_secs(4),
            threads: 2,
            kept: 64,
            live_bytes: 4 << 20,
        }
    }
}

impl Limits {
    /// Refuses what is too large, before anything is compiled.
    pub(crate) fn check(&self, grammar: &Grammar) -> Result<(), TooLarge> {
        at_most("bytes", grammar.text().len() as u64, self.bytes)?;
        match grammar {
            Grammar::JsonObject => Ok(()),
            Grammar::JsonSchema(text) => self.check_schema(text),
            Grammar::Regex(text) => regex::check(text, self),
            Grammar::Lark(text) => {
                regex::nesting(text, self)?;
                // Schemas may stand inside, behind this word.
                text.match_indices("%json").try_for_each(|(at, word)| {
                    let rest = &text[at + word.len()..];
                    let mut values = serde_json::Deserializer::from_str(rest).into_iter();
                    match values.next() {
                        Some(Ok(schema)) => schema::check(&schema, self),
                        // The compiler says what is wrong with it.
                        _ => Ok(()),
                    }
                })
            }
        }
    }

    fn check_schema(&self, text: &str) -> Result<(), TooLarge> {
        match serde_json::from_str(text) {
            Ok(schema) => schema::check(&schema, self),
            Err(_) => Ok(()),
        }
    }
}

/// A grammar beyond a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the grammar is too large: more than {allowed} {what}")]
pub struct TooLarge {
    /// What there is too much of.
    pub what: &'static str,
    /// How much may be.
    pub allowed: u64,
}

pub(crate) fn at_most(what: &'static str, found: u64, allowed: u64) -> Result<(), TooLarge> {
    if found > allowed { Err(TooLarge { what, allowed }) } else { Ok(()) }
}
