//! What the server needs of a tokenizer and a chat template, and no more.

pub mod bytes;
mod model;
mod utf8;
mod words;

pub use model::CheckpointText;
pub use utf8::Utf8Stream;
pub use words::WordText;

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
    /// The tokenizer failed.
    #[error("the text could not be tokenized: {0}")]
    Encode(String),
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
    /// before it that the model wants at the start of a plain prompt.
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<Token>, TextError>;
    /// Renders a conversation and tokenizes it.
    fn render(&self, chat: &Chat) -> Result<Rendered, TextError>;
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
        let mut text = String::new();
        let mut stream = self.detokenizer();
        for &token in tokens {
            stream.push(token, &mut text);
        }
        stream.flush(&mut text);
        text
    }
}

/// Decodes an answer token by token; what it appends is always whole characters.
pub trait Detokenize: Send {
    /// Appends the text that `token` completes, perhaps none.
    fn push(&mut self, token: Token, out: &mut String);
    /// Appends what was held back; a broken character becomes U+FFFD.
    fn flush(&mut self, out: &mut String);
}
