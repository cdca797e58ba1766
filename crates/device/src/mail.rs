//! The host's half of the communication with the device: mail for the next launch goes out through two banks, what a
//! launch produced comes back through a ring. Both lie in memory that host and device address; no copy is launched
//! and no event is waited for.
//!
//! A bank is written only when its last launch is confirmed, so the device never reads a bank that is
//! being written. A ring entry carries its launch number, written last and checked before and after
//! the entry is copied, so an entry is seen whole or not at all. Word offsets are those of
//! [`crate::step`].

use crate::arena::ArenaInner;
use crate::ops::require;
use crate::step::{
    JOIN_WORDS, MailLayout, PARAM_WORDS, StepLimits, StepState, mail as header, ring,
};
use crate::{Arena, Error, Region, Result, Span};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// 32-bit words that host and device share.
pub trait Words {
    /// Reads a word.
    fn get(&self, index: u32, order: Ordering) -> u32;
    /// Writes a word.
    fn set(&self, index: u32, value: u32, order: Ordering);
    /// A memory fence between earlier and later reads.
    fn fence(&self, order: Ordering);
}

/// A span of an arena's host-mapped region. Keeps the arena alive.
#[derive(Debug)]
pub struct Mapped {
    base: *const AtomicU32,
    words: u32,
    _arena: Arc<ArenaInner>,
}

// SAFETY: all access is atomic.
unsafe impl Send for Mapped {}

impl Mapped {
    /// The words of a span of [`Region::HostMapped`]. Devices store nothing there but words that they read and write
    /// atomically.
    pub fn new(arena: &Arena, span: Span) -> Result<Mapped> {
        arena.inner.check("mail", span)?;
        arena.inner.check_open("mail")?;
        require(span.region == Region::HostMapped, "mail", || {
            format!("{} is not memory that host and device share", span.region.name())
        })?;
        let base = arena.inner.memory.host_base(span.region);
        let base = base.map(|base| base.wrapping_add(span.offset as usize).cast::<AtomicU32>());
        let base = base.filter(|base| base.is_aligned());
        let base = base.ok_or_else(|| Error::Contract {
            op: "mail".into(),
            problem: format!("the host cannot address words at byte {}", span.offset),
        })?;
        let words = u32::try_from(span.len / 4).map_err(|_| Error::Contract {
            op: "mail".into(),
            problem: format!("{} bytes are more words than 32 bits can count", span.len),
        })?;
        Ok(Mapped { base: base.cast_const(), words, _arena: arena.inner.clone() })
    }

    /// Writes consecutive words. Each word is written atomically, also if others read or write it at the same time; a
    /// running launch may read any mixture of old and new words.
    ///
    /// # Panics
    /// If they do not all lie inside the span.
    pub fn put(&self, at: u32, words: &[u32]) {
        let end = u64::from(at) + words.len() as u64;
        assert!(end <= u64::from(self.words), "words {at}..{end} of {}", self.words);
        // SAFETY: inside the span, aligned, alive with the arena, and only accessed atomically.
        let to = unsafe { std::slice::from_raw_parts(self.base.add(at as usize), words.len()) };
        for (to, word) in to.iter().zip(words) {
            to.store(*word, Ordering::Relaxed);
        }
    }

    fn word(&self, index: u32) -> &AtomicU32 {
        assert!(index < self.words, "word {index} of {}", self.words);
        // SAFETY: inside the span, aligned, alive with the arena, and only accessed atomically.
        unsafe { &*self.base.add(index as usize) }
    }
}

impl Words for Mapped {
    fn get(&self, index: u32, order: Ordering) -> u32 {
        self.word(index).load(order)
    }

    fn set(&self, index: u32, value: u32, order: Ordering) {
        self.word(index).store(value, order);
    }

    fn fence(&self, order: Ordering) {
        std::sync::atomic::fence(order);
    }
}

/// Writes mail.
#[derive(Debug)]
pub struct MailBank<W = Mapped> {
    limits: StepLimits,
    layout: MailLayout,
    banks: [W; 2],
}

impl MailBank<Mapped> {
    /// The banks of a step state.
    pub fn new(arena: &Arena, state: &StepState) -> Result<Self> {
        state.check()?;
        let [even, odd] = state.mail;
        Ok(Self::over(state.limits, [Mapped::new(arena, even)?, Mapped::new(arena, odd)?]))
    }
}

impl<W: Words> MailBank<W> {
    /// Banks in any shared words.
    ///
    /// # Panics
    /// For limits that [`StepLimits::check`] refuses.
    pub fn over(limits: StepLimits, banks: [W; 2]) -> Self {
        MailBank { limits, layout: limits.mail_layout(), banks }
    }

    /// Opens the bank for `launch` (from 1). Refused until launch − 2, the bank's last reader, is
    /// confirmed: `confirmed` is [`RingReader::confirmed`].
    pub fn open(&mut self, launch: u64, confirmed: u64) -> Result<Letter<'_, W>> {
        if launch > confirmed.saturating_add(2) {
            return Err(Error::MailBusy { launch, confirmed });
        }
        let bank = &self.banks[(launch % 2) as usize];
        for word in header::ROWS..header::HEADER_WORDS {
            bank.set(word, 0, Ordering::Relaxed);
        }
        Ok(Letter {
            bank,
            limits: &self.limits,
            layout: &self.layout,
            launch,
            counts: Counts::default(),
        })
    }
}

#[derive(Debug, Default)]
struct Counts {
    tokens: u32,
    joins: u32,
    pages: u32,
    biases: u32,
    seen: u32,
    history: u32,
}

/// A row of a step, as the mail gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MailRow {
    /// Its seat.
    pub seat: u32,
    /// Tokens it feeds.
    pub q_len: u32,
    /// [`crate::step::row`] flags.
    pub flags: u32,
}

/// Mail being written. It takes effect with [`Letter::send`].
#[derive(Debug)]
pub struct Letter<'a, W = Mapped> {
    bank: &'a W,
    limits: &'a StepLimits,
    layout: &'a MailLayout,
    launch: u64,
    counts: Counts,
}

fn fits(area: &'static str, asked: usize, limit: u32) -> Result<u32> {
    match u32::try_from(asked) {
        Ok(asked) if asked <= limit => Ok(asked),
        asked => Err(Error::MailFull { area, limit, asked: asked.unwrap_or(u32::MAX) }),
    }
}

impl<W: Words> Letter<'_, W> {
    /// The launch it is for.
    pub fn launch(&self) -> u64 {
        self.launch
    }

    fn put(&self, at: u32, words: &[u32]) {
        for (index, word) in words.iter().enumerate() {
            self.bank.set(at + index as u32, *word, Ordering::Relaxed);
        }
    }

    fn count(&self, word: u32, value: u32) {
        self.bank.set(word, value, Ordering::Relaxed);
    }

    /// Replaces the row list.
    pub fn rows(&mut self, rows: &[MailRow]) -> Result<()> {
        let count = fits("rows", rows.len(), self.limits.rows)?;
        for (index, row) in rows.iter().enumerate() {
            self.put(self.layout.rows + 3 * index as u32, &[row.seat, row.q_len, row.flags]);
        }
        self.count(header::ROWS, count);
        self.count(header::ROWS_CHANGED, 1);
        Ok(())
    }

    /// Adds prompt tokens: the tokens of all `PROMPT` rows, in row order.
    pub fn tokens(&mut self, tokens: &[u32]) -> Result<()> {
        let held = self.counts.tokens;
        let count = fits("tokens", held as usize + tokens.len(), self.limits.tokens)?;
        self.put(self.layout.tokens + held, tokens);
        self.counts.tokens = count;
        self.count(header::TOKENS, count);
        Ok(())
    }

    /// Gives a seat to a sequence that has `len` tokens in its pages and feeds `token` next.
    pub fn join(
        &mut self,
        seat: u32,
        len: u32,
        token: u32,
        params: &[u32; PARAM_WORDS as usize],
    ) -> Result<()> {
        let index = self.counts.joins;
        let count = fits("joins", index as usize + 1, self.limits.rows)?;
        let at = self.layout.joins + index * JOIN_WORDS;
        self.put(at, &[seat, len, token, 0]);
        self.put(at + 4, params);
        self.counts.joins = count;
        self.count(header::JOINS, count);
        Ok(())
    }

    /// The tokens in the pages of the sequence that joined last, where the device keeps them.
    pub fn history(&mut self, tokens: &[u32]) -> Result<()> {
        let held = self.counts.history;
        let count = fits("history", held as usize + tokens.len(), self.layout.history_cap)?;
        self.put(self.layout.history + held, tokens);
        self.counts.history = count;
        let join = self.counts.joins.checked_sub(1).expect("a sequence joined");
        self.put(self.layout.joins + join * JOIN_WORDS + 3, &[count - held]);
        Ok(())
    }

    /// Sets an entry of a seat's page table.
    pub fn page(&mut self, seat: u32, index: u32, page: u32) -> Result<()> {
        let held = self.counts.pages;
        let count = fits("pages", held as usize + 1, self.layout.pages_cap)?;
        self.put(self.layout.pages + 3 * held, &[seat, index, page]);
        self.counts.pages = count;
        self.count(header::PAGES, count);
        Ok(())
    }

    /// Sets an entry of a seat's bias table.
    pub fn bias(&mut self, seat: u32, index: u32, token: u32, bias: f32) -> Result<()> {
        let held = self.counts.biases;
        let count = fits("biases", held as usize + 1, self.layout.biases_cap)?;
        self.put(self.layout.biases + 4 * held, &[seat, index, token, bias.to_bits()]);
        self.counts.biases = count;
        self.count(header::BIASES, count);
        Ok(())
    }

    /// Counts a token for a seat's penalties.
    pub fn seen(&mut self, seat: u32, token: u32, in_answer: bool) -> Result<()> {
        let held = self.counts.seen;
        let count = fits("seen", held as usize + 1, self.layout.seen_cap)?;
        self.put(self.layout.seen + 3 * held, &[seat, token, in_answer.into()]);
        self.counts.seen = count;
        self.count(header::SEEN, count);
        Ok(())
    }

    /// Sets the allowed tokens of a row, one bit per token; its row flag must say `MASKED`.
    pub fn mask(&mut self, row: u32, bits: &[u32]) -> Result<()> {
        fits("masks", row as usize + 1, self.limits.rows)?;
        fits("mask words", bits.len(), self.layout.mask_words)?;
        let at = self.layout.masks + row * self.layout.mask_words;
        self.put(at, bits);
        // Tokens past the end of a shorter mask are forbidden.
        for word in bits.len() as u32..self.layout.mask_words {
            self.count(at + word, 0);
        }
        self.count(header::MASKS, 1);
        Ok(())
    }

    /// Sets how many steps a launch that repeats may run, this one included.
    pub fn steps(&mut self, steps: u32) {
        self.count(header::STEPS, steps);
    }

    /// Publishes it. The launch number is written last, with release order.
    pub fn send(self) {
        self.bank.set(header::LAUNCH_HI, (self.launch >> 32) as u32, Ordering::Relaxed);
        self.bank.set(header::LAUNCH_LO, self.launch as u32, Ordering::Release);
    }
}

/// Reads the ring.
#[derive(Debug)]
pub struct RingReader<W = Mapped> {
    entry_words: u32,
    limits: StepLimits,
    ring: W,
    confirmed: u64,
    copy: Vec<u32>,
}

/// What a launch published: a copy that the device no longer changes.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// The launch.
    pub launch: u64,
    /// Live rows.
    pub rows: u32,
    /// Another step of the same launch follows.
    pub again: bool,
    row_words: u32,
    words: &'a [u32],
}

/// A token of a row of an entry.
#[derive(Clone, Copy, Debug)]
pub struct EntryToken<'a> {
    /// The token.
    pub token: u32,
    /// [`ring`] flags.
    pub flags: u32,
    /// The token's log-probability, if [`ring::LOGPROBS`].
    pub logprob: f32,
    top: &'a [u32],
}

impl EntryToken<'_> {
    /// The likeliest tokens and their log-probabilities, best first, if [`ring::LOGPROBS`].
    pub fn top(&self) -> impl Iterator<Item = (u32, f32)> {
        self.top.chunks_exact(2).map(|pair| (pair[0], f32::from_bits(pair[1])))
    }
}

impl<'a> Entry<'a> {
    /// Drafts of row `index` that were verified.
    pub fn drafts(&self, index: u32) -> u32 {
        assert!(index < self.rows);
        self.words[(index * self.row_words) as usize + 3]
    }

    /// The tokens that row `index` returned, in order.
    pub fn row(&self, index: u32) -> impl Iterator<Item = EntryToken<'a>> + use<'a> {
        assert!(index < self.rows);
        let (at, words) = ((index * self.row_words) as usize, self.row_words as usize);
        let places = self.words[at..at + words].chunks_exact(ring::PLACE_WORDS as usize);
        places.take_while(|words| words[1] & ring::SAMPLED != 0).map(|words| {
            let scored = words[1] & ring::LOGPROBS != 0;
            EntryToken {
                token: words[0],
                flags: words[1],
                logprob: f32::from_bits(words[2]),
                top: if scored { &words[4..] } else { &[] },
            }
        })
    }
}

impl RingReader<Mapped> {
    /// The ring of a step state.
    pub fn new(arena: &Arena, state: &StepState) -> Result<Self> {
        state.check()?;
        Ok(Self::over(state.limits, Mapped::new(arena, state.ring)?))
    }
}

impl<W: Words> RingReader<W> {
    /// A ring in any shared words.
    ///
    /// # Panics
    /// For limits that [`StepLimits::check`] refuses.
    pub fn over(limits: StepLimits, ring: W) -> Self {
        let entry_words = limits.ring_entry_words();
        let copy = vec![0; (entry_words - ring::HEADER_WORDS) as usize];
        RingReader { entry_words, limits, ring, confirmed: 0, copy }
    }

    /// The last launch whose entry was read.
    pub fn confirmed(&self) -> u64 {
        self.confirmed
    }

    /// The next launch's entry, if it was published.
    pub fn poll(&mut self) -> Result<Option<Entry<'_>>> {
        let launch = self.confirmed + 1;
        let at = (launch % u64::from(ring::ENTRIES)) as u32 * self.entry_words;
        let found = self.number(at, Ordering::Acquire);
        if found < launch {
            return Ok(None);
        }
        let rows = self.ring.get(at + ring::ROWS, Ordering::Relaxed).min(self.limits.rows);
        let again = self.ring.get(at + ring::AGAIN, Ordering::Relaxed) != 0;
        for row in 0..rows {
            self.copy_row(at + ring::HEADER_WORDS, row);
        }
        self.ring.fence(Ordering::Acquire);
        let after = self.number(at, Ordering::Relaxed);
        if found != launch || after != launch {
            return Err(Error::RingOverrun { expected: launch, found: after.max(found) });
        }
        self.confirmed = launch;
        let row_words = self.limits.ring_row_words();
        Ok(Some(Entry { launch, rows, again, row_words, words: &self.copy }))
    }

    fn number(&self, at: u32, order: Ordering) -> u64 {
        let low = self.ring.get(at + ring::LAUNCH_LO, order);
        let high = self.ring.get(at + ring::LAUNCH_HI, Ordering::Relaxed);
        u64::from(high) << 32 | u64::from(low)
    }

    /// Copies the places of a row up to the first empty one.
    fn copy_row(&mut self, from: u32, row: u32) {
        let first = row * self.limits.ring_row_words();
        let place = |index: u32| first + index * ring::PLACE_WORDS;
        for index in 0..self.limits.tokens_per_row {
            if self.copy_place(from, place(index)) & ring::SAMPLED == 0 {
                break;
            }
        }
    }

    /// Copies a place and returns its flags.
    fn copy_place(&mut self, from: u32, at: u32) -> u32 {
        let mut copy = |word: u32| {
            let value = self.ring.get(from + at + word, Ordering::Relaxed);
            self.copy[(at + word) as usize] = value;
            value
        };
        copy(0);
        let flags = copy(1);
        copy(2);
        copy(3);
        if flags & ring::LOGPROBS != 0 {
            (4..ring::PLACE_WORDS).for_each(|word| {
                copy(word);
            });
        }
        flags
    }
}

#[cfg(test)]
mod tests;
