//! Turns generated tokens into response text: complete characters, stop strings removed, reasoning
//! and tool calls separated from the answer. The same code serves streams and complete responses.

mod call_list;
mod call_object;
mod choice;
mod collect;
mod harmony;
mod hermes;
mod llama;
mod pythonic;
mod reasoning;
mod run;
mod tools;

pub use call_list::CallList;
pub use choice::{Choice, ChoiceSetup};
pub(crate) use collect::{Collected, Part, arguments, collect};
pub(crate) use harmony::FINAL;
pub use harmony::{HarmonySplit, Mark, Marks};
pub use reasoning::{Reasoning, ReasoningSplit};
pub(crate) use run::rejected;
pub use run::{Piece, Run, RunSetup, Usage};
pub use tools::{ToolFormat, ToolSplit};

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// Text of the answer.
    Text(String),
    /// Reasoning text, which precedes the answer.
    Reasoning(String),
    /// A tool call begins.
    ToolStart {
        /// The function's name.
        name: String,
    },
    /// More of the arguments (JSON text) of the tool call that began last.
    ToolArguments(String),
    /// The tool call that began last is complete, or the answer ends inside it.
    ToolEnd,
}

impl Delta {
    /// Length of the text in bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Text(text) | Self::Reasoning(text) | Self::ToolArguments(text) => text.len(),
            Self::ToolStart { name } => name.len(),
            Self::ToolEnd => 0,
        }
    }
}

/// The offset of the longest suffix of `text` that is a proper prefix of `word`; `text.len()` if
/// there is none.
pub(crate) fn partial_at(text: &str, word: &str) -> usize {
    let from = text.len().saturating_sub(word.len().saturating_sub(1));
    let tail = (from..text.len()).filter(|at| text.is_char_boundary(*at));
    tail.into_iter().find(|at| word.starts_with(&text[*at..])).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::partial_at;

    #[test]
    fn partial_matches_at_the_end() {
        assert_eq!(partial_at("abc<to", "<tool>"), 3);
        assert_eq!(partial_at("abc<<", "<tool>"), 4);
        assert_eq!(partial_at("abc", "<tool>"), 3);
        assert_eq!(partial_at("日本", "本語"), 3);
        assert_eq!(partial_at("", "x"), 0);
        assert_eq!(partial_at("x", "x"), 1);
    }
}
