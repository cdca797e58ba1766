//! A step as the host describes it.

use crate::Phase;
use crate::runner::StepShape;
use device::mail::MailRow;
use device::step::{PARAM_WORDS, param, row};

/// A row of a step: one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowInput {
    /// Whose state.
    pub seat: u32,
    /// Prompt tokens; empty for a decode row, whose token is on the device.
    pub tokens: Vec<u32>,
    /// Whether a token is sampled after the last one fed.
    pub sample: bool,
    /// One bit per token of the vocabulary, set if allowed.
    pub mask: Option<Vec<u32>>,
}

impl RowInput {
    /// Tokens it feeds.
    pub fn q_len(&self) -> u32 {
        (self.tokens.len() as u32).max(1)
    }

    /// As the mail gives it.
    pub fn mail_row(&self) -> MailRow {
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        let flags = flag(self.sample, row::SAMPLE)
            | flag(!self.tokens.is_empty(), row::PROMPT)
            | flag(self.mask.is_some(), row::MASKED);
        MailRow { seat: self.seat, q_len: self.q_len(), flags }
    }
}

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
    /// The random numbers' key.
    pub seed: u64,
    /// Stop tokens are forbidden while the sequence is shorter than this.
    pub min_len: u32,
    /// At most [`device::step::MAX_STOPS`].
    pub stop_tokens: Vec<u32>,
    /// Added to single logits; at most [`device::step::MAX_BIASES`].
    pub biases: Vec<(u32, f32)>,
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
            seed: 0,
            min_len: 0,
            stop_tokens: Vec::new(),
            biases: Vec::new(),
        }
    }

    /// Whether a penalty is on, so that tokens are counted.
    pub fn penalised(&self) -> bool {
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
        set(param::SEED_LO, self.seed as u32);
        set(param::SEED_HI, (self.seed >> 32) as u32);
        set(param::MIN_LEN, self.min_len);
        set(param::STOPS, self.stop_tokens.len() as u32);
        for (index, &token) in self.stop_tokens.iter().enumerate() {
            set(param::STOP + index as u32, token);
        }
        set(param::BIASES, self.biases.len() as u32);
        set(param::PENALISED, u32::from(self.penalised()));
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
}

/// A page-table entry written before the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageInput {
    /// Whose table.
    pub seat: u32,
    /// Which entry.
    pub index: u32,
    /// The page.
    pub page: u32,
}

/// Everything a step needs to be told.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepInput {
    /// Decode rows first.
    pub rows: Vec<RowInput>,
    /// Seats initialised.
    pub joins: Vec<JoinInput>,
    /// Page-table entries.
    pub pages: Vec<PageInput>,
    /// Whole pages copied before the step, in every layer: (from, to).
    pub copies: Vec<(u32, u32)>,
    /// Most steps that the launch may run, for decode steps of a runner that has such graphs; 0 is 1.
    pub steps: u32,
}

impl StepInput {
    /// Its shape.
    pub fn shape(&self) -> StepShape {
        StepShape {
            phase: if self.has_prompt() { Phase::Prefill } else { Phase::Decode },
            rows: self.rows.len() as u32,
            tokens: self.rows.iter().map(RowInput::q_len).sum(),
        }
    }

    /// Whether it says nothing but which rows run.
    pub fn is_quiet(&self) -> bool {
        self.joins.is_empty() && self.pages.is_empty() && !self.speaks_of_rows()
    }

    /// Whether it carries prompt tokens or masks, which only mean something with the row list.
    pub fn speaks_of_rows(&self) -> bool {
        self.has_prompt() || self.rows.iter().any(|row| row.mask.is_some())
    }

    fn has_prompt(&self) -> bool {
        self.rows.iter().any(|row| !row.tokens.is_empty())
    }
}
