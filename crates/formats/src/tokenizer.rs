//! Text to token ids and back, from `tokenizer.json` or from a GGUF vocabulary.
//!
//! Both sources are read into the same parts (a BPE, WordPiece or Unigram model, added tokens, a normaliser, a
//! pre-tokenizer) and run through the same pipeline, so a model gives the same ids whichever file
//! it came in. The ids are those of the Python `tokenizers` package; features that no published
//! decoder needs are refused by name. Words are cut and merged one after the other: memory is a small
//! multiple of the text, and [`Tokenizer::encode_limited`] stops as soon as a text is too long.
//!
//! Control tokens (`<|im_end|>` and the like) have two readings. [`Tokenizer::encode`] recognises
//! them, as the original tokenizers do. Text from a user must not be able to end its own turn:
//! [`Tokenizer::encode_text`] and the chat path ([`Escaped`]) keep them plain text.

mod added;
mod bpe;
mod detokenizer;
mod effort;
mod escape;
mod expression;
mod from_gguf;
mod from_json;
mod ids;
mod model;
mod normalise;
mod pipeline;
mod precompiled;
mod split;
mod template;
mod to_json;
mod token_bytes;
mod unigram;
mod word_piece;

use crate::checkpoint::{Checkpoint, read_capped};
use crate::gguf::Gguf;
use crate::{Error, Result, limits};
pub use detokenizer::Detokenizer;
pub use escape::{Escaped, Escaper};
use pipeline::Pipeline;
use std::path::Path;
use std::sync::Arc;
pub use template::PairToken;
use token_bytes::TokenBytes;

/// A vocabulary with the rules to apply it. Immutable; share it behind an [`Arc`].
#[derive(Debug)]
pub struct Tokenizer {
    pipeline: Pipeline,
    bytes: TokenBytes,
    escaper: Arc<Escaper>,
    longest: Option<usize>,
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

    /// The vocabulary in GGUF metadata as files of a folder, for programs that read no GGUF: `tokenizer.json` and
    /// `tokenizer_config.json` with the chat template, by name.
    pub fn files_of(gguf: &Gguf) -> Result<[(&'static str, serde_json::Value); 2]> {
        to_json::files(gguf)
    }

    fn new((pipeline, bytes): (Pipeline, TokenBytes)) -> Self {
        let escaper = Arc::new(Escaper::new(pipeline.control_texts()));
        // An unknown token stands for one character.
        let longest = pipeline.shrinks().and_then(|n| n.checked_mul(bytes.longest().max(4)));
        Self { pipeline, bytes, escaper, longest }
    }

    /// Ids of `text`, control tokens recognised. `add_special` adds what the original tokenizer
    /// adds around a whole text, usually a begin-of-sequence token.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.encode_limited(text, add_special, usize::MAX)
    }

    /// As [`Tokenizer::encode`], but [`Error::TooLong`] as soon as there are more than
    /// `max_tokens` ids, those of `add_special` included. A text that cannot fit by its length is
    /// refused at once; of any other, no more is tokenized than fits.
    pub fn encode_limited(
        &self,
        text: &str,
        add_special: bool,
        max_tokens: usize,
    ) -> Result<Vec<u32>> {
        self.run(text, None, add_special, max_tokens)
    }

    /// Ids of `text` with control tokens read as plain text.
    pub fn encode_text(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.encode_text_limited(text, add_special, usize::MAX)
    }

    /// As [`Tokenizer::encode_text`], with at most `max_tokens` ids, as in
    /// [`Tokenizer::encode_limited`].
    pub(crate) fn encode_text_limited(
        &self,
        text: &str,
        add_special: bool,
        max_tokens: usize,
    ) -> Result<Vec<u32>> {
        self.refuse_long(text.len(), max_tokens)?;
        let escaped = self.escaper.one(text);
        self.run(&escaped.text, Some(escaped.marker), add_special, max_tokens)
    }

    /// Ids of a rendered chat: control tokens that the template wrote are recognised, those that
    /// came in with a message are text. Adds nothing; templates write their own begin-of-sequence.
    pub fn encode_chat(&self, rendered: &Escaped) -> Result<Vec<u32>> {
        self.encode_chat_limited(rendered, usize::MAX)
    }

    /// As [`Tokenizer::encode_chat`], with at most `max_tokens` ids, as in
    /// [`Tokenizer::encode_limited`].
    pub fn encode_chat_limited(&self, rendered: &Escaped, max_tokens: usize) -> Result<Vec<u32>> {
        self.run(&rendered.text, Some(rendered.marker), false, max_tokens)
    }

    fn run(
        &self,
        text: &str,
        marker: Option<char>,
        add_special: bool,
        max_tokens: usize,
    ) -> Result<Vec<u32>> {
        let marks = marker.map_or(0, |marker| text.matches(marker).count() * marker.len_utf8());
        self.refuse_long(text.len() - marks, max_tokens)?;
        self.pipeline.encode(text, marker, add_special, max_tokens)
    }

    /// Refuses a text of `bytes` that is longer than any text may be, or than `max_tokens` of the
    /// longest token.
    fn refuse_long(&self, bytes: usize, max_tokens: usize) -> Result<()> {
        if bytes > limits::ENCODE_BYTES {
            let cap = limits::ENCODE_BYTES;
            let words = format!("text: found {bytes} bytes, allowed: at most {cap}");
            return Err(Error::Tokenizer(words));
        }
        if self.fewest_tokens(bytes) > max_tokens {
            return Err(Error::TooLong { max_tokens });
        }
        Ok(())
    }

    /// The most bytes of text that one token can stand for; `None` for a tokenizer that may drop
    /// any amount of text (one that strips spaces, or joins unknown characters).
    pub fn longest_token(&self) -> Option<usize> {
        self.longest
    }

    /// How many tokens a text of `bytes` has at least, by the length of the longest token: a bound
    /// that needs only the text's length.
    pub fn fewest_tokens(&self, bytes: usize) -> usize {
        self.longest.map_or(0, |longest| bytes.div_ceil(longest))
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

    /// Tokens of a pair of texts, such as a question and a passage, with the special tokens between and around them.
    /// Where they are more than `most`, the longer text is cut, or both. An error for a tokenizer that says
    /// nothing about pairs.
    pub fn encode_pair(&self, first: &str, second: &str, most: usize) -> Result<Vec<PairToken>> {
        let (first, second) = (self.encode(first, false)?, self.encode(second, false)?);
        let joined = self.pipeline.template().join(&first, &second, most);
        joined.ok_or_else(|| Error::Tokenizer("the tokenizer has no form for pairs".into()))
    }

    /// How many tokens `add_special` adds behind a text.
    pub fn closing(&self) -> usize {
        self.pipeline.template().suffix.len()
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
