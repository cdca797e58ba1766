//! WordPiece: the longest token that a word begins with, then the longest that the rest begins with, and so on.

use super::ids::Ids;
use crate::{Error, Result, limits};
use ahash::AHashMap;
use std::path::Path;

/// A vocabulary whose tokens inside a word have a mark in front.
pub(super) struct WordPiece {
    ids: AHashMap<String, u32>,
    /// Tokens inside a word, without the mark.
    inside: AHashMap<String, u32>,
    unknown: u32,
    /// Bytes of the longest token, without a mark.
    longest: usize,
    /// Words of more characters are unknown.
    most_chars: usize,
}

impl WordPiece {
    /// Over the tokens of a file, of which `unknown` stands for a word that cannot be written with the others.
    pub(super) fn new(
        file: &Path,
        vocab: Vec<(String, u32)>,
        unknown: &str,
        mark: &str,
        most_chars: usize,
    ) -> Result<WordPiece> {
        let mut inside = AHashMap::new();
        let mut longest = 0;
        for (text, id) in &vocab {
            if u64::from(*id) >= limits::VOCAB {
                let allowed = format!("below {}", limits::VOCAB);
                return Err(Error::invalid(file, 0, format!("id of token {text}"), id, allowed));
            }
            if text.len() > limits::TOKEN_BYTES {
                let found = format!("{} bytes", text.len());
                let allowed = format!("at most {} bytes", limits::TOKEN_BYTES);
                return Err(Error::invalid(file, 0, format!("token {id}"), found, allowed));
            }
            longest = longest.max(text.len());
            if let Some(rest) = text.strip_prefix(mark).filter(|rest| !rest.is_empty()) {
                inside.insert(rest.to_owned(), *id);
            }
        }
        let ids: AHashMap<String, u32> = vocab.into_iter().collect();
        let Some(&unknown) = ids.get(unknown) else {
            let allowed = "a token of the vocabulary";
            return Err(Error::invalid(file, 0, "unknown token", unknown, allowed));
        };
        Ok(WordPiece { ids, inside, unknown, longest, most_chars })
    }

    pub(super) fn id_of(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// How many tokens differ in their text.
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Puts the ids of `word` into `ids`; `room` is memory that one call uses for word after word.
    pub(super) fn encode(&self, word: &str, room: &mut Vec<u32>, ids: &mut Ids) -> Result<()> {
        room.clear();
        if word.chars().count() > self.most_chars {
            return ids.push(self.unknown);
        }
        let mut start = 0;
        while start < word.len() {
            let tokens = if start == 0 { &self.ids } else { &self.inside };
            let rest = &word[start..];
            let mut end = rest.len().min(self.longest);
            let found = loop {
                while !rest.is_char_boundary(end) {
                    end -= 1;
                }
                match tokens.get(&rest[..end]) {
                    Some(id) if end > 0 => break *id,
                    _ if end == 0 => return ids.push(self.unknown),
                    _ => end -= 1,
                }
            };
            room.push(found);
            start += end;
        }
        ids.extend(room)
    }
}
