//! Text of a stream of tokens.

use super::Tokenizer;
use std::sync::Arc;

/// Turns tokens into text as they come. A token may end inside a character; its bytes wait for the
/// next token, so what comes out is always whole characters, and all of it together is what
/// [`Tokenizer::decode`] gives.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// The beginning of a character, at most three bytes between pushes.
    pending: Vec<u8>,
    text: String,
    at_start: bool,
    skip_special: bool,
}

impl Detokenizer {
    /// A stream that leaves control tokens out.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let at_start = tokenizer.strips_first_space();
        let (pending, text) = (Vec::new(), String::new());
        Self { tokenizer, pending, text, at_start, skip_special: true }
    }

    /// Whether control tokens are left out (the default) or written out.
    pub fn skip_special(mut self, skip: bool) -> Self {
        self.skip_special = skip;
        self
    }

    /// The text that `id` completes; empty when it completes none.
    pub fn push(&mut self, id: u32) -> &str {
        self.text.clear();
        if self.skip_special && self.tokenizer.is_control(id) {
            return &self.text;
        }
        let mut bytes = self.tokenizer.token_bytes(id);
        if self.at_start && !bytes.is_empty() {
            self.at_start = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend_from_slice(bytes);
        self.drain();
        &self.text
    }

    /// What is left when the stream ends: nothing, or U+FFFD for half a character.
    pub fn finish(&mut self) -> &str {
        self.text.clear();
        self.text.push_str(&String::from_utf8_lossy(&self.pending));
        self.pending.clear();
        &self.text
    }

    /// Moves every whole character from `pending` to `text`, replacing what can never become one.
    fn drain(&mut self) {
        let mut done = 0;
        loop {
            match str::from_utf8(&self.pending[done..]) {
                Ok(valid) => {
                    self.text.push_str(valid);
                    done = self.pending.len();
                    break;
                }
                Err(error) => {
                    let valid = done + error.valid_up_to();
                    self.text.push_str(str::from_utf8(&self.pending[done..valid]).unwrap_or(""));
                    done = valid;
                    let Some(bad) = error.error_len() else { break };
                    self.text.push('\u{fffd}');
                    done += bad;
                }
            }
        }
        self.pending.drain(..done);
    }
}
