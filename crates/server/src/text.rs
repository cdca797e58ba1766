//! What the server needs of a tokenizer and a chat template, and no more.

pub mod bytes;
mod model;
mod utf8;
mod words;

pub use model::CheckpointText;
pub use utf8::Utf8Stream;
pub use words::WordText;

use crate::error::ApiError;
use engine::request::Token;
use serde_json::{Map, Value};

/// Why text could not become tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The model has no chat template.
    #[error("this model has no chat template; use /v1/completions")]
    NoTemplate,
    /// The template refused these messages (its own words), or failed on them.
    #[error("the chat template refused the messages: {0}")]
    Template(String),
    /// There is more text than that many tokens can hold.
    #[error("the text has {bytes} bytes, which cannot be {most} tokens or fewer")]
    TooManyBytes {
        /// Bytes of text.
        bytes: usize,
        /// The most tokens that were asked for.
        most: usize,
    },
    /// The text has more tokens than asked for.
    #[error("the text has more than {most} tokens")]
    TooLong {
        /// The most that were asked for.
        most: usize,
    },
    /// The tokenizer failed.
    #[error("the text could not be tokenized: {0}")]
    Encode(String),
}

impl TextError {
    /// What a client is told of it, when it is about this field.
    pub(crate) fn about(self, param: &str) -> ApiError {
        match self {
            Self::TooManyBytes { bytes, most } => ApiError::too_many(
                param,
                format!(
                    "the prompt has {bytes} bytes, which cannot be {most} tokens; at most {most} \
                     tokens fit"
                ),
            ),
            Self::TooLong { most } => ApiError::too_many(
                param,
                format!("the prompt has more than {most} tokens; at most {most} fit"),
            ),
            other => ApiError::invalid(param, other.to_string()),
        }
    }
}

/// A conversation as a chat template sees it.
#[derive(Clone, Debug)]
pub struct Chat {
    /// The messages: an array of objects with `role` and `content`.
    pub messages: Value,
    /// The tools offered: an array, or null.
    pub tools: Value,
    /// Whether the template opens the assistant's turn.
    pub generation_prompt: bool,
    /// Variables of the template beyond the usual (`enable_thinking`, ...).
    pub extra: Map<String, Value>,
}

/// A conversation as the model reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// As text, for people and for looking at its end.
    pub text: String,
    /// As tokens.
    pub tokens: Vec<Token>,
}

/// A tokenizer with a chat template.
pub trait TextModel: Send + Sync + 'static {
    /// Tokenizes; special tokens written out in `text` become themselves. `add_special` puts those
    /// before it that the model wants at the start of a plain prompt. A text of more than `most`
    /// tokens is an error, and costs no more than one of `most`.
    fn encode(&self, text: &str, add_special: bool, most: usize) -> Result<Vec<Token>, TextError>;
    /// Renders a conversation and tokenizes it, to `most` tokens at most.
    fn render(&self, chat: &Chat, most: usize) -> Result<Rendered, TextError>;
    /// The most bytes of text that one token stands for, where that is known.
    fn longest_token(&self) -> Option<usize>;
    /// The bytes a token stands for (not always whole characters); `None` outside the vocabulary.
    fn token_bytes(&self, token: Token) -> Option<Vec<u8>>;
    /// Whether a token is markup that answers do not show.
    fn is_special(&self, token: Token) -> bool;
    /// Starts decoding one answer.
    fn detokenizer(&self) -> Box<dyn Detokenize>;
    /// Tokens that end an answer.
    fn stop_tokens(&self) -> &[Token];
    /// The size of the vocabulary.
    fn vocab(&self) -> u32;

    /// Decodes a whole sequence, specials left out.
    fn decode(&self, tokens: &[Token]) -> String {
        self.decode_within(tokens, usize::MAX).unwrap_or_default()
    }

    /// As [`TextModel::decode`]; `None` when there are more than `most` bytes of text.
    fn decode_within(&self, tokens: &[Token], most: usize) -> Option<String> {
        let mut text = String::new();
        let mut stream = self.detokenizer();
        for &token in tokens {
            stream.push(token, &mut text);
            if text.len() > most {
                return None;
            }
        }
        stream.flush(&mut text);
        Some(text)
    }

    /// Whether so many bytes of text can be `most` tokens at all: a reason to refuse text before
    /// anything is done with it.
    fn check_bytes(&self, bytes: usize, most: usize) -> Result<(), TextError> {
        match self.longest_token() {
            Some(longest) if bytes > most.saturating_mul(longest) => {
                Err(TextError::TooManyBytes { bytes, most })
            }
            _ => Ok(()),
        }
    }
}

/// Decodes an answer token by token; what it appends is always whole characters.
pub trait Detokenize: Send {
    /// Appends the text that `token` completes, perhaps none.
    fn push(&mut self, token: Token, out: &mut String);
    /// Appends what was held back; a broken character becomes U+FFFD.
    fn flush(&mut self, out: &mut String);
}
