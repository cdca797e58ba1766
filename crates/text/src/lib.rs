//! Text to tokens and back, below the server: what `dacapo run`, `dacapo chat` and the HTTP routes share.
//!
//! [`TextModel`] is a tokenizer with a chat template: that of a checkpoint ([`CheckpointText`]), bytes
//! ([`bytes::ByteText`]) for tests and the mock, or words ([`WordText`]) for models with random weights.
//! Answers become text in pieces: [`Detokenize`] appends complete characters only, and [`StopFinder`] holds
//! back what may be the start of a stop string.
//!
//! ```
//! use text::StopFinder;
//!
//! let mut stops = StopFinder::new(vec!["END".into()]);
//! let mut shown = String::new();
//! assert!(!stops.push("one E", &mut shown));
//! assert_eq!(shown, "one ", "the E may begin a stop string");
//! assert!(stops.push("ND two", &mut shown));
//! assert_eq!(shown, "one ");
//! ```

pub mod bytes;
mod model;
mod stop;
mod utf8;
mod words;

pub use model::{CheckpointText, detokenizer};
pub use stop::StopFinder;
pub use words::WordText;

use serde_json::{Map, Value};

/// The number of a token in a vocabulary.
pub type Token = u32;

/// Why text could not be tokenized.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The model has no chat template.
    #[error("this model has no chat template; use /v1/completions")]
    NoTemplate,
    /// The template rejected these messages or failed; the text is its own message.
    #[error("the chat template rejected the messages: {0}")]
    Template(String),
    /// The template does not show the end of the last message, which therefore cannot be continued.
    #[error("the chat template does not show the last message; it cannot be continued")]
    Hidden,
    /// The text has too many bytes to fit in that many tokens.
    #[error("the text has {bytes} bytes, which is more than {most} tokens can hold")]
    TooManyBytes {
        /// Bytes of text.
        bytes: usize,
        /// The most tokens allowed.
        most: usize,
    },
    /// The text has more tokens than allowed.
    #[error("the text has more than {most} tokens")]
    TooLong {
        /// The most tokens allowed.
        most: usize,
    },
    /// The tokenizer does not say how two texts are joined.
    #[error("this model takes no pairs of texts")]
    NoPairs,
    /// The tokenizer failed.
    #[error("cannot tokenize the text: {0}")]
    Encode(String),
}

/// The input of a chat template.
#[derive(Clone, Debug)]
pub struct Chat {
    /// The messages: an array of objects with `role` and `content`.
    pub messages: Value,
    /// The tools offered: an array, or null.
    pub tools: Value,
    /// Whether the template ends with the start of the assistant's turn.
    pub generation_prompt: bool,
    /// Whether the last message is left open, so that the answer continues it; then there is no
    /// generation prompt.
    pub continue_final: bool,
    /// Further template variables (`enable_thinking`, ...).
    pub extra: Map<String, Value>,
}

/// A conversation rendered by the chat template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// The tokens.
    pub tokens: Vec<Token>,
}

/// A tokenizer with a chat template.
pub trait TextModel: Send + Sync + 'static {
    /// Tokenizes; special tokens spelled out in `text` are recognized. `add_special` prepends the
    /// ones the model expects at the start of a plain prompt. A text of more than `most` tokens is
    /// an error and costs no more time than one of `most` tokens.
    fn encode(&self, text: &str, add_special: bool, most: usize) -> Result<Vec<Token>, TextError>;
    /// Renders and tokenizes a conversation of at most `most` tokens.
    fn render(&self, chat: &Chat, most: usize) -> Result<Rendered, TextError>;
    /// The length in bytes of the longest token, if known.
    fn longest_token(&self) -> Option<usize>;
    /// The bytes of a token (not always complete characters); `None` outside the vocabulary.
    fn token_bytes(&self, token: Token) -> Option<Vec<u8>>;
    /// Whether a token is special: not shown in answers.
    fn is_special(&self, token: Token) -> bool;
    /// A decoder for one answer.
    fn detokenizer(&self) -> Box<dyn Detokenize>;
    /// Tokens that end an answer.
    fn stop_tokens(&self) -> &[Token];
    /// The size of the vocabulary.
    fn vocab(&self) -> u32;

    /// Tokenizes a pair of texts, such as a query and a document, with the special tokens around and between them. Where
    /// there are more than `most` tokens, the longer text is cut. Tokens of the second kind are those past the
    /// vocabulary.
    fn encode_pair(&self, _: &str, _: &str, _most: usize) -> Result<Vec<Token>, TextError> {
        Err(TextError::NoPairs)
    }

    /// How many of the special tokens of a plain text stand behind it.
    fn closing(&self) -> usize {
        0
    }

    /// The source of the chat template, if there is one.
    fn template(&self) -> Option<&str> {
        None
    }

    /// Decodes a sequence without its special tokens.
    fn decode(&self, tokens: &[Token]) -> String {
        self.decode_within(tokens, usize::MAX).unwrap_or_default()
    }

    /// Like [`TextModel::decode`]; `None` if the text has more than `most` bytes.
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

    /// An error if that many bytes cannot fit in `most` tokens: a cheap check before tokenizing.
    fn check_bytes(&self, bytes: usize, most: usize) -> Result<(), TextError> {
        match self.longest_token() {
            Some(longest) if bytes > most.saturating_mul(longest) => {
                Err(TextError::TooManyBytes { bytes, most })
            }
            _ => Ok(()),
        }
    }
}

/// Decodes an answer token by token; appends only complete characters.
pub trait Detokenize: Send {
    /// Appends the text that `token` completes, which may be empty.
    fn push(&mut self, token: Token, out: &mut String);
    /// Appends the bytes held back; an incomplete character becomes U+FFFD.
    fn flush(&mut self, out: &mut String);
}
