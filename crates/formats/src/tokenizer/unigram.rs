//! Unigram: of all ways to write a word with tokens, the one with the highest sum of scores.

use super::ids::Ids;
use crate::{Error, Result, limits};
use ahash::AHashMap;
use std::path::Path;

/// How much worse an unknown character is than the worst token.
const UNKNOWN: f64 = 10.0;

/// A vocabulary with scores.
pub(super) struct Unigram {
    ids: AHashMap<String, u32>,
    scores: Vec<f64>,
    /// The tree of all tokens: the node after a byte, and the token that ends at a node.
    edges: AHashMap<(u32, u8), u32>,
    ends: Vec<Option<u32>>,
    unknown: u32,
    unknown_score: f64,
    bytes: Option<Box<[Option<u32>; 256]>>,
}

/// The best way to write a text up to some byte.
#[derive(Clone, Copy, Debug)]
struct Best {
    score: f64,
    /// Where its last token starts; `None` if there is no way.
    start: Option<u32>,
    /// Whether that is an unknown character.
    unknown: bool,
}

/// Memory that one call uses for word after word.
#[derive(Default)]
pub(super) struct Room {
    best: Vec<Best>,
    /// Ends of tokens, the last first, and whether they are unknown.
    cuts: Vec<(u32, u32, bool)>,
}

impl Unigram {
    /// Over the tokens of a file, in the order of their ids. `unknown` stands for what cannot be written.
    pub(super) fn new(
        file: &Path,
        vocab: &[(String, f64)],
        unknown: usize,
        byte_fallback: bool,
    ) -> Result<Unigram> {
        if unknown >= vocab.len() {
            let allowed = format!("below {}", vocab.len());
            return Err(Error::invalid(file, 0, "model.unk_id", unknown, allowed));
        }
        let (mut ids, mut edges, mut ends) = (AHashMap::new(), AHashMap::new(), vec![None]);
        for (id, (text, score)) in vocab.iter().enumerate() {
            if text.len() > limits::TOKEN_BYTES || !score.is_finite() {
                let found = format!("{} bytes, score {score}", text.len());
                let allowed = format!("at most {} bytes, a finite score", limits::TOKEN_BYTES);
                return Err(Error::invalid(file, 0, format!("token {id}"), found, allowed));
            }
            ids.insert(text.clone(), id as u32);
            let mut node = 0;
            for byte in text.bytes() {
                node = *edges.entry((node, byte)).or_insert_with(|| {
                    ends.push(None);
                    ends.len() as u32 - 1
                });
            }
            if node != 0 {
                ends[node as usize] = Some(id as u32);
            }
        }
        let scores: Vec<f64> = vocab.iter().map(|(_, score)| *score).collect();
        let least = scores.iter().copied().fold(f64::INFINITY, f64::min);
        let byte = |byte: usize| ids.get(&format!("<0x{byte:02X}>")).copied();
        let bytes = byte_fallback.then(|| Box::new(std::array::from_fn(byte)));
        let (unknown, unknown_score) = (unknown as u32, least - UNKNOWN);
        Ok(Unigram { ids, scores, edges, ends, unknown, unknown_score, bytes })
    }

    pub(super) fn id_of(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// How many tokens differ in their text.
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Puts the ids of `word` into `ids`.
    pub(super) fn encode(&self, word: &str, room: &mut Room, ids: &mut Ids) -> Result<()> {
        if word.len() > limits::WORD_BYTES {
            let cap = limits::WORD_BYTES;
            let found = "the text has a word that cannot be tokenized in pieces";
            let words = format!("{found}: found more than {cap} bytes, allowed: at most {cap}");
            return Err(Error::Tokenizer(words));
        }
        self.find(word, room);
        room.cuts.clear();
        let mut end = word.len();
        while let Some(start) = room.best[end].start {
            let unknown = room.best[end].unknown;
            match room.cuts.last_mut() {
                // Unknown characters side by side are one token.
                Some((from, _, true)) if unknown => *from = start,
                _ => room.cuts.push((start, end as u32, unknown)),
            }
            end = start as usize;
        }
        for &(start, end, _) in room.cuts.iter().rev() {
            let text = &word[start as usize..end as usize];
            match (self.id_of(text), &self.bytes) {
                (Some(id), _) => ids.push(id)?,
                (None, Some(bytes)) if text.bytes().all(|b| bytes[usize::from(b)].is_some()) => {
                    let spelled = text.bytes().filter_map(|b| bytes[usize::from(b)]);
                    spelled.into_iter().try_for_each(|id| ids.push(id))?;
                }
                _ => ids.push(self.unknown)?,
            }
        }
        Ok(())
    }

    /// The best ways to write `word` up to each of its characters.
    fn find(&self, word: &str, room: &mut Room) {
        let none = Best { score: 0.0, start: None, unknown: false };
        room.best.clear();
        room.best.resize(word.len() + 1, none);
        for (start, c) in word.char_indices() {
            let before = room.best[start].score;
            let (mut node, mut one) = (0, false);
            let mut improve = |end: usize, score: f64, unknown: bool| {
                let best = &mut room.best[end];
                if best.start.is_none() || score > best.score {
                    *best = Best { score, start: Some(start as u32), unknown };
                }
            };
            for (at, byte) in word.bytes().enumerate().skip(start) {
                let Some(&next) = self.edges.get(&(node, byte)) else { break };
                node = next;
                if let Some(id) = self.ends[node as usize] {
                    let unknown = id == self.unknown;
                    improve(at + 1, before + self.scores[id as usize], unknown);
                    one |= at + 1 == start + c.len_utf8();
                }
            }
            if !one {
                improve(start + c.len_utf8(), before + self.unknown_score, true);
            }
        }
    }
}
