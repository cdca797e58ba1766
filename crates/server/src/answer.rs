//! From tokens to what a client reads: whole characters, stop strings taken out, thinking and tool
//! calls told apart from the answer. Everything works on a stream and on a whole answer alike.

mod call_list;
mod choice;
mod pythonic;
mod reasoning;
mod run;
mod stop;
mod tools;

pub use call_list::CallList;
pub use choice::{Choice, ChoiceSetup};
pub use reasoning::{Reasoning, ReasoningSplit};
pub(crate) use run::rejected;
pub use run::{Piece, Run, RunSetup, Usage};
pub use stop::StopFinder;
pub use tools::{ToolFormat, ToolSplit};

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// Of the answer itself.
    Text(String),
    /// Of what the model thinks before it answers.
    Reasoning(String),
    /// A tool call begins.
    ToolStart {
        /// The function's name.
        name: String,
    },
    /// More of the arguments (JSON text) of the tool call that began last.
    ToolArguments(String),
}

impl Delta {
    /// Bytes of text in it.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Text(text) | Self::Reasoning(text) | Self::ToolArguments(text) => text.len(),
            Self::ToolStart { name } => name.len(),
        }
    }
}

/// Where the longest end of `text` begins that could be the beginning of `word`;
/// `text.len()` when there is none.
pub(crate) fn partial_at(text: &str, word: &str) -> usize {
    let from = text.len().saturating_sub(word.len().saturating_sub(1));
    let tail = (from..text.len()).filter(|at| text.is_char_boundary(*at));
    tail.into_iter().find(|at| word.starts_with(&text[*at..])).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::partial_at;

    #[test]
    fn partial_ends() {
        assert_eq!(partial_at("abc<to", "<tool>"), 3);
        assert_eq!(partial_at("abc<<", "<tool>"), 4);
        assert_eq!(partial_at("abc", "<tool>"), 3);
        assert_eq!(partial_at("日本", "本語"), 3);
        assert_eq!(partial_at("", "x"), 0);
        assert_eq!(partial_at("x", "x"), 1);
    }
}
