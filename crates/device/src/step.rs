//! The state of generation on the device, and its two connections to the host: the mail bank that the host fills
//! before a launch, and the ring entry that the sampler publishes after it.
//!
//! Everything a step needs lives here. In steady decode the host sends nothing: the prologue takes
//! tokens, positions and page tables from the seats, and the sampler writes the next token back.
//! All tables are `u32` words (floats by their bits), so that host, CPU ops and CUDA kernels share
//! one layout; the word offsets below are the only definition, and kernels get them as macros.

mod sizes;

use crate::{DType, Region, Result, Span, Tensor};
use serde::{Deserialize, Serialize};

/// Words of a seat's parameter record.
pub const PARAM_WORDS: u32 = 64;
/// Word offsets inside a parameter record.
pub mod param {
    /// f32; 0 is greedy.
    pub const TEMPERATURE: u32 = 0;
    /// 0 keeps all.
    pub const TOP_K: u32 = 1;
    /// f32; 1 keeps all.
    pub const TOP_P: u32 = 2;
    /// f32; 0 keeps all.
    pub const MIN_P: u32 = 3;
    /// f32; 1 is off.
    pub const REPETITION: u32 = 4;
    /// f32; 0 is off.
    pub const FREQUENCY: u32 = 5;
    /// f32; 0 is off.
    pub const PRESENCE: u32 = 6;
    /// 0: no log-probabilities; n + 1: with n alternatives.
    pub const LOGPROBS: u32 = 7;
    /// Low word of the seed.
    pub const SEED_LO: u32 = 8;
    /// High word of the seed.
    pub const SEED_HI: u32 = 9;
    /// Stop tokens are forbidden while the sequence is shorter than this.
    pub const MIN_LEN: u32 = 10;
    /// Number of stop tokens.
    pub const STOPS: u32 = 11;
    /// First of [`super::MAX_STOPS`] stop tokens.
    pub const STOP: u32 = 12;
    /// Number of entries in the seat's bias table.
    pub const BIASES: u32 = 28;
    /// Non-zero when any of the three penalties is on.
    pub const PENALISED: u32 = 29;
    /// The slot of its adapter, counted from 1; 0 for none.
    pub const ADAPTER: u32 = 30;
    /// Non-zero when log-probabilities are those of the distribution that tokens are drawn from.
    pub const SAMPLED_LOGPROBS: u32 = 31;
}
/// Stop tokens a seat can hold.
pub const MAX_STOPS: u32 = 16;
/// Logit biases a seat can hold (token, f32 pairs).
pub const MAX_BIASES: u32 = 320;
/// Alternatives a log-probability report can hold.
pub const MAX_TOP: u32 = 20;

/// Word offsets in the header of a mail bank. A bank belongs to launch `n` when its `LAUNCH` words equal `n`;
/// otherwise there is no mail and nothing changes.
pub mod mail {
    /// Low word of the launch number this bank is for.
    pub const LAUNCH_LO: u32 = 0;
    /// High word.
    pub const LAUNCH_HI: u32 = 1;
    /// Rows of the step; rewritten only when [`ROWS_CHANGED`] is set.
    pub const ROWS: u32 = 2;
    /// Non-zero when the row list (seat, q_len, flags) is given.
    pub const ROWS_CHANGED: u32 = 3;
    /// Prompt tokens given.
    pub const TOKENS: u32 = 4;
    /// Seats initialised.
    pub const JOINS: u32 = 5;
    /// Page-table entries given.
    pub const PAGES: u32 = 6;
    /// Logit biases given ({seat, index, token, f32}).
    pub const BIASES: u32 = 7;
    /// Tokens counted for penalties ({seat, token, 1 if part of the answer}).
    pub const SEEN: u32 = 8;
    /// Non-zero when the mask area of this bank is used; the row flag says by which rows.
    pub const MASKS: u32 = 9;
    /// Most steps of a launch that repeats ([`super::repeat`]); 0 leaves it unchanged.
    pub const STEPS: u32 = 10;
    /// Words of the header.
    pub const HEADER_WORDS: u32 = 16;
}

/// Flags of a row in the mail's row list.
pub mod row {
    /// A token is sampled after this row's last token.
    pub const SAMPLE: u32 = 1;
    /// The row's tokens are in the mail; otherwise it is a decode row fed by its seat.
    pub const PROMPT: u32 = 2;
    /// The row has an allowed-token mask in the mail.
    pub const MASKED: u32 = 4;
    /// The lowest bit of a number: how many drafts the row may accept in a step that verifies some.
    pub const DRAFTS: u32 = 8;

    /// The lowest bit of another: how many drafts the row accepts whatever they are. For benchmarks: the tokens that
    /// follow are not the model's.
    pub const FORCED: u32 = 16;

    /// The drafts that a row with these flags may accept.
    pub const fn drafts(flags: u32) -> u32 {
        flags >> DRAFTS & 0xff
    }

    /// The drafts that a row with these flags accepts whatever they are.
    pub const fn forced(flags: u32) -> u32 {
        flags >> FORCED
    }
}

/// A prompt token of `GIVEN_ROW` + r selects row r of the input rows that the embedding reads ([`crate::op::Embed`]),
/// instead of a row of its table.
pub const GIVEN_ROW: u32 = 1 << 31;

/// Words of a join record: seat, len, last token, tokens of it in the mail's history, then the parameters.
pub const JOIN_WORDS: u32 = 4 + PARAM_WORDS;

/// Word offsets in the `counts` tensor, written by the prologue for every other op of the step.
pub mod count {
    /// Low word of the launch number, counted by the device itself.
    pub const LAUNCH_LO: u32 = 0;
    /// High word.
    pub const LAUNCH_HI: u32 = 1;
    /// Live rows.
    pub const ROWS: u32 = 2;
    /// Live tokens.
    pub const TOKENS: u32 = 3;
    /// The longest kv_len of the step.
    pub const MAX_KV: u32 = 4;
    /// KV tokens per attention split (a multiple of the page size), the same for every layer.
    pub const SPLIT: u32 = 5;
    /// Steps a repeating launch may still run after this one; 0 in any other launch.
    pub const LEFT: u32 = 6;
    /// Most steps of a repeating launch, from the last mail that set it.
    pub const STEPS: u32 = 7;
    /// Whether another step follows in this launch: see [`super::repeat`].
    pub const AGAIN: u32 = 8;
    /// Low word of the number of this launch's first step.
    pub(crate) const BASE: u32 = 9;
    /// Words.
    pub const WORDS: u32 = 16;
}

/// Values of `counts.AGAIN`. A launch that repeats is recorded as: set it to `FIRST`; while it is not zero, run a
/// step. The sampler sets it to `NEXT` if another step follows: some are left, no row stopped, every row has a page
/// for its next token, and the host has not asked to stop.
pub mod repeat {
    /// A launch without repetition, or the end of one with it.
    pub(crate) const DONE: u32 = 0;
    /// Another step of the same launch precedes this one.
    pub(crate) const NEXT: u32 = 1;
    /// The first step of a launch that repeats.
    pub const FIRST: u32 = 2;
}

/// The block of inputs that the host may prepare for a decode step: a header, then areas at the offsets of
/// [`StepLimits::input_layout`]. Everything in it could be derived on the device; engines without state on the device
/// feed their graphs this way, and `--graph-prep` compares the two.
pub mod input {
    /// Live rows.
    pub const ROWS: u32 = 0;
    /// Page-table entries given for each row.
    pub const WIDTH: u32 = 1;
    /// Words of the header.
    pub const HEADER_WORDS: u32 = 16;
    /// Words of a row: seat, [`super::row`] flags, slot.
    pub const ROW_WORDS: u32 = 3;
    /// A token that a running step is still computing: the device has it, the host does not.
    pub const FROM_SEAT: u32 = u32::MAX;
}

/// Word offsets of the areas of an input block, for a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputLayout {
    /// Per row: its token. Directly after the header.
    pub tokens: u32,
    /// Per row: its position.
    pub positions: u32,
    /// Per row: KV length after the step.
    pub lengths: u32,
    /// Per row: [`input::ROW_WORDS`].
    pub rows: u32,
    /// Per row: [`PARAM_WORDS`].
    pub params: u32,
    /// Per row: `WIDTH` page-table entries; rows are consecutive.
    pub pages: u32,
    /// Words in all, when every row gives its whole table.
    pub words: u32,
}

/// Where input blocks lie: two on the device, so that one can be written while a step reads the other,
/// and two for the host to prepare them in. Launch n uses number n mod 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostInputs {
    /// Read by the prologue.
    pub blocks: [Span; 2],
    /// Host-mapped.
    pub staging: [Span; 2],
}

/// Offsets in a ring entry, in words: a header, then for every row [`StepLimits::tokens_per_row`] places of a token
/// each. A row's tokens are in its places up to the first without [`ring::SAMPLED`].
pub mod ring {
    /// Entries of the ring.
    pub const ENTRIES: u32 = 32;
    /// Launch number, written last with release order: low word.
    pub const LAUNCH_LO: u32 = 0;
    /// High word.
    pub const LAUNCH_HI: u32 = 1;
    /// Live rows.
    pub const ROWS: u32 = 2;
    /// Non-zero when another step of the same launch follows.
    pub const AGAIN: u32 = 3;
    /// Words of the header.
    pub const HEADER_WORDS: u32 = 16;
    /// Words of a place: token, flags, f32 log-probability, in a row's first place the drafts that were verified, then
    /// [`super::MAX_TOP`] pairs.
    pub const PLACE_WORDS: u32 = 4 + 2 * super::MAX_TOP;
    /// Flag: the place has a token.
    pub const SAMPLED: u32 = 1;
    /// Flag: it is a stop token of the seat.
    pub const STOPPED: u32 = 2;
    /// Flag: log-probabilities are given.
    pub const LOGPROBS: u32 = 4;
}

/// The sizes that all layouts follow from; in one place, so that none can disagree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StepLimits {
    /// Seats for requests; one more exists for pad rows (index `seats`), whose pages are scratch.
    pub seats: u32,
    /// Most rows of a step.
    pub rows: u32,
    /// Most tokens of a step.
    pub tokens: u32,
    /// Page-table entries per seat.
    pub pages_per_seat: u32,
    /// Tokens per page.
    pub page_size: u32,
    /// Vocabulary.
    pub vocab: u32,
    /// Whether penalty counts are kept (seats × vocab × 2 bytes).
    pub penalties: bool,
    /// Most tokens that a row returns: its places in a ring entry.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub tokens_per_row: u32,
    /// Page tables of a seat: layers that keep different tokens have pages of their own ([`StepState::of_table`]).
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub tables: u32,
}

fn one() -> u32 {
    1
}

// The signature is serde's.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_one(value: &u32) -> bool {
    *value == 1
}

/// Where each table lies. Seat tables have `seats + 1` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StepState {
    /// The sizes.
    pub limits: StepLimits,
    /// Per seat: tokens in its pages.
    pub seat_len: Tensor,
    /// Per seat: the token a decode row feeds.
    pub seat_token: Tensor,
    /// Per table and seat: its pages; entries never written are the scratch page, 0.
    pub page_table: Tensor,
    /// Per seat: [`PARAM_WORDS`] words.
    pub params: Tensor,
    /// Per seat: [`MAX_BIASES`] (token, f32) pairs.
    pub biases: Tensor,
    /// Per seat and token: occurrences for the penalties; u32, low half the answer's, bit 31 set if in
    /// the prompt or answer. Only with `limits.penalties`.
    pub seen: Option<Tensor>,
    /// [`count`] words.
    pub counts: Tensor,
    /// Per row: its seat (pad rows: `seats`).
    pub row_seat: Tensor,
    /// Per row: [`row`] flags (pad rows: 0).
    pub row_flags: Tensor,
    /// Per row: tokens it feeds (kept between decode steps; the row list of the last mail).
    pub row_q_len: Tensor,
    /// Per row and one more: its first token's index in the step (pad rows: the live token count).
    pub q_start: Tensor,
    /// Per row: KV length after this step's tokens (pad rows: 0).
    pub kv_len: Tensor,
    /// Per row: index of its last token (pad rows: 0); what the head gathers.
    pub last_index: Tensor,
    /// Per token: id (pad tokens: 0).
    pub token: Tensor,
    /// Per token: position (pad tokens: 0).
    pub position: Tensor,
    /// Per table and token: page × page size + offset where its K and V go (pad tokens: inside the scratch page).
    pub kv_slot: Tensor,
    /// Per token: its row (pad tokens: `rows` limit).
    pub token_row: Tensor,
    /// Per seat: the tokens of its sequence up to the one that it feeds next, by position. Only where rows return several
    /// tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<Tensor>,
    /// Per row: drafts of this step that it may accept (pad rows: 0). Likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row_drafts: Option<Tensor>,
    /// Per seat: tokens up to which recurrent states hold what its sequence left. Likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settled: Option<Tensor>,
    /// Per row: accepted drafts after those, which recurrent states take from their logs (pad rows: 0). Likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row_replay: Option<Tensor>,
    /// The tables of the rows that a model feeds which drafts. Only where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafting: Option<FedTables>,
    /// Hidden states that are kept for a drafter. Only where it reads them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features: Option<Features>,
    /// Two mail banks, host-mapped.
    pub mail: [Span; 2],
    /// [`ring::ENTRIES`] entries, host-mapped.
    pub ring: Span,
    /// One word, host-mapped: a launch that repeats stops after the step that finds its own `counts.BASE` here.
    pub leave: Span,
    /// Where the host gets a vector of each row, f32, of launch n in place n mod 2; host-mapped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vectors: Option<[Span; 2]>,
    /// Whether launches may repeat; without it GPU kernels omit the code for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repeats: bool,
}

/// What a model is fed in one pass over the rows of a step: the tables of a [`StepState`] with the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FedTables {
    /// [`count`] words; rows, tokens, the longest row and the split count.
    pub counts: Tensor,
    /// Per row and one more: its first token's index.
    pub q_start: Tensor,
    /// Per row: KV length after these tokens.
    pub kv_len: Tensor,
    /// Per row: index of its last token.
    pub last_index: Tensor,
    /// Per token: id.
    pub token: Tensor,
    /// Per token: position.
    pub position: Tensor,
    /// Per token: where its K and V go.
    pub kv_slot: Tensor,
    /// Per token: its row.
    pub token_row: Tensor,
}

/// Hidden states that a drafter reads, and the tokens that it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Features {
    /// Per token of a step: states of the model that verifies, one after the other.
    pub token: Tensor,
    /// Per seat: what the drafter continues after its last token with keys, as wide as its own states.
    pub last: Tensor,
    /// Per seat: how long its sequence is with that token; 0 if there is none. u32.
    pub last_len: Tensor,
    /// Per row: the drafter's own state after its last draft.
    pub drafted: Tensor,
    /// Per token of the drafter: which of the model's it is, u32. Without it they are the same.
    pub ids: Option<Tensor>,
}

/// How large [`Features`] are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FeatureShape {
    /// Columns of what is kept of a token.
    pub token: u32,
    /// Columns of the drafter's own states.
    pub drafted: u32,
    /// Their type.
    pub dtype: DType,
    /// Tokens that the drafter knows, if they are fewer than the model's.
    pub ids: Option<u32>,
}

/// Word offsets of a mail bank's areas, derived from the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MailLayout {
    /// Per row: seat, q_len, flags.
    pub rows: u32,
    /// Prompt tokens.
    pub tokens: u32,
    /// Join records.
    pub joins: u32,
    /// Page entries: seat, index, page; the entries of table t begin at t times the entries of a table.
    pub pages: u32,
    /// Page entries that fit.
    pub pages_cap: u32,
    /// Bias entries: seat, index, token, f32.
    pub biases: u32,
    /// Bias entries that fit.
    pub biases_cap: u32,
    /// Seen entries: seat, token, in answer.
    pub seen: u32,
    /// Seen entries that fit.
    pub seen_cap: u32,
    /// Tokens of sequences that join, one sequence after the other.
    pub history: u32,
    /// Tokens that fit there; 0 where rows return one token.
    pub history_cap: u32,
    /// Masks: one row of `mask_words` per row of the step.
    pub masks: u32,
    /// Words of a mask.
    pub mask_words: u32,
    /// Words in all.
    pub words: u32,
}

impl StepState {
    /// Lays out the state; `alloc` returns a span of a region for a name and a length in bytes. Limits that
    /// [`StepLimits::check`] refuses are refused.
    pub fn lay_out(
        limits: StepLimits,
        mut alloc: impl FnMut(Region, &'static str, u64) -> Span,
    ) -> Result<StepState> {
        limits.check()?;
        let mut words = |name, rows: u32, cols: u32| {
            let span = alloc(Region::State, name, u64::from(rows) * u64::from(cols) * 4);
            Tensor::dense(span, DType::U32, rows, cols)
        };
        let seats = limits.seats + 1;
        let state = (
            words("seat_len", 1, seats),
            words("seat_token", 1, seats),
            match limits.tables {
                1 => words("page_table", seats, limits.pages_per_seat),
                tables => words("page_table", tables, limits.table_words()),
            },
            words("params", seats, PARAM_WORDS),
            words("biases", seats, 2 * MAX_BIASES),
            limits.penalties.then(|| words("seen", seats, limits.vocab)),
        );
        let counts = words("counts", 1, count::WORDS);
        let row_seat = words("row_seat", 1, limits.rows);
        let row_flags = words("row_flags", 1, limits.rows);
        let row_q_len = words("row_q_len", 1, limits.rows);
        let q_start = words("q_start", 1, limits.rows + 1);
        let kv_len = words("kv_len", 1, limits.rows);
        let last_index = words("last_index", 1, limits.rows);
        let token = words("token", 1, limits.tokens);
        let position = words("position", 1, limits.tokens);
        let kv_slot = match limits.tables {
            1 => words("kv_slot", 1, limits.tokens),
            tables => words("kv_slot", tables, limits.slot_words()),
        };
        let token_row = words("token_row", 1, limits.tokens);
        let several = limits.tokens_per_row > 1;
        let history = several.then(|| words("history", seats, limits.context()));
        let row_drafts = several.then(|| words("row_drafts", 1, limits.rows));
        let settled = several.then(|| words("settled", 1, seats));
        let row_replay = several.then(|| words("row_replay", 1, limits.rows));
        let bank = u64::from(limits.mail_layout().words) * 4;
        let mail =
            [alloc(Region::HostMapped, "mail", bank), alloc(Region::HostMapped, "mail", bank)];
        let ring = alloc(Region::HostMapped, "ring", u64::from(limits.ring_words()) * 4);
        let leave = alloc(Region::HostMapped, "leave", 4);
        let (seat_len, seat_token, page_table, params, biases, seen) = state;
        Ok(StepState {
            limits,
            seat_len,
            seat_token,
            page_table,
            params,
            biases,
            seen,
            counts,
            row_seat,
            row_flags,
            row_q_len,
            q_start,
            kv_len,
            last_index,
            token,
            position,
            kv_slot,
            token_row,
            history,
            row_drafts,
            settled,
            row_replay,
            drafting: None,
            features: None,
            mail,
            ring,
            leave,
            vectors: None,
            repeats: false,
        })
    }

    /// The state as layers see it whose pages are in this page table: the only one.
    pub fn of_table(self, table: u32) -> StepState {
        if self.limits.tables == 1 {
            return self;
        }
        let limits = StepLimits { tables: 1, ..self.limits };
        let part = |whole: Tensor, rows: u32, cols: u32| {
            let (each, bytes) = (u64::from(whole.cols) * 4, u64::from(rows) * u64::from(cols) * 4);
            let span = whole.span.part(u64::from(table) * each, bytes);
            Tensor::dense(span, DType::U32, rows, cols)
        };
        let page_table = part(self.page_table, limits.seats + 1, limits.pages_per_seat);
        let kv_slot = part(self.kv_slot, 1, limits.tokens);
        StepState { limits, page_table, kv_slot, ..self }
    }

    /// The same with places for vectors of `width` numbers.
    pub fn with_vectors(
        self,
        width: u32,
        mut alloc: impl FnMut(Region, &'static str, u64) -> Span,
    ) -> StepState {
        let bytes = u64::from(self.limits.rows) * u64::from(width) * 4;
        let mut place = || alloc(Region::HostMapped, "vectors", bytes);
        StepState { vectors: Some([place(), place()]), ..self }
    }

    /// The same with tables for a model that drafts: what the host and the model verify by stays as it is.
    pub fn with_drafting(
        self,
        mut alloc: impl FnMut(Region, &'static str, u64) -> Span,
    ) -> StepState {
        let StepLimits { rows, tokens, .. } = self.limits;
        let mut words = |name, count: u32| {
            let span = alloc(Region::State, name, u64::from(count) * 4);
            Tensor::dense(span, DType::U32, 1, count)
        };
        let drafting = FedTables {
            counts: words("drafting counts", count::WORDS),
            q_start: words("drafting q_start", rows + 1),
            kv_len: words("drafting kv_len", rows),
            last_index: words("drafting last_index", rows),
            token: words("drafting token", tokens),
            position: words("drafting position", tokens),
            kv_slot: words("drafting kv_slot", tokens),
            token_row: words("drafting token_row", tokens),
        };
        StepState { drafting: Some(drafting), ..self }
    }

    /// The same with room for hidden states.
    pub fn with_features(
        self,
        shape: FeatureShape,
        mut alloc: impl FnMut(Region, &'static str, u64) -> Span,
    ) -> StepState {
        let FeatureShape { token, drafted, dtype, ids } = shape;
        let StepLimits { seats, rows, tokens, .. } = self.limits;
        let mut table = |region, name, dtype: DType, rows: u32, cols: u32| {
            let bytes = dtype.matrix_bytes(rows as usize, cols as usize) as u64;
            Tensor::dense(alloc(region, name, bytes), dtype, rows, cols)
        };
        let features = Features {
            token: table(Region::State, "states of tokens", dtype, tokens, token),
            last: table(Region::State, "last states", dtype, seats + 1, drafted),
            last_len: table(Region::State, "last_len", DType::U32, 1, seats + 1),
            drafted: table(Region::State, "drafted states", dtype, rows, drafted),
            ids: ids.map(|ids| table(Region::Weights, "drafted ids", DType::U32, 1, ids)),
        };
        StepState { features: Some(features), ..self }
    }

    /// What the model that verifies is fed, and what the one that drafts is, exchanged: the state as ops of the other see it.
    pub fn exchanged(self) -> Option<StepState> {
        let FedTables { counts, q_start, kv_len, last_index, token, position, kv_slot, token_row } =
            self.drafting?;
        let drafting = Some(self.fed());
        Some(StepState {
            drafting,
            counts,
            q_start,
            kv_len,
            last_index,
            token,
            position,
            kv_slot,
            token_row,
            ..self
        })
    }

    /// The tables of what is fed.
    fn fed(&self) -> FedTables {
        let StepState { counts, q_start, kv_len, last_index, .. } = *self;
        let StepState { token, position, kv_slot, token_row, .. } = *self;
        FedTables { counts, q_start, kv_len, last_index, token, position, kv_slot, token_row }
    }
}

impl HostInputs {
    /// Lays out two blocks and their staging for steps of up to `limits.rows` rows. Limits that [`StepLimits::check`]
    /// refuses are refused.
    pub fn lay_out(
        limits: &StepLimits,
        mut alloc: impl FnMut(Region, &'static str, u64) -> Span,
    ) -> Result<HostInputs> {
        limits.check()?;
        let bytes = u64::from(limits.input_layout(limits.rows).words) * 4;
        let mut pair = |region, name| [alloc(region, name, bytes), alloc(region, name, bytes)];
        Ok(HostInputs {
            blocks: pair(Region::State, "inputs"),
            staging: pair(Region::HostMapped, "staging"),
        })
    }
}
