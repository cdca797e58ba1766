//! A step as the host describes it.

use crate::Phase;
use crate::runner::StepShape;
use device::mail::MailRow;
use device::step::{PARAM_WORDS, param, row};

/// How a seat's tokens are chosen; see [`device::step::param`] for what the numbers mean.
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
    pub repetition: f32,
    /// 0 is off.
    pub frequency: f32,
    /// 0 is off.
    pub presence: f32,
    /// Alternatives to report, if log-probabilities are wanted.
    pub logprobs: Option<u32>,
    /// They are those of the distribution that tokens are drawn from.
    pub sampled_logprobs: bool,
    /// The random numbers' key.
    pub seed: u64,
    /// Stop tokens are forbidden while the sequence is shorter than this.
    pub min_len: u32,
    /// At most [`device::step::MAX_STOPS`].
    pub stop_tokens: Vec<u32>,
    /// Added to single logits; at most [`device::step::MAX_BIASES`].
    pub biases: Vec<(u32, f32)>,
    /// The slot of its adapter, counted from 1; 0 for none.
    pub adapter: u32,
}

impl SeatParams {
    /// The likeliest token, always.
    pub fn greedy() -> SeatParams {
        SeatParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition: 1.0,
            frequency: 0.0,
            presence: 0.0,
            logprobs: None,
            sampled_logprobs: false,
            seed: 0,
            min_len: 0,
            stop_tokens: Vec::new(),
            biases: Vec::new(),
            adapter: 0,
        }
    }

    /// Whether a penalty is on, so that tokens are counted.
    pub(crate) fn penalised(&self) -> bool {
        self.repetition != 1.0 || self.frequency != 0.0 || self.presence != 0.0
    }

    /// As a parameter record. Stop tokens past what it holds are the caller's to refuse.
    pub fn words(&self) -> [u32; PARAM_WORDS as usize] {
        let mut words = [0; PARAM_WORDS as usize];
        let mut set = |at: u32, word: u32| words[at as usize] = word;
        set(param::TEMPERATURE, self.temperature.to_bits());
        set(param::TOP_K, self.top_k);
        set(param::TOP_P, self.top_p.to_bits());
        set(param::MIN_P, self.min_p.to_bits());
        set(param::REPETITION, self.repetition.to_bits());
        set(param::FREQUENCY, self.frequency.to_bits());
        set(param::PRESENCE, self.presence.to_bits());
        set(param::LOGPROBS, self.logprobs.map_or(0, |top| top + 1));
        set(param::SAMPLED_LOGPROBS, u32::from(self.sampled_logprobs));
        set(param::SEED_LO, self.seed as u32);
        set(param::SEED_HI, (self.seed >> 32) as u32);
        set(param::MIN_LEN, self.min_len);
        set(param::STOPS, self.stop_tokens.len() as u32);
        for (index, &token) in self.stop_tokens.iter().enumerate() {
            set(param::STOP + index as u32, token);
        }
        set(param::BIASES, self.biases.len() as u32);
        set(param::PENALISED, u32::from(self.penalised()));
        set(param::ADAPTER, self.adapter);
        words
    }
}

/// A seat (re)initialised before the step. Its page table is empty afterwards.
#[derive(Clone, Debug, PartialEq)]
pub struct JoinInput {
    /// Which.
    pub seat: u32,
    /// Tokens already in its pages.
    pub len: u32,
    /// What a decode row feeds first.
    pub last_token: u32,
    /// How its tokens are chosen.
    pub params: SeatParams,
    /// Tokens that count for the penalties; true for those of the answer.
    pub seen: Vec<(u32, bool)>,
    /// The tokens in its pages, where the device keeps them.
    pub history: Vec<u32>,
}

/// A page-table entry written before the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageInput {
    /// Whose table.
    pub seat: u32,
    /// Which entry. Those of table t begin at t times the entries of a table.
    pub index: u32,
    /// The page.
    pub page: u32,
}

/// Rows of an input of the program, given before the step.
#[derive(Clone, Debug, PartialEq)]
pub struct GivenRows {
    /// Which input.
    pub input: u32,
    /// The first of its rows.
    pub row: u32,
    /// Whole rows, one after the other.
    pub values: Vec<f32>,
}

/// A copy of what a seat carries from token to token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateInput {
    /// The seat.
    pub seat: u32,
    /// The slot of the copy.
    pub slot: u32,
    /// The seat gets what the slot has; else the slot what the seat has.
    pub restores: bool,
}

/// Everything the host sends to a step.
///
/// Rows have the mail's format, a dozen bytes each: after milliseconds of waiting for the device the processor's
/// caches are cold, and the cost of a launch is the memory it reads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepInput {
    /// Decode rows first; see [`StepInput::add`].
    pub rows: Vec<MailRow>,
    /// The prompt tokens of all rows that have some, row after row.
    pub tokens: Vec<u32>,
    /// Rows with only some tokens allowed: which, and one bit per token of the vocabulary.
    pub masks: Vec<(u32, Vec<u32>)>,
    /// Seats initialised.
    pub joins: Vec<JoinInput>,
    /// Page-table entries.
    pub pages: Vec<PageInput>,
    /// Whole pages copied before the step, in every layer: (from, to).
    pub copies: Vec<(u32, u32)>,
    /// Copies of what seats carry, made in this order before the step.
    pub states: Vec<StateInput>,
    /// Rows of the program's inputs. Prompt tokens of [`device::step::GIVEN_ROW`] and a number stand for them.
    pub given: Vec<GivenRows>,
    /// Every row has this many tokens, to verify drafts that the device makes or the mail gives; 0 for any other step.
    pub q_len: u32,
    /// Most steps that the launch may run, for decode steps of a runner that has such graphs; 0 is 1.
    pub steps: u32,
    /// Some row has an adapter.
    pub adapters: bool,
}

impl StepInput {
    /// A decode step of these seats, every one of which samples.
    pub fn decode(seats: impl IntoIterator<Item = u32>) -> StepInput {
        let mut input = StepInput::default();
        seats.into_iter().for_each(|seat| input.add(seat, &[], true));
        input
    }

    /// Adds a row: whose state, prompt tokens (none for a decode row, whose token is on the device), and whether a
    /// token is sampled after the last one fed.
    pub fn add(&mut self, seat: u32, prompt: &[u32], sample: bool) {
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        let flags = flag(sample, row::SAMPLE) | flag(!prompt.is_empty(), row::PROMPT);
        self.rows.push(MailRow { seat, q_len: (prompt.len() as u32).max(1), flags });
        self.tokens.extend_from_slice(prompt);
    }

    /// Adds a row to a step that verifies drafts, of which it may accept so many.
    pub fn add_verified(&mut self, seat: u32, drafts: u32) {
        let flags = row::SAMPLE | drafts << row::DRAFTS;
        self.rows.push(MailRow { seat, q_len: self.q_len, flags });
    }

    /// Makes the row added last accept so many drafts, whatever they are: for benchmarks.
    pub fn force(&mut self, drafts: u32) {
        self.rows.iter_mut().last().expect("a row was added").flags |= drafts << row::FORCED;
    }

    /// Allows a row only some tokens.
    pub fn mask(&mut self, row: u32, mask: Vec<u32>) {
        self.rows[row as usize].flags |= row::MASKED;
        self.masks.push((row, mask));
    }

    /// Its shape.
    pub fn shape(&self) -> StepShape {
        StepShape {
            phase: if self.tokens.is_empty() || self.q_len > 1 {
                Phase::Decode
            } else {
                Phase::Prefill
            },
            rows: self.rows.len() as u32,
            tokens: self.rows.iter().map(|row| row.q_len).sum(),
            adapters: self.adapters,
        }
    }

    /// Whether it holds nothing but the row list.
    pub(crate) fn is_quiet(&self) -> bool {
        self.joins.is_empty() && self.pages.is_empty() && !self.speaks_of_rows()
    }

    /// Whether it carries prompt tokens or masks, which need the row list.
    pub(crate) fn speaks_of_rows(&self) -> bool {
        !self.tokens.is_empty() || !self.masks.is_empty()
    }
}
