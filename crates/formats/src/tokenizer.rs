//! Text to token ids and back, from `tokenizer.json` or from a GGUF vocabulary.
//!
//! Both sources are read into the same parts (a BPE model, added tokens, a normaliser, a
//! pre-tokenizer) and run through the same pipeline, so a model gives the same ids whichever file
//! it came in. The algorithms are the `tokenizers` crate's; what is ours is everything around
//! them: sizes are checked before the crate sees them, and what a published decoder does not need
//! is refused by name.
//!
//! Control tokens (`<|im_end|>` and the like) have two readings. [`Tokenizer::encode`] recognises
//! them, as the original tokenizers do. Text from a user must not be able to end its own turn:
//! [`Tokenizer::encode_text`] and the chat path ([`Escaped`]) keep them plain text.

mod detokenizer;
mod escape;
mod from_gguf;
mod from_json;
mod pipeline;
mod token_bytes;

use crate::checkpoint::{Checkpoint, read_capped};
use crate::gguf::Gguf;
use crate::{Error, Result, limits};
pub use detokenizer::Detokenizer;
pub use escape::{Escaped, Escaper};
use pipeline::Pipeline;
use std::path::Path;
use std::sync::Arc;
use token_bytes::TokenBytes;

/// A vocabulary with the rules to apply it. Immutable; share it behind an [`Arc`].
#[derive(Debug)]
pub struct Tokenizer {
    pipeline: Pipeline,
    bytes: TokenBytes,
    escaper: Arc<Escaper>,
}

impl Tokenizer {
    /// The tokenizer of an open checkpoint: inside it when it is GGUF, `tokenizer.json` beside it
    /// otherwise.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint.gguf() {
            Some(gguf) => Self::from_gguf(gguf),
            None => Self::from_folder(checkpoint.folder()),
        }
    }

    /// The `tokenizer.json` of a folder.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        Self::from_json(&path, &read_capped(&path, limits::TOKENIZER_BYTES)?)
    }

    /// The bytes of a `tokenizer.json`. The path is for error messages.
    pub fn from_json(path: &Path, json: &[u8]) -> Result<Self> {
        Ok(Self::new(from_json::read(path, json)?))
    }

    /// The vocabulary in GGUF metadata: `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        Ok(Self::new(from_gguf::read(gguf)?))
    }

    fn new((pipeline, bytes): (Pipeline, TokenBytes)) -> Self {
        let escaper = Arc::new(Escaper::new(pipeline.control_texts()));
        Self { pipeline, bytes, escaper }
    }

    /// Ids of `text`, control tokens recognised. `add_special` adds what the original tokenizer
    /// adds around a whole text, usually a begin-of-sequence token.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.pipeline.encode(text, None, add_special)
    }

    /// Ids of `text` with control tokens read as plain text.
    pub fn encode_text(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let escaped = self.escaper.one(text);
        self.pipeline.encode(&escaped.text, Some(escaped.marker), add_special)
    }

    /// Ids of a rendered chat: control tokens that the template wrote are recognised, those that
    /// came in with a message are text. Adds nothing; templates write their own begin-of-sequence.
    pub fn encode_chat(&self, rendered: &Escaped) -> Result<Vec<u32>> {
        self.pipeline.encode(&rendered.text, Some(rendered.marker), false)
    }

    /// Ids of bytes that should be UTF-8; what is not becomes U+FFFD, as Python's "replace" does.
    pub fn encode_bytes(&self, bytes: &[u8], add_special: bool) -> Result<Vec<u32>> {
        self.encode(&String::from_utf8_lossy(bytes), add_special)
    }

    /// The text of `ids` without control tokens. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.decode_with(ids, true)
    }

    /// The text of `ids`, control tokens written out when `skip_special` is false.
    pub fn decode_with(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            if !(skip_special && self.bytes.is_control(id)) {
                bytes.extend_from_slice(self.bytes.get(id));
            }
        }
        let start = usize::from(self.bytes.strips_first_space() && bytes.first() == Some(&b' '));
        String::from_utf8_lossy(&bytes[start..]).into_owned()
    }

    /// The bytes that `id` stands for: part of a character, perhaps, for a byte-level token; its
    /// name, for a control token; nothing, for an id without a token.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id)
    }

    /// Whether `id` is a control token: not text, and left out of decoded text.
    pub fn is_control(&self, id: u32) -> bool {
        self.bytes.is_control(id)
    }

    /// Every control token's id, ascending.
    pub fn control_ids(&self) -> impl Iterator<Item = u32> {
        (0..self.vocab_size() as u32).filter(|&id| self.bytes.is_control(id))
    }

    /// The id of the token written `text`, control or not.
    pub fn id_of(&self, text: &str) -> Option<u32> {
        self.pipeline.id_of(text)
    }

    /// One more than the largest id. The model's vocabulary may be larger still, for padding.
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }

    /// What keeps control tokens in messages from being recognised; for chat templates.
    pub fn escaper(&self) -> &Arc<Escaper> {
        &self.escaper
    }

    /// Whether decoded text loses one leading space: the mark SentencePiece puts before a text.
    fn strips_first_space(&self) -> bool {
        self.bytes.strips_first_space()
    }
}

fn refuse_long(text: &str) -> Result<()> {
    if text.len() <= limits::ENCODE_BYTES {
        return Ok(());
    }
    let cap = limits::ENCODE_BYTES;
    Err(Error::Tokenizer(format!("text: found {} bytes, allowed: at most {cap}", text.len())))
}
