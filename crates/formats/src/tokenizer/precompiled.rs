//! SentencePiece's normaliser: a table of replacements, found by a tree in one array (a double-array trie).

use crate::{Error, Result, limits};
use std::path::Path;
use unicode_segmentation::UnicodeSegmentation;

/// Graphemes of more bytes are replaced character by character.
const GRAPHEME: usize = 6;

/// The table.
#[derive(Debug)]
pub(super) struct Precompiled {
    tree: Vec<u32>,
    /// Replacements, each ended by a zero.
    texts: String,
}

impl Precompiled {
    /// From the text of a file: base64 of the tree's bytes (behind their number) and the replacements.
    pub(super) fn read(path: &Path, coded: &str) -> Result<Precompiled> {
        let wrong = |found: &str| {
            Error::invalid(path, 0, "precompiled_charsmap", found, "a table of replacements")
        };
        if coded.len() > limits::CHARSMAP_BYTES {
            return Err(wrong("too many bytes"));
        }
        let bytes = decode(coded).ok_or_else(|| wrong("something else than base64"))?;
        let Some((size, rest)) = bytes.split_first_chunk::<4>() else {
            return Err(wrong("no size"));
        };
        let size = u32::from_le_bytes(*size) as usize;
        if size > rest.len() || !size.is_multiple_of(4) {
            return Err(wrong("a tree of another size"));
        }
        let (tree, texts) = rest.split_at(size);
        let tree = tree.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let texts = std::str::from_utf8(texts).map_err(|_| wrong("replacements not in UTF-8"))?;
        Ok(Precompiled { tree, texts: texts.to_owned() })
    }

    /// The replacement of the shortest beginning of `text` that has one.
    fn replacement(&self, text: &str) -> Option<&str> {
        let unit = |at: usize| self.tree.get(at).copied();
        let offset = |unit: u32| ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
        let mut node = offset(unit(0)?);
        for byte in text.bytes() {
            if byte == 0 {
                return None;
            }
            node ^= usize::from(byte);
            let found = unit(node)?;
            if found & ((1 << 31) | 0xff) != u32::from(byte) {
                return None;
            }
            node ^= offset(found);
            if found >> 8 & 1 == 1 {
                let start = (unit(node)? & 0x7fff_ffff) as usize;
                let rest = self.texts.get(start..)?;
                return Some(rest.split('\0').next().unwrap_or_default());
            }
        }
        None
    }

    /// Calls `push` with every part of the normalised text.
    pub(super) fn apply(&self, text: &str, mut push: impl FnMut(&str) -> Result<()>) -> Result<()> {
        for grapheme in text.graphemes(true) {
            if grapheme.len() < GRAPHEME
                && let Some(with) = self.replacement(grapheme)
            {
                push(with)?;
                continue;
            }
            for (at, c) in grapheme.char_indices() {
                let one = &grapheme[at..at + c.len_utf8()];
                push(self.replacement(one).unwrap_or(one))?;
            }
        }
        Ok(())
    }
}

/// Base64, with or without padding.
fn decode(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for byte in text.trim_end_matches('=').bytes() {
        let six = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(six);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
        }
    }
    Some(out)
}
