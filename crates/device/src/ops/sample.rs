//! Ends a step. For each live row with the `SAMPLE` flag, from its row of logits l (f32):
//!
//! 1. repetition: for tokens marked seen, l = l > 0 ? l / r : l · r; then l −= frequency · count;
//!    l −= presence if count > 0 (count: occurrences in the answer).
//! 2. biases are added; while seat_len + q_len < MIN_LEN the stop tokens are forbidden (−∞); tokens
//!    outside the row's mask are forbidden.
//! 3. Greedy (temperature 0): the largest l, the lowest index among equals.
//!    Otherwise l /= temperature, then top-k, top-p (smallest set of the likeliest tokens whose
//!    probability reaches p), min-p (at least min_p times the likeliest), in this order, each over the
//!    distribution that the one before left, renormalised; ties in index order, lower first. Then one
//!    draw by the inverse of the cumulative distribution in index order: the first token whose
//!    cumulative sum exceeds u · total, with
//!    u = Philox4x32-10(key = seed, counter = (seat_len + q_len, 0, 0, 0)): u = (x0 >> 8)·2⁻²⁴ + 2⁻²⁵.
//! 4. Log-probabilities, if asked for, are of the distribution after step 2 at temperature 1; with
//!    `SAMPLED_LOGPROBS`, where the row is not greedy, of the one that step 3 draws from, in which tokens that a filter
//!    dropped have −∞. The alternatives are the largest l, best first, ties in index order. A mask is a bit per token, set if allowed; row r's
//!    lies at `masks + r · mask_words` of the launch's bank.
//!
//! Then for every live row: seat_len += q_len; and if sampled: seat_token = token, the token is
//! counted in `seen` if the seat is penalised and written to the seat's history if there is one. Last, the ring entry (launch n mod ENTRIES) is written:
//! rows, per row one token with flags and log-probabilities (further places stay empty), whether another step of this launch follows
//! (`counts.LEFT` is not 0 and no row stopped; `counts.AGAIN` says the same); its launch number after everything else, so that a
//! host that sees n sees the whole entry.
//!
//! With a `q_len` of more than 1 every row has as many rows of logits, and d drafts (`row_drafts`). A token is chosen after its first token,
//! as above. As long as the token chosen is no stop token and equals the next of the d drafts, that draft is accepted and
//! a token is chosen after it, with the accepted ones counted: the tokens are those of as many single steps. Each is in a
//! place of the ring. seat_len grows by their number, and seat_token is the last one. At a temperature a draft x is so
//! accepted with its probability p(x), and what is chosen instead is drawn from p without x: rejection sampling, with
//! one random number for each position. A benchmark may force a row to accept drafts ([`crate::step::row::FORCED`]).

mod cuda;

use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require, require_fit,
    require_float, require_scratch,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::view::Matrix;
use crate::cuda::launch::Target;
use crate::logprob::Distribution;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, Span, StepState};
use serde::{Deserialize, Serialize};

mod fast;
pub(super) mod row;

use row::{Choice, SampledRow, StepEnd};

/// Ends a step: chooses tokens, advances the seats, publishes to the ring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Sample<O: Operands = Bound> {
    /// rows · q_len × vocab, f32 or bf16; may be overwritten.
    pub logits: O::Value,
    /// Parameters, flags, and the state that is advanced.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// Scratch for partial results; devices say how much they need.
    #[serde(skip_serializing_if = "unset")]
    pub scratch: O::Late<Option<Span>>,
    /// Rows of the bucket.
    #[serde(skip_serializing_if = "unset")]
    pub rows: O::Late<u32>,
    /// Rows of logits of each: more than one where drafts are verified.
    #[serde(skip_serializing_if = "unset")]
    pub q_len: O::Late<u32>,
}

impl<O: Operands> Bindable for Sample<O> {
    type O = O;
    type Bound = Sample;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.logits, Access::Read));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Sample, B::Error> {
        let (logits, state, size) = (to.value(self.logits)?, to.state(), to.size());
        Ok(Sample { logits, state, scratch: None, rows: size.rows, q_len: size.q_len })
    }
}

impl Contract for Sample {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        require_scratch(self.scratch, Self::NAME)?;
        require_fit(&self.logits, Self::NAME, "logits")?;
        require_float(&self.logits, Self::NAME, "logits")?;
        require(self.logits.cols == self.state.limits.vocab, Self::NAME, || {
            format!(
                "logits have {} columns, vocab is {}",
                self.logits.cols, self.state.limits.vocab
            )
        })?;
        let (rows, q_len, limits) = (self.rows, self.q_len, &self.state.limits);
        require((1..=limits.tokens_per_row).contains(&q_len), Self::NAME, || {
            format!("{q_len} tokens per row; rows return up to {}", limits.tokens_per_row)
        })?;
        let fits = rows.checked_mul(q_len) == Some(self.logits.rows) && rows <= limits.rows;
        require(fits, Self::NAME, || {
            format!("{} rows of logits for a bucket of {rows} with {q_len} each", self.logits.rows)
        })
    }

    fn describe(&self) -> String {
        match self.q_len {
            1 => format!("sample {}", self.logits),
            q_len => format!("sample {}, verify {} drafts a row", self.logits, q_len - 1),
        }
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: self.logits.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::rows(self.rows)
    }

    fn scratch_slot(&mut self) -> Option<&mut Option<Span>> {
        Some(&mut self.scratch)
    }

    fn scratch_bytes(&self, target: &Target) -> u64 {
        self.partial_bytes(target)
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let s = &self.state;
        visit(self.logits.span, Access::Update);
        visit(s.counts.span, Access::Update);
        for table in [&s.params, &s.biases, &s.row_seat, &s.row_flags, &s.row_q_len] {
            visit(table.span, Access::Read);
        }
        for bank in s.mail {
            visit(bank, Access::Read);
        }
        for table in [&s.seat_len, &s.seat_token].into_iter().chain(&s.seen).chain(&s.history) {
            visit(table.span, Access::Update);
        }
        for table in [Some(&s.token), s.row_drafts.as_ref()].into_iter().flatten() {
            if self.q_len > 1 {
                visit(table.span, Access::Read);
            }
        }
        if let Some(scratch) = self.scratch {
            visit(scratch, Access::Write);
        }
        visit(s.ring, Access::Write);
    }
}

impl Sample {
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let end = StepEnd::new(memory, &self.state, self.rows, self.q_len);
        let logits = Matrix::new(memory, &self.logits);
        let mut values = vec![0.0; logits.cols];
        for r in 0..end.live {
            end.sample(r, |row, index| {
                logits.read_row(index, &mut values);
                row.adjust(&mut values);
                choose(row, &values)
            });
        }
        end.publish();
    }
}

/// Steps 3 and 4 by full sorts: simple, and slow.
fn choose(row: &SampledRow<'_>, logits: &[f32]) -> Choice {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    let kept = (row.temperature > 0.0).then(|| filter(row, logits, &order));
    let token = kept.as_ref().map_or(order[0], |kept| draw(row, logits, kept));
    let mut choice = Choice { token: token as u32, ..Choice::default() };
    if row.logprobs > 0 {
        let (temperature, kept) = match kept.filter(|_| row.of_drawn) {
            Some(kept) => (row.temperature, kept),
            None => (1.0, order.clone()),
        };
        let all = Distribution::at(temperature, kept.iter().map(|token| logits[*token]));
        let logprob = |token: usize| match kept.contains(&token) {
            true => all.logprob(logits[token]),
            false => f32::NEG_INFINITY,
        };
        choice.logprob = logprob(token);
        for (top, token) in choice.top.iter_mut().zip(order).take(row.alternatives()) {
            *top = (token as u32, logprob(token));
        }
    }
    choice
}

/// What a token weighs against the likeliest.
fn weigh(row: &SampledRow<'_>, logits: &[f32], likeliest: usize) -> impl Fn(usize) -> f64 {
    let scaled = move |token: usize| logits[token] / row.temperature;
    move |token| f64::from(scaled(token) - scaled(likeliest)).exp()
}

/// The tokens that the filters keep, the likeliest first.
fn filter(row: &SampledRow<'_>, logits: &[f32], order: &[usize]) -> Vec<usize> {
    let weight = weigh(row, logits, order[0]);
    let keep = if row.top_k == 0 { order.len() } else { (row.top_k as usize).min(order.len()) };
    let mut kept: Vec<usize> = order[..keep].to_vec();
    if row.top_p < 1.0 {
        let total: f64 = kept.iter().map(|token| weight(*token)).sum();
        let mut sum = 0.0;
        let reached = kept.iter().position(|token| {
            sum += weight(*token);
            sum >= f64::from(row.top_p) * total
        });
        kept.truncate(reached.map_or(kept.len(), |last| last + 1));
    }
    if row.min_p > 0.0 {
        kept.retain(|token| weight(*token) >= f64::from(row.min_p));
    }
    kept
}

fn draw(row: &SampledRow<'_>, logits: &[f32], kept: &[usize]) -> usize {
    let weight = weigh(row, logits, kept[0]);
    let mut kept = kept.to_vec();
    kept.sort_unstable();
    let total: f64 = kept.iter().map(|token| weight(*token)).sum();
    let mut sum = 0.0;
    let chosen = kept.iter().find(|token| {
        sum += weight(**token);
        sum > f64::from(row.uniform) * total
    });
    // Rounding may leave the last sum slightly below the total.
    *chosen.or(kept.last()).unwrap_or(&0)
}
