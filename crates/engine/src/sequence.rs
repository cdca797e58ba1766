//! One continuation of a request, and where it stands.
//!
//! A sequence is *waiting* (it holds nothing), or *seated* (it has a seat and pages). A seated one
//! may be *leaving*: no more steps are launched for it, and when the last one in flight is back its
//! seat and pages are freed. Nothing is freed while a step in flight can write it.

use crate::exec::{Geometry, Kept, Page, Seat};
use crate::pages::Cursor;
use crate::pages::tree::Node;
use crate::plant::{Plant, planted};
use crate::request::{Drafts, Embed, Pooling, RequestId, Sampling, Token, TokenLogprob};
use crate::thought::Thought;
use grammar::Matcher;
use std::cmp::Reverse;
use std::sync::Arc;

/// What all continuations of a request share.
#[derive(Debug)]
pub(crate) struct Spec {
    pub(crate) sampling: Sampling,
    /// Sorted: the caller's, and the model's own unless they are ignored.
    pub(crate) stops: Vec<Token>,
    pub(crate) priority: i32,
    pub(crate) tenant: u64,
    pub(crate) adapter: u64,
    pub(crate) call: u64,
    pub(crate) prompt_logprobs: Option<u32>,
    pub(crate) embed: Option<Embed>,
}

/// One continuation. In steady decode a step reads and writes only these two cache lines of it; those of
/// all sequences lie side by side. The rest is in [`ColdState`].
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Sequence {
    /// The prompt and the answer so far: everything a device confirmed.
    pub(crate) tokens: Vec<Token>,
    pub(crate) id: RequestId,
    pub(crate) may_stop: StopFilter,
    pub(crate) cold: Box<ColdState>,
    pub(crate) choice: u32,
    pub(crate) prompt_len: u32,
    /// The most tokens it may have before its thought is looked at or it ends, prompt included.
    pub(crate) max_len: u32,
    /// [`crate::request::Output::Prefilled`] was emitted.
    pub(crate) announced: bool,
    /// Overtaken often enough to go before all others.
    pub(crate) due: bool,
    /// Its next token needs a mask.
    pub(crate) guided: bool,
    /// Its rows return one token, whatever the device could.
    pub(crate) plain: bool,
    pub(crate) place: Place,
}

const _: () = assert!(size_of::<Option<Sequence>>() == 128);

/// The state that steady decode does not read.
#[derive(Debug)]
pub(crate) struct ColdState {
    pub(crate) spec: Arc<Spec>,
    /// The most tokens it may ever have, prompt included.
    pub(crate) limit: u32,
    pub(crate) matcher: Option<Matcher>,
    pub(crate) thought: Thought,
    /// Its number in order of arrival.
    pub(crate) arrival: u64,
    /// Its turn in order of service ([`crate::sched`]'s turns).
    pub(crate) turn: u64,
    /// Choices that will split off once the prompt is launched.
    pub(crate) unforked: u32,
    /// Later requests that were seated while this one waited.
    pub(crate) overtaken: u32,
    /// How often it was preempted for pages.
    pub(crate) sent_back: u32,
    /// The pool's epoch when the store was last asked for its prefix.
    pub(crate) looked_up: Option<u64>,
    /// How often its pages were loaded from the store.
    pub(crate) fetches: u32,
    /// Prompt tokens found in the tree when it was first seated.
    pub(crate) cached: u32,
    pub(crate) scores: Vec<TokenLogprob>,
    /// Hidden states added up so far; empty before the first.
    pub(crate) hidden: Vec<f64>,
    /// Of a seated one: pages to copy into those at these places of its table before the next row runs.
    pub(crate) copies: Vec<(Page, u32)>,
    /// Of a seated one: pages for the rest of its prompt, in layers that see every token.
    pub(crate) reserve: Vec<Page>,
    /// Of a seated one: positions at which it saves what its seat carries; 0 for none.
    pub(crate) marks: [u32; 2],
    /// Of a seated one: the copy that its seat begins with, kept until it joins.
    pub(crate) restore: Option<u32>,
    /// Of a seated one: copies of what its seat carried, which are not yet in the tree.
    pub(crate) saved: Vec<Saved>,
    /// Of a seated one: steps since its last row that fed other prompts instead.
    pub(crate) passed: u32,
    /// What drafts did for it.
    pub(crate) drafts: Drafts,
}

/// A copy of what a seat carried.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Saved {
    /// Behind so many pages of tokens.
    pub(crate) pages: u32,
    pub(crate) slot: u32,
    /// The node of the last of them, once it is published.
    pub(crate) node: Option<Node>,
}

/// A filter that excludes most tokens that are not stop tokens without reading the list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StopFilter(u64);

impl StopFilter {
    pub(crate) fn of(stops: &[Token]) -> StopFilter {
        StopFilter(stops.iter().fold(0, |bits, token| bits | 1 << (token % 64)))
    }

    /// False only for a token that is not one of them.
    pub(crate) fn passes(self, token: Token) -> bool {
        self.0 >> (token % 64) & 1 == 1
    }
}

/// Where a sequence is.
#[derive(Debug)]
pub(crate) enum Place {
    Waiting,
    Seated(Seated),
}

/// A seat and what comes with it.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Seated {
    /// The pages of each page of tokens in order of position, one for each page table of the device; the scratch page
    /// where no later token needs one.
    pub(crate) table: Vec<Page>,
    pub(crate) seat: Seat,
    /// Pages of tokens that the device has.
    pub(crate) sent: u32,
    /// Pages of tokens, from the first, whose pages in layers with a window were given back.
    pub(crate) freed: u32,
    /// Tokens fed by launched steps, if every row in flight returns the most it may.
    pub(crate) fed: u32,
    /// Of these, by confirmed ones.
    pub(crate) confirmed: u32,
    /// Rows in flight.
    pub(crate) flying: u32,
    /// Most tokens that these may return.
    pub(crate) ahead: u32,
    /// Pages offered to the tree.
    pub(crate) published: u32,
    /// The page it writes next may have another holder.
    pub(crate) shared: bool,
    /// The device knows the seat.
    pub(crate) joined: bool,
    /// The device holds the token that the next decode row feeds.
    pub(crate) primed: bool,
    pub(crate) leaving: Option<Leaving>,
    pub(crate) cursor: Cursor,
}

impl Seated {
    /// Pages of tokens in its table.
    pub(crate) fn pages(&self, kept: Kept) -> u32 {
        let entries = self.table.len() as u32;
        if kept.width() == 1 { entries } else { entries / kept.width() }
    }

    /// Tokens that its table has pages for.
    pub(crate) fn room(&self, geometry: &Geometry) -> u32 {
        self.pages(geometry.kept) * geometry.page_size
    }

    /// Pages that it holds.
    pub(crate) fn held(&self, kept: Kept) -> u32 {
        self.table.len() as u32 - self.freed * kept.windowed
    }
}

/// Why a seated sequence gets no more rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// Preempted: it will wait again.
    ToQueue,
    /// Its end was announced.
    Ended,
}

/// What a seated sequence could do in the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Nothing until a result comes back.
    Nothing,
    /// The same, because of a grammar.
    Held,
    /// Feed the token that the device holds.
    Decode,
    /// Feed known tokens up to here.
    Prompt {
        /// One past the last position to feed.
        end: u32,
    },
}

/// Order of service; the smallest goes first and is preempted last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    not_due: bool,
    priority: Reverse<i32>,
    turn: u64,
    arrival: u64,
    choice: u32,
}

impl Sequence {
    pub(crate) fn rank(&self) -> Rank {
        Rank {
            not_due: !self.due,
            // Among those that waited too long only the order of arrival counts.
            priority: Reverse(if self.due { 0 } else { self.cold.spec.priority }),
            turn: if self.due { 0 } else { self.cold.turn },
            arrival: self.cold.arrival,
            choice: self.choice,
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub(crate) fn answer_len(&self) -> u32 {
        self.len() - self.prompt_len
    }

    pub(crate) fn seated(&self) -> Option<&Seated> {
        match &self.place {
            Place::Seated(seated) => Some(seated),
            Place::Waiting => None,
        }
    }

    pub(crate) fn seated_mut(&mut self) -> Option<&mut Seated> {
        match &mut self.place {
            Place::Seated(seated) => Some(seated),
            Place::Waiting => None,
        }
    }

    /// Known tokens that have to be fed before anything else can happen. A request for no tokens at
    /// all never needs the logits of its last one, unless its hidden state is wanted.
    pub(crate) fn goal(&self) -> u32 {
        let whole = self.wants_answer() || self.cold.spec.embed.is_some();
        if whole { self.len() } else { self.len() - 1 }
    }

    pub(crate) fn wants_answer(&self) -> bool {
        self.max_len > self.prompt_len
    }

    /// Whether prompt tokens are still to be scored.
    pub(crate) fn scoring(&self) -> bool {
        // Test the hot field first: steady decode does not read the cold state.
        !self.announced && self.cold.spec.prompt_logprobs.is_some()
    }

    /// Whether every prompt token has to be fed, cached or not, because each is reported.
    pub(crate) fn needs_every_token(&self) -> bool {
        let every = |embed: Embed| embed.pooling != Pooling::Last;
        let every = self.cold.spec.embed.is_some_and(every);
        self.scoring() || (every && !planted(Plant::ReuseForMean))
    }

    /// The hidden states a chunk up to `end` is asked for, if any.
    pub(crate) fn asks_hidden(&self, end: u32) -> Option<Pooling> {
        let pooling = self.cold.spec.embed?.pooling;
        (pooling == Pooling::Mean || end == self.goal()).then_some(pooling)
    }

    /// Adds what a chunk reported.
    pub(crate) fn add_hidden(&mut self, part: &[f64]) {
        self.cold.hidden.resize(part.len(), 0.0);
        self.cold.hidden.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }

    /// The vector, once every chunk has reported.
    pub(crate) fn vector(&mut self, embed: Embed) -> Vec<f32> {
        let sum = std::mem::take(&mut self.cold.hidden);
        let count = match embed.pooling {
            Pooling::Mean => f64::from(self.prompt_len),
            Pooling::Last | Pooling::Model => 1.0,
        };
        let length = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        let by = if embed.unit && length > 0.0 { length } else { count };
        sum.iter().map(|x| (x / by) as f32).collect()
    }

    /// Most tokens that its decode rows may return on a device whose rows return up to `tokens`.
    pub(crate) fn widest(&self, tokens: u32) -> u32 {
        if self.plain { 1 } else { tokens }
    }

    /// Its seat and position if it is in steady decode: the next row feeds the token that the device holds, into an
    /// unshared page that the device knows, with pages for `depth` more steps of `most` tokens each. Such a row needs
    /// no other input. Implies [`Work::Decode`] and that the answer has room for `most` tokens.
    pub(crate) fn is_steady_decode(
        &self,
        geometry: &Geometry,
        depth: u32,
        most: u32,
    ) -> Option<(Seat, u32)> {
        let at = self.seated()?;
        let (pages, page_size) = (at.pages(geometry.kept), geometry.page_size);
        let ready = at.joined && at.primed && !at.shared && at.leaving.is_none() && !self.guided;
        let room = at.sent == pages && at.fed + (depth + 1) * most <= pages * page_size;
        (ready && room && at.fed + most < self.max_len).then_some((at.seat, at.fed))
    }

    /// The most tokens that its next decode row may return where a row may return `most`, limited by its pages and
    /// by the rest of the answer. With a grammar it is one: the mask is for one position, and the next mask depends on
    /// the token chosen.
    pub(crate) fn most_next(&self, geometry: &Geometry, most: u32) -> u32 {
        let Some(at) = self.seated() else { return 1 };
        if self.guided && !planted(Plant::BlindList) {
            return 1;
        }
        let mut pages = at.room(geometry).saturating_sub(at.fed);
        if planted(Plant::MissAhead) {
            pages += 1;
        }
        let wanted = self.max_len.saturating_sub(at.fed + 1);
        most.min(pages).min(wanted).max(1)
    }

    pub(crate) fn work(&self) -> Work {
        let Some(at) = self.seated() else { return Work::Nothing };
        if at.leaving.is_some() {
            return Work::Nothing;
        }
        let goal = self.goal();
        let last = self.len() + at.ahead - 1;
        if at.fed == last && self.wants_answer() && (at.primed || !at.joined) {
            // The token after the last one has to be wanted, and with a grammar its mask depends on
            // a token that is still being computed: such a row cannot run ahead.
            let full = self.len() + at.ahead >= self.max_len;
            let blind = self.guided && at.ahead > 0;
            return match (full, blind) {
                (true, _) => Work::Nothing,
                (false, true) => Work::Held,
                (false, false) => Work::Decode,
            };
        }
        if at.fed < goal { Work::Prompt { end: goal } } else { Work::Nothing }
    }
}

/// Names a sequence while it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(u32);

/// All living sequences.
#[derive(Default)]
pub(crate) struct Sequences {
    slots: Vec<Option<Sequence>>,
    vacant: Vec<Key>,
}

impl Sequences {
    pub(crate) fn insert(&mut self, sequence: Sequence) -> Key {
        if let Some(key) = self.vacant.pop() {
            self.slots[key.0 as usize] = Some(sequence);
            return key;
        }
        self.slots.push(Some(sequence));
        Key(self.slots.len() as u32 - 1)
    }

    pub(crate) fn remove(&mut self, key: Key) -> Sequence {
        self.vacant.push(key);
        self.slots[key.0 as usize].take().expect("a key names a living sequence")
    }

    pub(crate) fn get(&self, key: Key) -> Option<&Sequence> {
        self.slots[key.0 as usize].as_ref()
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut Sequence> {
        self.slots[key.0 as usize].as_mut()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.len() == self.vacant.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.slots.iter().flatten()
    }
}

impl std::ops::Index<Key> for Sequences {
    type Output = Sequence;
    fn index(&self, key: Key) -> &Sequence {
        self.slots[key.0 as usize].as_ref().expect("a key names a living sequence")
    }
}

impl std::ops::IndexMut<Key> for Sequences {
    fn index_mut(&mut self, key: Key) -> &mut Sequence {
        self.slots[key.0 as usize].as_mut().expect("a key names a living sequence")
    }
}
