//! Limits on grammars, checked before compilation.

use crate::source::Grammar;
use crate::{regex, schema};
use std::time::Duration;

/// Limits on the size of a grammar and the cost of compiling it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the text.
    pub bytes: u64,
    /// Nesting levels of schemas, with references followed.
    pub depth: u64,
    /// Schemas in total; values of `enum` count as schemas.
    pub schemas: u64,
    /// Properties of one object.
    pub properties: u64,
    /// Alternatives that `anyOf`, `oneOf`, `enum` and `allOf` make together at one point.
    pub alternatives: u64,
    /// Pairwise comparisons of the alternatives of `oneOf`.
    pub comparisons: u64,
    /// Schemas at one point after its alternatives and references are merged.
    pub merged: u64,
    /// Entries of `patternProperties` in the whole schema; the compiler compares them pairwise.
    pub patterns: u64,
    /// Bytes of all regular expressions together.
    pub regex_bytes: u64,
    /// The largest `multipleOf`; its automaton has a state per remainder.
    pub multiple_of: u64,
    /// Nesting levels of groups in a regular expression or a Lark grammar.
    pub groups: u64,
    /// The time limit of a compilation.
    pub time: Duration,
    /// Concurrent compilations.
    pub threads: usize,
    /// Compiled grammars in the cache.
    pub kept: usize,
    /// Bytes of the texts of all compiled grammars that are cached or in use. A compiled grammar
    /// takes up to about a hundred times the memory of its text.
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
    /// Refuses a grammar that exceeds a limit.
    pub(crate) fn check(&self, grammar: &Grammar) -> Result<(), TooLarge> {
        at_most("bytes", grammar.text().len() as u64, self.bytes)?;
        match grammar {
            Grammar::JsonObject => Ok(()),
            Grammar::JsonSchema(text) => self.check_schema(text),
            Grammar::Regex(text) => regex::check(text, self),
            Grammar::Lark(text) => {
                regex::nesting(text, self)?;
                // A schema may follow this directive.
                text.match_indices("%json").try_for_each(|(at, word)| {
                    let rest = &text[at + word.len()..];
                    let mut values = serde_json::Deserializer::from_str(rest).into_iter();
                    match values.next() {
                        Some(Ok(schema)) => schema::check(&schema, self),
                        // The compiler reports what is wrong with it.
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

/// A grammar exceeds a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the grammar is too large: more than {allowed} {what}")]
pub struct TooLarge {
    /// The limited quantity.
    pub what: &'static str,
    /// The limit.
    pub allowed: u64,
}

pub(crate) fn at_most(what: &'static str, found: u64, allowed: u64) -> Result<(), TooLarge> {
    if found > allowed { Err(TooLarge { what, allowed }) } else { Ok(()) }
}
