//! What a client asks for.

use serde::{Deserialize, Serialize};

/// A constraint on the text of an answer, as written.
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
    /// Its text.
    pub fn text(&self) -> &str {
        match self {
            Grammar::JsonObject => "",
            Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text,
        }
    }
}
