//! The engine's view of a device: launch a step, poll for its result. The real one replays device
//! graphs; the simulator's fails on schedule.

mod tokens;

pub use tokens::{Sampled, Scored, Tokens};

use crate::request::{Micros, Pooling, Token};
use crate::store::{Store, StoreUse};

/// A running sequence's place on the device, `0..max_seats`. State that outlives a step (length,
/// last token, page table, sampling parameters) lives there, not on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Seat(pub u32);

/// A fixed-size block of the KV region. Page 0 is the scratch page: pad rows write there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Page(pub u32);

/// The page no request ever owns.
pub const SCRATCH_PAGE: Page = Page(0);

/// Which runner a step goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StepKind {
    /// One token per row; tokens and positions are already on the device.
    Decode,
    /// Prompt chunks, with decode rows beside them or not.
    Prefill,
}

/// One step: which seats run, and what changed since the last one. In steady decode every list but
/// `rows` is empty and `rows` equals the previous step's, so nothing is sent at all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// Counts launches from 1; results carry it back.
    pub number: u64,
    /// Rows in device order; for a prefill step decode rows come first.
    pub rows: Vec<Row>,
    /// Seats (re)initialised before this step runs.
    pub joins: Vec<Join>,
    /// Page-table entries written before this step runs.
    pub pages: Vec<PageEntry>,
    /// Whole-page copies made before this step runs (copy-on-write).
    pub copies: Vec<(Page, Page)>,
    /// Copies of what seats carry, made in this order before this step runs.
    pub states: Vec<StateCopy>,
    /// Allowed-token masks for rows of this step: (row index, one bit per token).
    pub masks: Vec<(u32, Vec<u32>)>,
    /// Most steps of this launch; 0 is 1. More than one only for decode steps without masks, and never
    /// more than [`Executor::steps`]: the device runs them on its own, feeding each row the token it just
    /// sampled, until one stops, one has no page for its next tokens, or [`Executor::stop_loop`] was called.
    pub steps: u32,
    /// Why it feeds as many prompt tokens as it does.
    pub share: Share,
}

/// A copy of what a seat carries from token to token ([`Executor::carries_state`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateCopy {
    /// The seat has a row in this step, which is fed from behind the tokens of the copy on.
    Restore {
        /// From this slot.
        slot: u32,
        /// To this seat.
        seat: Seat,
    },
    /// What the seat carries after the rows before this step.
    Save {
        /// From this seat.
        seat: Seat,
        /// To this slot, below [`Executor::state_copies`].
        slot: u32,
    },
}

/// Why a step feeds as many prompt tokens as it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Share {
    /// It feeds none.
    #[default]
    None,
    /// No sequence decodes: as many as a step may have.
    Alone,
    /// As many as a step may have, because no gap between tokens is aimed at.
    Full,
    /// As many for each decode row as the traffic has for each answer token.
    Traffic,
    /// More than that, because prompts wait.
    Backlog,
    /// As many as the gap between tokens that is aimed at allows.
    Gap,
}

impl Share {
    /// The name used in records; `None` if no prompt is fed.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Share::None => None,
            Share::Alone => Some("alone"),
            Share::Full => Some("full"),
            Share::Traffic => Some("traffic"),
            Share::Backlog => Some("backlog"),
            Share::Gap => Some("gap"),
        }
    }
}

impl Step {
    /// Which runner the step goes through: prefill as soon as one row feeds prompt tokens.
    pub fn kind(&self) -> StepKind {
        if self.rows.iter().all(|row| row.prompt.is_none()) {
            StepKind::Decode
        } else {
            StepKind::Prefill
        }
    }

    /// Tokens the step feeds: one per decode row, the chunk for the others.
    pub fn tokens(&self) -> usize {
        self.rows.iter().map(|row| row.tokens().len().max(1)).sum()
    }

    /// Which vectors the step makes, if any. Such a step has prompts only, none of which wants another vector, a token
    /// or log-probabilities.
    pub fn pooling(&self) -> Option<Pooling> {
        self.rows.iter().find_map(Row::hidden)
    }
}

/// One sequence of a step.
///
/// Joins, page entries and copies of a step belong only to seats that have a row in it, so a step that
/// never runs affects no other sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Whose state.
    pub seat: Seat,
    /// Tokens already in the pages before this step (the position of the first one fed). While earlier rows of the seat are
    /// in flight that may return several tokens only the device knows it; then this is the most it can be.
    pub start: u32,
    /// Whether a token is sampled after the last one fed (false for all but the last prompt chunk).
    pub sample: bool,
    /// Most tokens that it may return if it samples. More than one only for decode rows without a mask, never more than
    /// [`Executor::tokens_per_row`], and there are pages for as many positions.
    pub most: u32,
    /// The prompt tokens it feeds. A decode row has none: its token is on the device. Boxed, so that 256 decode rows
    /// are little memory to read.
    pub prompt: Option<Box<Prompt>>,
}

/// The part of a prompt that a row feeds, and what was asked about it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prompt {
    /// At least one.
    pub tokens: Vec<Token>,
    /// Their log-probabilities, when the request asked for them.
    pub score: Option<Score>,
    /// Their hidden states, when the request asked for a vector. Only an executor that has an
    /// [`Executor::hidden`] ever sees this, and only in a step of nothing else ([`Step::pooling`]).
    pub hidden: Option<Pooling>,
}

impl Row {
    /// A decode row: feeds the token its seat holds and samples the next.
    pub fn decode(seat: Seat, start: u32) -> Row {
        Row { seat, start, sample: true, most: 1, prompt: None }
    }

    /// A row that feeds prompt tokens and samples after them; a decode row if there are none.
    pub fn feed(seat: Seat, start: u32, tokens: Vec<Token>) -> Row {
        let some = !tokens.is_empty();
        let prompt = some.then(|| Box::new(Prompt { tokens, ..Prompt::default() }));
        Row { prompt, ..Row::decode(seat, start) }
    }

    /// The prompt tokens it feeds; none for a decode row.
    pub fn tokens(&self) -> &[Token] {
        self.prompt.as_ref().map_or(&[], |prompt| &prompt.tokens)
    }

    /// The log-probabilities it asks for.
    pub fn score(&self) -> Option<&Score> {
        self.prompt.as_ref()?.score.as_ref()
    }

    /// Which vector it asks for.
    pub fn hidden(&self) -> Option<Pooling> {
        self.prompt.as_ref()?.hidden
    }
}

/// Asks a prefill row for log-probabilities of the prompt it was fed. Only sent to an executor with
/// [`Executor::scores_prompts`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Score {
    /// `targets[i]` is the prompt token that follows `tokens[i]`; the last chunk has one fewer than
    /// it feeds, because what follows the prompt is sampled.
    pub targets: Vec<Token>,
    /// Alternatives to report for each.
    pub top: u32,
}

/// (Re)initialises a seat. Its page table is empty after this: the same step carries an entry for
/// every page the row needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Join {
    /// Which.
    pub seat: Seat,
    /// Tokens already in its pages.
    pub len: u32,
    /// The token a decode row feeds first (the last prompt token is fed by prefill, so this is only
    /// read when a seat goes directly into decode: a prompt of which all but the last token was
    /// cached, a second choice of the same prompt, or a sequence that comes back).
    pub last_token: Token,
    /// How its tokens are chosen.
    pub params: SeatParams,
    /// The tokens in its pages, for a device whose rows may return several tokens: it drafts from them. Else empty.
    pub history: Vec<Token>,
}

/// Sampling parameters as the device keeps them, one record per seat.
#[derive(Clone, Debug, PartialEq)]
pub struct SeatParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// 0 is off.
    pub presence_penalty: f32,
    /// The counter RNG's key; the counter is the position of the sampled token.
    pub seed: u64,
    /// Alternatives to report; `None` reports no log-probabilities.
    pub logprobs: Option<u32>,
    /// They are those of the distribution that tokens are drawn from.
    pub sampled_logprobs: bool,
    /// Added to single logits.
    pub logit_bias: Vec<(Token, f32)>,
    /// Stop tokens are forbidden until the sequence has this many tokens in all.
    pub min_len: u32,
    /// The device raises `finished` on these.
    pub stop_tokens: Vec<Token>,
    /// Tokens that count for the penalties when the seat starts (the prompt, and after a
    /// preemption the answer so far); empty unless a penalty is on. `true` marks tokens of the
    /// answer: the frequency and presence penalties count only those. Tokens fed by prefill are not
    /// counted again; each sampled token is.
    pub seen: Vec<(Token, bool)>,
    /// The slot of its adapter, counted from 1; 0 for none.
    pub adapter: u32,
}

impl SeatParams {
    /// The likeliest token, always, and no stop.
    pub fn greedy() -> SeatParams {
        SeatParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
            logprobs: None,
            sampled_logprobs: false,
            logit_bias: Vec::new(),
            min_len: 0,
            stop_tokens: Vec::new(),
            seen: Vec::new(),
            adapter: 0,
        }
    }
}

/// One page-table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageEntry {
    /// Whose table.
    pub seat: Seat,
    /// Which of its tables ([`Kept`]).
    pub table: u32,
    /// Which entry: position / page size.
    pub index: u32,
    /// The page.
    pub page: Page,
}

/// What a finished step produced.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepResult {
    /// The step's number.
    pub number: u64,
    /// More steps of this launch follow: the next result has the same number and is one step further.
    pub more_follow: bool,
    /// One per row of the step, in its order.
    pub rows: Vec<RowResult>,
    /// How long the device took for it, if that was measured.
    pub took: Option<Micros>,
}

/// What a row produced.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowResult {
    /// The tokens it sampled, if it was asked for any. A prompt row returns exactly one, and so does a row whose seat joins
    /// in the same step; another decode row one, or none to [`Row::most`] on a device whose rows may return several. Each but the last was fed as well: the seat's tokens are
    /// as many longer as were returned.
    pub tokens: Tokens,
    /// Drafts of a decode row that were verified; the tokens but the last are those that were accepted.
    pub drafted: u32,
    /// What else was asked for. Separate, because most rows of most steps ask for nothing else.
    pub detail: Option<Box<Detail>>,
}

/// What a row produced besides its tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Detail {
    /// One per target of the row's [`Score`]: its log-probability, and the alternatives best first.
    pub scores: Vec<(f32, Vec<(Token, f32)>)>,
    /// If the row asked for hidden states: their sum over the tokens fed, or the last one's.
    pub hidden: Option<Vec<f64>>,
}

/// Why a device could not do a step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecError {
    /// Nothing was changed on the device; the same step may be launched again.
    #[error("the step was not launched: {0}")]
    NotLaunched(String),
    /// Device state is lost; every seat must be filled again. Nothing is in flight any more: no step
    /// launched before this is reported.
    #[error("the device lost its state: {0}")]
    StateLost(String),
    /// As [`ExecError::StateLost`], and the device will never run a step again.
    #[error("the device is gone: {0}")]
    Gone(String),
    /// No graph covers the step and fallback is forbidden.
    #[error("no recorded graph covers the step: {0}")]
    NotCovered(String),
}

/// What the graphs cover, so that the scheduler never forms a step that cannot replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// Most rows of a decode step.
    pub decode_rows: u32,
    /// Most tokens of a prefill step.
    pub prefill_tokens: u32,
    /// Most rows of a prefill step.
    pub prefill_rows: u32,
}

/// Fixed sizes of a device that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Seats that exist.
    pub seats: u32,
    /// Pages that exist, the scratch page included.
    pub pages: u32,
    /// Tokens per page.
    pub page_size: u32,
    /// Entries of a seat's page table: the context limit in pages.
    pub pages_per_seat: u32,
    /// Vocabulary size.
    pub vocab: u32,
    /// What it keeps of a sequence.
    pub kept: Kept,
}

impl Geometry {
    /// The first page that a token at this position sees in layers with a window.
    pub(crate) fn window_start(&self, position: u32) -> u32 {
        self.kept.first_page(position, self.page_size)
    }
}

/// What a device keeps of a sequence: how many pages a page of tokens takes, each in a page table of its own, and how
/// long. Tables of layers that see every token come first, then those of layers that see a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Pages that are kept as long as the sequence.
    pub full: u32,
    /// Pages that are kept while a later token sees them.
    pub windowed: u32,
    /// Tokens that a token sees there, itself included.
    pub window: u32,
}

/// Tokens of a prompt that can be fed at once, however small a window is.
const LEAST_FED: u32 = 256;

impl Kept {
    /// Everything, in one table.
    pub const ALL: Kept = Kept { full: 1, windowed: 0, window: 0 };

    /// Page tables of a seat.
    pub const fn width(self) -> u32 {
        self.full + self.windowed
    }

    /// The entries of a page of tokens in every table, with pages from `first` on: for those who run steps without an
    /// engine.
    pub fn entries(self, seat: Seat, index: u32, first: Page) -> impl Iterator<Item = PageEntry> {
        let entry = move |table| PageEntry { seat, table, index, page: Page(first.0 + table) };
        (0..self.width()).map(entry)
    }

    /// Pages of tokens that a sequence has at once in layers with a window, if steps feed up to `step` tokens: those of
    /// the window, and of a part of a step. Where there are more pages it may feed whole steps.
    pub(crate) fn window_pages(self, page_size: u32, step: u32) -> u32 {
        let fed = step.clamp(1, self.window.max(LEAST_FED));
        self.window.saturating_add(fed).div_ceil(page_size) + 1
    }

    /// Pages that a sequence of so many pages of tokens takes.
    pub fn pages_of(self, pages: u32, page_size: u32, step: u32) -> u32 {
        let window = self.window_pages(page_size, step).min(pages);
        pages * self.full + if self.windowed == 0 { 0 } else { window * self.windowed }
    }

    /// The first page that a token at this position sees in layers with a window; 0 without such layers.
    pub const fn first_page(self, position: u32, page_size: u32) -> u32 {
        if self.windowed == 0 { 0 } else { (position + 1).saturating_sub(self.window) / page_size }
    }
}

/// A device that runs steps in order. At most [`Executor::DEPTH`] steps are in flight.
pub trait Executor {
    /// How far launches may run ahead of results.
    const DEPTH: usize = 2;
    /// Fixed sizes.
    fn geometry(&self) -> Geometry;
    /// What can replay.
    fn coverage(&self) -> Coverage;
    /// Whether rows may carry a [`Score`].
    fn scores_prompts(&self) -> bool {
        false
    }
    /// Width of the hidden states it can report; `None` if it reports none.
    fn hidden(&self) -> Option<u32> {
        None
    }
    /// Sizes of prefill steps that have a graph, in tokens, ascending: a step takes as long as the smallest that it fits.
    /// Empty if that is not so.
    fn prefill_buckets(&self) -> Vec<u32> {
        Vec::new()
    }
    /// Most tokens of a prompt, where every prompt must be fed by one row and gives a vector, because tokens see those
    /// after them; `None` for a device that generates.
    fn whole_prompts(&self) -> Option<u32> {
        None
    }
    /// Whether seats carry state from token to token that is not in pages: then pages alone do not make a prefix, and a
    /// sequence is fed from its first token on, or from where a copy of that state was made.
    fn carries_state(&self) -> bool {
        false
    }
    /// Copies of it that there is room for: behind cached prefixes, so that other sequences can go on there.
    fn state_copies(&self) -> u32 {
        0
    }
    /// Most decode steps of one launch.
    fn steps(&self) -> u32 {
        1
    }
    /// Most tokens that a decode row may return ([`Row::most`]). Where it is 1 a row returns exactly one.
    fn tokens_per_row(&self) -> u32 {
        1
    }
    /// Adapters that rows of one step may have: its slots.
    fn adapters(&self) -> u32 {
        0
    }
    /// Begins to put an adapter into a slot, counted from 1, that no row uses. Steps run meanwhile; none has a row that uses
    /// the slot before [`Executor::poll_adapters`] has named it.
    fn begin_adapter(&mut self, _slot: u32, _adapter: u64) {}
    /// Adds the slots that were filled, and with which adapter. With `block` it waits a moment for one.
    fn poll_adapters(
        &mut self,
        _filled: &mut Vec<(u32, u64)>,
        _block: bool,
    ) -> Result<(), ExecError> {
        Ok(())
    }
    /// Asks the launch of several steps that is under way to end soon: with the step under way, or the
    /// one after it. A device that runs a launch to its end before it returns cannot do that.
    fn stop_loop(&mut self) {}
    /// Where evicted pages are kept, if anywhere.
    fn store(&mut self) -> Option<&mut dyn Store> {
        None
    }
    /// What each medium of the store did.
    fn store_uses(&self) -> Vec<StoreUse> {
        Vec::new()
    }
    /// Takes back a result whose memory it can reuse for the next one.
    fn recycle(&mut self, _result: StepResult) {}
    /// Starts a step. After a launch of several steps, only once all of them but the last were polled.
    /// A decode row may need a token that an earlier step in flight is still computing: the device feeds
    /// it without the host.
    fn launch(&mut self, step: &Step) -> Result<(), ExecError>;
    /// The next finished step, in launch order, or `None` when it is not there yet. `block` waits.
    fn poll(&mut self, block: bool) -> Result<Option<StepResult>, ExecError>;
}
