//! Starts a step. In this order:
//!
//! 1. `counts.LAUNCH += 1`; call the new value n (the device counts launches itself, from 1).
//! 2. If mail bank n mod 2 carries launch number n, apply it: joins (seat_len, seat_token, params, and where a history is
//!    kept the sequence's tokens, which the mail holds one join after the other, and settled = seat_len;
//!    a joined seat's page table becomes scratch, its bias count comes with the params, its `seen` row
//!    is zeroed if penalised), page entries, biases, seen tokens (u32: count in the answer in the low
//!    half, bit 31 set), then the row list if it changed (row_seat, row_q_len, row_flags, counts.ROWS;
//!    rows past it up to the bucket become pad rows: seat = `seats`, q_len 0, flags 0).
//!    Without mail nothing changes: the row list of the last step is this step's.
//!    If the mail sets the number of steps of a repeating launch, it becomes `counts.STEPS`.
//! 3. If input blocks are given, block n mod 2 replaces the row list, and for its rows the seats' length,
//!    token (unless it is FROM_SEAT), parameters and the first `WIDTH` page-table entries.
//! 4. Derive: q_start (exclusive sum of q_len; entries past the live rows hold the live token count),
//!    counts.TOKENS, per row kv_len = seat_len + q_len (0 if that is past the seat's page table: such a row sees nothing,
//!    and its tokens past the table go to the scratch page), last_index = q_start + q_len − 1, per token
//!    token_row, position = seat_len + j, for every page table kv_slot = page · page_size + position % page_size with page =
//!    page_table[seat][position / page_size], token = the mail's next prompt token for `PROMPT` rows
//!    (the mail holds the tokens of its `PROMPT` rows one after the other, in row order), else
//!    seat_token. Where a history is kept, `history[seat][position]` = token, row_replay = seat_len − settled, and settled
//!    becomes kv_len for `PROMPT` rows, seat_len + 1 for others, whose further tokens are drafts; a row that sees nothing settles nothing.
//!    Pad rows: kv_len 0, last_index 0, row_replay 0. Pad tokens: id 0, position 0, slot = index % page_size (inside
//!    page 0), token_row = the `rows` limit. counts.MAX_KV and counts.SPLIT (the attention split).
//!    With a block, position and slot are the block's.
//! 5. counts.LEFT: how many steps this launch may still run ([`crate::step::repeat`]): STEPS − 1 in its first step,
//!    one less in each following one; 0 in a launch that does not repeat, if a row has no page for the token after this
//!    step's, or if the host asked this launch to stop.
//!
//! Rows past the live ones are made pad rows in every step, so a bucket never sees a stale row. Row lists never
//! exceed the bucket and q_len never exceeds the tokens of the bucket: the runner guarantees it; the op clamps rather
//! than writing outside its tables. Likewise a page number out of range becomes the scratch page, whatever its
//! source, and a slot in such a page becomes a pad token's slot.

pub(crate) mod cuda;

use super::{Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::cpu::tables::Tables;
use crate::cpu::view::Words;
use crate::operand::{Binder, Bound, OperandVisitor, Operands, unset};
use crate::step::{
    HostInputs, InputLayout, JOIN_WORDS, MAX_BIASES, PARAM_WORDS, count, input, mail, param,
    repeat, row,
};
use crate::{Result, StepState};
use serde::{Deserialize, Serialize};

/// Starts a step: applies the mail and derives the step's tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Prologue<O: Operands = Bound> {
    /// The state it advances.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// Rows of the bucket; rows past the live ones become pad rows.
    #[serde(skip_serializing_if = "unset")]
    pub rows: O::Late<u32>,
    /// Tokens of the bucket.
    #[serde(skip_serializing_if = "unset")]
    pub tokens: O::Late<u32>,
    /// Pages that every layer has, the scratch page included: an entry past them becomes the scratch page.
    #[serde(skip_serializing_if = "unset")]
    pub pages: O::Late<u32>,
    /// The step's inputs come from these blocks instead of being derived. Only with one token per row.
    #[serde(skip_serializing_if = "unset")]
    pub given: O::Late<Option<HostInputs>>,
}

impl<O: Operands> Bindable for Prologue<O> {
    type O = O;
    type Bound = Prologue;

    fn operands(&mut self, _visit: OperandVisitor<'_, O>) {}

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Prologue, B::Error> {
        let (state, size, pages) = (to.state(), to.size(), to.pages());
        let given = to.inputs().filter(|_| size.single);
        Ok(Prologue { state, rows: size.rows, tokens: size.tokens, pages, given })
    }
}

impl Contract for Prologue {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        let limits = &self.state.limits;
        require(self.rows <= limits.rows && self.tokens <= limits.tokens, Self::NAME, || {
            format!(
                "bucket of {} rows and {} tokens exceeds the limits {} and {}",
                self.rows, self.tokens, limits.rows, limits.tokens
            )
        })?;
        let Some(given) = self.given else { return Ok(()) };
        require(limits.tables == 1, Self::NAME, || {
            format!("inputs are for one page table, not {}", limits.tables)
        })?;
        require(self.rows == self.tokens, Self::NAME, || {
            format!("inputs are for one token per row, not {} of {}", self.tokens, self.rows)
        })?;
        given.check(limits, self.rows)
    }

    fn describe(&self) -> String {
        format!("prologue {} rows, {} tokens", self.rows, self.tokens)
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn step_size(&self) -> StepSize {
        StepSize { rows: Some(self.rows), tokens: Some(self.tokens) }
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let s = &self.state;
        let tables = [
            &s.seat_len,
            &s.seat_token,
            &s.page_table,
            &s.params,
            &s.biases,
            &s.counts,
            &s.row_seat,
            &s.row_flags,
            &s.row_q_len,
            &s.q_start,
            &s.kv_len,
            &s.last_index,
            &s.token,
            &s.position,
            &s.kv_slot,
            &s.token_row,
        ];
        for table in tables.into_iter().chain(&s.seen).chain(&s.history) {
            visit(table.span, Access::Update);
        }
        for table in s.settled.iter().chain(&s.row_replay) {
            visit(table.span, Access::Update);
        }
        for bank in s.mail.into_iter().chain([s.leave]) {
            visit(bank, Access::Read);
        }
        for block in self.given.iter().flat_map(|given| given.blocks) {
            visit(block, Access::Read);
        }
    }
}

/// The host's inputs for the current step.
struct Block {
    words: Words,
    layout: InputLayout,
}

impl Prologue {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, Prologue::reference)
    }

    /// Both the reference and the CPU version: it is only a few words per row and token.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let tables = Tables::new(memory, &self.state);
        let launch = tables.launch() + 1;
        tables.counts.set(count::LAUNCH_LO as usize, launch as u32);
        tables.counts.set(count::LAUNCH_HI as usize, (launch >> 32) as u32);
        let mail = tables.mail_for(launch);
        if let Some(bank) = &mail {
            self.apply(&tables, bank);
        }
        let block = self.given.map(|given| Block {
            words: Words::of_span(memory, given.blocks[(launch % 2) as usize]),
            layout: self.state.limits.input_layout(self.rows),
        });
        if let Some(block) = &block {
            self.adopt(&tables, block);
        }
        self.derive(&tables, mail.as_ref(), block.as_ref());
        self.count_steps(&tables, launch as u32);
    }

    /// Copies the rows, and the state of their seats, from the host's block.
    fn adopt(&self, tables: &Tables, Block { words, layout }: &Block) {
        let rows = (words.get(input::ROWS as usize) as usize).min(self.rows as usize);
        let per_seat = tables.limits.pages_per_seat as usize;
        let width = (words.get(input::WIDTH as usize) as usize).min(per_seat);
        // `check` refuses input blocks with several tables.
        for r in 0..rows {
            let at = layout.rows as usize + r * input::ROW_WORDS as usize;
            let seat = words.get(at).min(tables.limits.seats) as usize;
            tables.row_seat.set(r, seat as u32);
            tables.row_flags.set(r, words.get(at + 1));
            tables.row_q_len.set(r, 1);
            tables.seat_len.set(seat, words.get(layout.lengths as usize + r).saturating_sub(1));
            let token = words.get(layout.tokens as usize + r);
            if token != input::FROM_SEAT {
                tables.seat_token.set(seat, token);
            }
            let params = PARAM_WORDS as usize;
            for p in 0..params {
                let word = words.get(layout.params as usize + r * params + p);
                tables.params.set(seat * params + p, word);
            }
            for p in 0..width {
                let page = self.page(words.get(layout.pages as usize + r * width + p));
                tables.page_table.set(seat * per_seat + p, page);
            }
        }
        tables.counts.set(count::ROWS as usize, rows as u32);
    }

    /// How many steps of this launch are left.
    fn count_steps(&self, tables: &Tables, launch: u32) {
        let counts = |word: u32| tables.counts.get(word as usize);
        let again = counts(count::AGAIN);
        if again != repeat::NEXT {
            tables.counts.set(count::BASE as usize, launch);
        }
        let mut left = match again {
            repeat::FIRST => counts(count::STEPS).saturating_sub(1),
            repeat::NEXT => counts(count::LEFT).saturating_sub(1),
            _ => 0,
        };
        let has_page = |r: usize| {
            let kv_len = tables.kv_len.get(r) as usize;
            kv_len > 0 && tables.page(tables.row_seat.get(r) as usize, kv_len) != 0
        };
        let rows = counts(count::ROWS).min(self.rows) as usize;
        if tables.leave.get(0) == counts(count::BASE) || !(0..rows).all(has_page) {
            left = 0;
        }
        tables.counts.set(count::LEFT as usize, left);
    }

    /// The page, or the scratch page if it does not exist.
    fn page(&self, page: u32) -> u32 {
        if page < self.pages { page } else { 0 }
    }

    /// The slot, or a pad token's slot if its page does not exist.
    fn slot(&self, slot: u32, token: usize) -> u32 {
        let size = self.state.limits.page_size;
        if slot / size < self.pages { slot } else { token as u32 % size }
    }

    fn apply(&self, tables: &Tables, bank: &Words) {
        let (limits, layout) = (tables.limits, tables.limits.mail_layout());
        let given = |word: u32, cap: u32| bank.get(word as usize).min(cap) as usize;
        let entry = |area: u32, words: u32, i: usize, word: usize| {
            bank.get(area as usize + i * words as usize + word)
        };
        let per_seat = limits.pages_per_seat as usize;
        let mut told = 0u32;
        for i in 0..given(mail::JOINS, limits.rows) {
            let word = |word: usize| entry(layout.joins, JOIN_WORDS, i, word);
            let seat = word(0) as usize;
            let history = told..told.saturating_add(word(3)).min(layout.history_cap);
            told = history.end;
            if seat >= limits.seats as usize {
                continue;
            }
            for (position, at) in history.enumerate() {
                tables.remember(seat, position, bank.get((layout.history + at) as usize));
            }
            tables.seat_len.set(seat, word(1));
            tables.settle(seat, word(1) as usize);
            tables.seat_token.set(seat, word(2));
            let params = PARAM_WORDS as usize;
            (0..params).for_each(|p| tables.params.set(seat * params + p, word(4 + p)));
            for table in 0..limits.tables as usize {
                (0..per_seat).for_each(|p| tables.page_table.set(tables.entry(table, seat, p), 0));
            }
            if let Some(seen) = &tables.seen
                && word(4 + param::PENALISED as usize) != 0
            {
                let vocab = limits.vocab as usize;
                (0..vocab).for_each(|token| seen.set(seat * vocab + token, 0));
            }
        }
        for i in 0..given(mail::PAGES, layout.pages_cap) {
            let [seat, index, page] = [0, 1, 2].map(|word| entry(layout.pages, 3, i, word));
            let (table, index) = (index as usize / per_seat, index as usize % per_seat);
            if seat < limits.seats && table < limits.tables as usize {
                let at = tables.entry(table, seat as usize, index);
                tables.page_table.set(at, self.page(page));
            }
        }
        for i in 0..given(mail::BIASES, layout.biases_cap) {
            let [seat, index, token, bias] =
                [0, 1, 2, 3].map(|word| entry(layout.biases, 4, i, word));
            if seat < limits.seats && index < MAX_BIASES {
                let at = 2 * (seat * MAX_BIASES + index) as usize;
                tables.biases.set(at, token);
                tables.biases.set(at + 1, bias);
            }
        }
        for i in 0..given(mail::SEEN, layout.seen_cap) {
            let [seat, token, answer] = [0, 1, 2].map(|word| entry(layout.seen, 3, i, word));
            if seat < limits.seats && token < limits.vocab {
                tables.mark_seen(seat as usize, token, answer != 0);
            }
        }
        if bank.get(mail::ROWS_CHANGED as usize) != 0 {
            let rows = given(mail::ROWS, self.rows);
            for i in 0..rows {
                let [seat, q_len, flags] = [0, 1, 2].map(|word| entry(layout.rows, 3, i, word));
                tables.row_seat.set(i, seat.min(limits.seats));
                tables.row_q_len.set(i, q_len);
                tables.row_flags.set(i, flags);
            }
            tables.counts.set(count::ROWS as usize, rows as u32);
        }
        let steps = bank.get(mail::STEPS as usize);
        if steps != 0 {
            tables.counts.set(count::STEPS as usize, steps);
        }
    }

    fn derive(&self, tables: &Tables, bank: Option<&Words>, block: Option<&Block>) {
        let limits = tables.limits;
        let (rows, tokens) = (self.rows as usize, self.tokens as usize);
        let live = (tables.counts.get(count::ROWS as usize) as usize).min(rows);
        let size = limits.page_size as usize;
        let prompt_at = limits.mail_layout().tokens as usize;
        let prompts = bank.map_or(0, |bank| bank.get(mail::TOKENS as usize).min(limits.tokens));
        let (mut prompt, mut start, mut max_kv) = (0, 0, 0);
        for r in 0..live {
            let seat = tables.row_seat.get(r) as usize;
            let len = tables.seat_len.get(seat) as usize;
            let q_len = (tables.row_q_len.get(r) as usize).min(tokens - start);
            let kv_len = if len + q_len <= limits.context() as usize { len + q_len } else { 0 };
            tables.q_start.set(r, start as u32);
            tables.kv_len.set(r, kv_len as u32);
            tables.last_index.set(r, (start + q_len).saturating_sub(1) as u32);
            max_kv = max_kv.max(kv_len);
            tables.plan_replay(r, seat, len);
            if kv_len > 0 {
                let prompt = tables.row_flags.get(r) & row::PROMPT != 0;
                tables.settle(seat, len + if prompt { q_len } else { q_len.min(1) });
            }
            for j in 0..q_len {
                let (token, position) = (start + j, len + j);
                let from_mail = tables.row_flags.get(r) & row::PROMPT != 0 && prompt < prompts;
                let id = match bank {
                    Some(bank) if from_mail => {
                        prompt += 1;
                        bank.get(prompt_at + prompt as usize - 1)
                    }
                    _ => tables.seat_token.get(seat),
                };
                tables.token.set(token, id);
                tables.remember(seat, position, id);
                let slot = tables.page(seat, position) * size + position % size;
                let (position, slot) = match block {
                    Some(Block { words, layout }) => (
                        words.get(layout.positions as usize + r),
                        self.slot(
                            words.get((layout.rows + input::ROW_WORDS * r as u32 + 2) as usize),
                            token,
                        ),
                    ),
                    None => (position as u32, slot as u32),
                };
                for table in 1..limits.tables as usize {
                    let at = position as usize;
                    let slot = tables.page_in(table, seat, at) * size + at % size;
                    tables.kv_slot.set(tables.slots(table) + token, slot as u32);
                }
                tables.position.set(token, position);
                tables.kv_slot.set(token, slot);
                tables.token_row.set(token, r as u32);
            }
            start += q_len;
        }
        for r in live..rows {
            tables.row_seat.set(r, limits.seats);
            tables.row_q_len.set(r, 0);
            tables.row_flags.set(r, 0);
            tables.kv_len.set(r, 0);
            tables.last_index.set(r, 0);
            tables.clear_replay(r);
        }
        (live..=rows).for_each(|r| tables.q_start.set(r, start as u32));
        for token in start..tokens {
            tables.token.set(token, 0);
            tables.position.set(token, 0);
            for table in 0..limits.tables as usize {
                tables.kv_slot.set(tables.slots(table) + token, (token % size) as u32);
            }
            tables.token_row.set(token, limits.rows);
        }
        tables.counts.set(count::TOKENS as usize, start as u32);
        tables.counts.set(count::MAX_KV as usize, max_kv as u32);
        // The CPU divides attention by head and row only, so one split covers the whole context.
        let split = max_kv.next_multiple_of(size).max(size);
        tables.counts.set(count::SPLIT as usize, split as u32);
    }
}
