//! What each token stands for, as bytes: one table for decoding, streaming and grammars.

use super::added::AddedToken;
use super::split::ALPHABET;
use crate::{Error, Result, limits};
use std::path::Path;

/// How token texts spell bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Each character is one byte, in GPT-2's alphabet.
    ByteLevel,
    /// `▁` is a space, `<0x0A>` is a byte, all else is itself.
    SentencePiece {
        /// Whether a text begins with a space that is not part of it.
        strips_first_space: bool,
    },
    /// `##` continues a word, all else begins one.
    WordPiece,
}

#[derive(Debug)]
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    /// Where each token ends in `bytes`; it starts where the one before ends.
    ends: Vec<u32>,
    control: Vec<bool>,
    strips_first_space: bool,
}

impl TokenBytes {
    /// The table of a vocabulary with its added tokens, which are spelled as they are.
    pub(super) fn new(
        file: &Path,
        spelling: Spelling,
        vocab: &[(String, u32)],
        added: &[AddedToken],
    ) -> Result<Self> {
        let ids = vocab.iter().map(|(_, id)| *id).chain(added.iter().map(|token| token.id));
        let count = ids.max().map_or(0, |id| id as usize + 1);
        if count as u64 > limits::VOCAB {
            let allowed = format!("below {}", limits::VOCAB);
            return Err(Error::invalid(file, 0, "largest token id", count - 1, allowed));
        }
        let mut texts: Vec<Option<(&str, bool)>> = vec![None; count];
        for (text, id) in vocab {
            texts[*id as usize] = Some((text, false));
        }
        let mut control = vec![false; count];
        for token in added {
            texts[token.id as usize] = Some((&token.content, true));
            control[token.id as usize] = token.special;
        }
        let mut table = Self {
            bytes: Vec::new(),
            ends: Vec::with_capacity(count),
            control,
            strips_first_space: matches!(
                spelling,
                Spelling::SentencePiece { strips_first_space: true } | Spelling::WordPiece
            ),
        };
        let alphabet = alphabet();
        for text in texts {
            match (text, spelling) {
                (None, _) => {}
                (Some((text, true)), _) => table.bytes.extend_from_slice(text.as_bytes()),
                (Some((text, false)), Spelling::ByteLevel) => {
                    table.push_byte_level(text, &alphabet)
                }
                (Some((text, false)), Spelling::SentencePiece { .. }) => table.push_piece(text),
                (Some((text, false)), Spelling::WordPiece) => match text.strip_prefix("##") {
                    Some(rest) => table.bytes.extend_from_slice(rest.as_bytes()),
                    None => table.bytes.extend(b" ".iter().chain(text.as_bytes())),
                },
            }
            table.ends.push(table.bytes.len() as u32);
        }
        Ok(table)
    }

    fn push_byte_level(&mut self, text: &str, bytes: &[Option<u8>]) {
        for c in text.chars() {
            match bytes.get(c as usize).copied().flatten() {
                Some(byte) => self.bytes.push(byte),
                None => self.bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
    }

    fn push_piece(&mut self, text: &str) {
        match byte_token(text) {
            Some(byte) => self.bytes.push(byte),
            None => self.bytes.extend_from_slice(text.replace('▁', " ").as_bytes()),
        }
    }

    pub(super) fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }

    pub(super) fn is_control(&self, id: u32) -> bool {
        self.control.get(id as usize).copied().unwrap_or(false)
    }

    /// Bytes of the longest token.
    pub(super) fn longest(&self) -> usize {
        let starts = std::iter::once(&0).chain(&self.ends);
        self.ends.iter().zip(starts).map(|(end, start)| (end - start) as usize).max().unwrap_or(0)
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn strips_first_space(&self) -> bool {
        self.strips_first_space
    }
}

/// The byte of a token written `<0x0A>`.
pub(super) fn byte_token(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok()).flatten()
}

/// The byte each character stands for in GPT-2's alphabet.
fn alphabet() -> Vec<Option<u8>> {
    let mut bytes = vec![None; 0x200];
    for (byte, &c) in ALPHABET.iter().enumerate() {
        bytes[c as usize] = Some(byte as u8);
    }
    bytes
}
