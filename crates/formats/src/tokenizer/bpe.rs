//! Byte-pair encoding: a word becomes its characters, and the pair with the best rank is merged
//! until none is left.
//!
//! A word may be as long as a text: SentencePiece vocabularies are applied to whole texts. Long
//! words are therefore cut where no merge can reach across, which changes nothing in the result,
//! and memory is bounded by the piece between two cuts.

use super::ids::Ids;
use crate::{Error, Result, limits};
use ahash::{AHashMap, AHashSet};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::Path;

/// Merges as a file lists them, in one piece of text.
#[derive(Default)]
pub(super) struct Merges {
    text: String,
    /// Where the left and the right token of each merge end.
    ends: Vec<(u32, u32)>,
}

impl Merges {
    /// Adds one; its rank is its place. Texts of more than 4 GB do not come out of any file.
    pub(super) fn push(&mut self, left: &str, right: &str) {
        self.text.push_str(left);
        let middle = self.text.len() as u32;
        self.text.push_str(right);
        self.ends.push((middle, self.text.len() as u32));
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Each merge as its left token, its right token and both together.
    fn iter(&self) -> impl Iterator<Item = (&str, &str, &str)> {
        let starts = std::iter::once(0).chain(self.ends.iter().map(|&(_, end)| end as usize));
        starts.zip(&self.ends).map(|(start, &(middle, end))| {
            let (middle, end) = (middle as usize, end as usize);
            let text = &self.text;
            (&text[start..middle], &text[middle..end], &text[start..end])
        })
    }
}

/// A merge between tokens whose ids are known.
pub(super) struct Known {
    pub(super) left: u32,
    pub(super) right: u32,
    /// The token that comes of it.
    pub(super) whole: u32,
    /// The last character of the left token and the first of the right one.
    pub(super) joint: (char, char),
}

/// A model as a file describes it, not yet checked.
#[derive(Default)]
pub(super) struct Description {
    pub(super) vocab: Vec<(String, u32)>,
    pub(super) merges: Merges,
    /// Merges that no file lists, of ranks behind those of `merges`; the first id of each text.
    pub(super) known: Vec<Known>,
    pub(super) unknown: Option<String>,
    pub(super) fuse_unknown: bool,
    pub(super) byte_fallback: bool,
    pub(super) ignore_merges: bool,
}

/// The model.
pub(super) struct Bpe {
    ids: AHashMap<String, u32>,
    /// Tokens of one character, the smallest ones in a table.
    near: Vec<Option<u32>>,
    far: AHashMap<char, u32>,
    /// Rank and result of each pair.
    merges: AHashMap<(u32, u32), (u32, u32)>,
    /// The last character of the left token and the first of the right one, for every merge.
    joints: AHashSet<(char, char)>,
    bytes: Option<Box<[Option<u32>; 256]>>,
    unknown: Option<u32>,
    fuse_unknown: bool,
    ignore_merges: bool,
}

/// Characters below this are looked up in a table: GPT-2's alphabet.
const NEAR: usize = 0x200;

impl Description {
    /// Checks that everything named exists, and builds the tables.
    pub(super) fn build(self, file: &Path) -> Result<Bpe> {
        for (text, id) in &self.vocab {
            if u64::from(*id) >= limits::VOCAB {
                let allowed = format!("below {}", limits::VOCAB);
                return Err(Error::invalid(file, 0, format!("id of token {text}"), id, allowed));
            }
            if text.len() > limits::TOKEN_BYTES {
                let found = format!("{} bytes", text.len());
                let allowed = format!("at most {} bytes", limits::TOKEN_BYTES);
                return Err(Error::invalid(file, 0, format!("token {id}"), found, allowed));
            }
        }
        let mut ids = AHashMap::with_capacity(self.vocab.len());
        for (text, id) in self.vocab {
            // The first of two equal texts is the one that encodes.
            ids.entry(text).or_insert(id);
        }
        let (mut near, mut far) = (vec![None; NEAR], AHashMap::new());
        for (text, &id) in &ids {
            let mut chars = text.chars();
            if let (Some(c), None) = (chars.next(), chars.next()) {
                match near.get_mut(c as usize) {
                    Some(slot) => *slot = Some(id),
                    None => _ = far.insert(c, id),
                }
            }
        }
        let listed = self.merges.len();
        let mut merges = AHashMap::with_capacity(listed + self.known.len());
        let mut joints = AHashSet::new();
        for (rank, (left, right, whole)) in self.merges.iter().enumerate() {
            let id = |part: &str| {
                ids.get(part).copied().ok_or_else(|| {
                    let field = format!("merge {rank}");
                    Error::invalid(file, 0, field, part, "tokens of the vocabulary")
                })
            };
            merges.insert((id(left)?, id(right)?), (rank as u32, id(whole)?));
            joints.extend(left.chars().next_back().zip(right.chars().next()));
        }
        for (rank, merge) in self.known.iter().enumerate() {
            merges.insert((merge.left, merge.right), ((listed + rank) as u32, merge.whole));
            joints.insert(merge.joint);
        }
        let unknown = match &self.unknown {
            None => None,
            Some(text) => Some(*ids.get(text).ok_or_else(|| {
                let allowed = "a token of the vocabulary";
                Error::invalid(file, 0, "unknown token", text, allowed)
            })?),
        };
        let byte = |byte: usize| ids.get(&format!("<0x{byte:02X}>")).copied();
        let bytes = self.byte_fallback.then(|| Box::new(std::array::from_fn(byte)));
        let (fuse_unknown, ignore_merges) = (self.fuse_unknown, self.ignore_merges);
        Ok(Bpe { ids, near, far, merges, joints, bytes, unknown, fuse_unknown, ignore_merges })
    }
}

impl Bpe {
    pub(super) fn id_of(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// How many tokens differ in their text.
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    fn char_id(&self, c: char) -> Option<u32> {
        match self.near.get(c as usize) {
            Some(id) => *id,
            None => self.far.get(&c).copied(),
        }
    }

    /// Whether no character of any text is lost, nor a run of them put into one unknown token.
    /// `alphabet` is what texts are written in, where that is known.
    pub(super) fn keeps_all(&self, alphabet: Option<&[char; 256]>) -> bool {
        let spelled = alphabet.is_some_and(|all| all.iter().all(|&c| self.char_id(c).is_some()));
        let fallback = self.bytes.as_ref().is_some_and(|bytes| bytes.iter().all(Option::is_some));
        spelled || fallback || (self.unknown.is_some() && !self.fuse_unknown)
    }

    /// Puts the ids of `word` into `ids`.
    pub(super) fn encode(&self, word: &str, room: &mut Room, ids: &mut Ids) -> Result<()> {
        if let Some(id) = self.id_of(word).filter(|_| self.ignore_merges) {
            return ids.push(id);
        }
        let mut start = 0;
        if word.len() > limits::WORD_PIECE {
            let mut before = None;
            for (at, c) in word.char_indices() {
                let known = self.char_id(c).map(|_| c);
                if at - start >= limits::WORD_PIECE
                    && before.zip(known).is_some_and(|pair| !self.joints.contains(&pair))
                {
                    self.encode_piece(&word[start..at], room, ids)?;
                    start = at;
                }
                if at - start > limits::WORD_BYTES {
                    let cap = limits::WORD_BYTES;
                    let found = "the text has a word that cannot be tokenized in pieces";
                    let words =
                        format!("{found}: found more than {cap} bytes, allowed: at most {cap}");
                    return Err(Error::Tokenizer(words));
                }
                before = known;
            }
        }
        self.encode_piece(&word[start..], room, ids)
    }

    fn encode_piece(&self, word: &str, room: &mut Room, ids: &mut Ids) -> Result<()> {
        room.symbols.clear();
        let mut unknown = None;
        for (at, c) in word.char_indices() {
            if let Some(id) = self.char_id(c) {
                room.symbols.extend(unknown.take());
                room.symbols.push(id);
                continue;
            }
            let spelled = &word.as_bytes()[at..at + c.len_utf8()];
            if let Some(table) = &self.bytes {
                let byte = |byte: &u8| table[usize::from(*byte)];
                if spelled.iter().all(|b| byte(b).is_some()) {
                    room.symbols.extend(spelled.iter().filter_map(byte));
                    continue;
                }
            }
            if !self.fuse_unknown {
                room.symbols.extend(unknown.take());
            }
            unknown = self.unknown;
        }
        room.symbols.extend(unknown);
        if room.symbols.len() <= SHORT {
            self.merge_short(room);
            room.symbols.iter().try_for_each(|&id| ids.push(id))
        } else {
            self.merge_long(room);
            let kept = room.symbols.iter().zip(&room.next).filter(|&(_, &next)| next != GONE);
            kept.map(|(&id, _)| id).try_for_each(|id| ids.push(id))
        }
    }

    fn rank(&self, left: u32, right: u32) -> (u32, u32) {
        self.merges.get(&(left, right)).copied().unwrap_or((u32::MAX, 0))
    }

    /// Looks at all pairs before each merge: the fastest way for a few symbols.
    fn merge_short(&self, room: &mut Room) {
        let Room { symbols, pairs, .. } = room;
        pairs.clear();
        pairs.extend(symbols.windows(2).map(|pair| self.rank(pair[0], pair[1])));
        while let Some((at, &(rank, id))) =
            pairs.iter().enumerate().min_by_key(|&(at, &(rank, _))| (rank, at))
        {
            if rank == u32::MAX {
                break;
            }
            symbols[at] = id;
            symbols.remove(at + 1);
            pairs.remove(at);
            if at < pairs.len() {
                pairs[at] = self.rank(id, symbols[at + 1]);
            }
            if at > 0 {
                pairs[at - 1] = self.rank(symbols[at - 1], id);
            }
        }
    }

    /// Keeps pairs in a heap. Symbols that went into another are marked [`GONE`].
    fn merge_long(&self, room: &mut Room) {
        let Room { symbols, next, previous, heap, .. } = room;
        let count = symbols.len() as u32;
        next.clear();
        next.extend((1..count).chain([END]));
        previous.clear();
        previous.extend([END].into_iter().chain(0..count - 1));
        heap.clear();
        let entry = |rank: u32, at: u32| Reverse(u64::from(rank) << 32 | u64::from(at));
        for (at, pair) in symbols.windows(2).enumerate() {
            let (rank, _) = self.rank(pair[0], pair[1]);
            if rank != u32::MAX {
                heap.push(entry(rank, at as u32));
            }
        }
        while let Some(Reverse(top)) = heap.pop() {
            let (rank, left) = ((top >> 32) as u32, top as u32 as usize);
            let right = next[left];
            if right >= END {
                continue;
            }
            let right = right as usize;
            let (now, id) = self.rank(symbols[left], symbols[right]);
            if now != rank {
                continue;
            }
            symbols[left] = id;
            next[left] = next[right];
            next[right] = GONE;
            if let Some(slot) = previous.get_mut(next[left] as usize) {
                *slot = left as u32;
                let (rank, _) = self.rank(id, symbols[next[left] as usize]);
                if rank != u32::MAX {
                    heap.push(entry(rank, left as u32));
                }
            }
            if let Some(&before) = symbols.get(previous[left] as usize) {
                let (rank, _) = self.rank(before, id);
                if rank != u32::MAX {
                    heap.push(entry(rank, previous[left]));
                }
            }
        }
    }
}

/// Words of up to this many symbols are merged without a heap.
const SHORT: usize = 48;
/// No symbol before or behind.
const END: u32 = u32::MAX - 1;
/// No symbol any more.
const GONE: u32 = u32::MAX;

/// Memory that one call uses for word after word.
#[derive(Default)]
pub(super) struct Room {
    symbols: Vec<u32>,
    pairs: Vec<(u32, u32)>,
    next: Vec<u32>,
    previous: Vec<u32>,
    heap: BinaryHeap<Reverse<u64>>,
}
