//! The source text of a grammar.

use serde::{Deserialize, Serialize};

/// A constraint on the text of an answer, as the client wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grammar {
    /// Any JSON value that satisfies this schema (the schema as JSON text).
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// A regular expression over the whole answer.
    Regex(String),
    /// A Lark grammar.
    Lark(String),
}

impl Grammar {
    /// The text; empty for [`Grammar::JsonObject`].
    pub fn text(&self) -> &str {
        match self {
            Grammar::JsonObject => "",
            Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text,
        }
    }
}
