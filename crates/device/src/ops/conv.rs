//! A causal convolution of each channel over the tokens of a row, and SiLU: token j of a row sees itself and the
//! `taps − 1` tokens of its sequence before it, whatever steps they came in.
//!
//! `y[c] = silu(bias[c] + Σ w[c][i] · x[j − taps + 1 + i][c])`, in f32, rounded once. Inputs of tokens before this step
//! are in the seat's carry, rows of channels in turns: the input of position p is in row p mod rows. There are `taps − 1`
//! rows, and one more for each draft that a row may have; a sequence's first token has zeros before it, so what a seat
//! carried for another sequence is never read. The last `taps − 1` inputs of a row are kept. In a step that verifies
//! drafts all are: the next one begins behind those that were accepted and finds the inputs before it, whatever was
//! rejected. Rows without tokens and pad rows change nothing.

mod cuda;
mod fast;

use super::{
    Access, Bindable, Contract, Division, Named, SpanVisitor, StepSize, Traffic, require,
    require_carry, require_division, require_matrices, require_vector,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::tables::{Fed, Tables};
use crate::cpu::view::Matrix;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, StepState};
use serde::{Deserialize, Serialize};

/// Most tokens that a result depends on.
const MOST_TAPS: u32 = 8;

/// Convolves the tokens of each sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Conv<O: Operands = Bound> {
    /// Its columns from `from` on, one for each channel.
    pub x: O::Value,
    /// The first channel's column.
    pub from: u32,
    /// channels × taps: the last tap is the token's own.
    pub w: O::Weight,
    /// One element per channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<O::Weight>,
    /// Of each seat: rows of channels, of the type of `x`.
    pub carry: O::Carry,
    /// tokens × channels.
    pub y: O::Value,
    /// Rows and lengths.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// Rows of the bucket.
    #[serde(skip_serializing_if = "unset")]
    pub rows: O::Late<u32>,
    /// Every row has exactly one token.
    #[serde(skip_serializing_if = "unset")]
    pub single: O::Late<bool>,
    /// Tokens of each row of a decode step: more than one verify drafts.
    #[serde(skip_serializing_if = "unset")]
    pub q_len: O::Late<u32>,
}

impl<O: Operands> Bindable for Conv<O> {
    type O = O;
    type Bound = Conv;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Weight(&mut self.w));
        if let Some(bias) = &mut self.bias {
            visit(Operand::Weight(bias));
        }
        visit(Operand::Carry(&mut self.carry));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Conv, B::Error> {
        let size = to.size();
        Ok(Conv {
            x: to.value(self.x)?,
            from: self.from,
            w: to.weight(self.w)?,
            bias: self.bias.map(|bias| to.weight(bias)).transpose()?,
            carry: to.carry(self.carry)?,
            y: to.value(self.y)?,
            state: to.state(),
            rows: size.rows,
            single: size.single,
            q_len: size.q_len,
        })
    }
}

impl Contract for Conv {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        let Conv { x, w, y, .. } = self;
        require_matrices(&[(x, "x"), (w, "w"), (y, "y")], Self::NAME)?;
        let (channels, taps) = (w.rows, w.cols);
        require((2..=MOST_TAPS).contains(&taps), Self::NAME, || {
            format!("{taps} taps, not 2 to {MOST_TAPS}")
        })?;
        let end = u64::from(self.from) + u64::from(channels);
        require(end <= u64::from(x.cols) && x.rows == y.rows, Self::NAME, || {
            format!("{channels} channels from column {} on, of {x} to {y}", self.from)
        })?;
        require(y.cols == channels, Self::NAME, || format!("y is {y}, not {channels} columns"))?;
        if let Some(bias) = &self.bias {
            require_vector(bias, channels, Self::NAME, "bias")?;
        }
        let limits = &self.state.limits;
        let cols = u64::from(self.places()) * u64::from(channels);
        require_carry(&self.carry, cols, limits, Self::NAME)?;
        require(self.carry.dtype == x.dtype, Self::NAME, || {
            format!("inputs of {:?} cannot be kept as {:?}", x.dtype, self.carry.dtype)
        })?;
        let (rows, tokens) = (self.rows, y.rows);
        let even = (self.q_len > 1).then_some(self.q_len);
        require(self.q_len <= limits.tokens_per_row, Self::NAME, || {
            format!("{} tokens a row; states are for {}", self.q_len, limits.tokens_per_row)
        })?;
        let division = Division { rows, tokens, single: self.single, even };
        require_division(&division, limits, Self::NAME)
    }

    fn describe(&self) -> String {
        let (channels, taps) = (self.w.rows, self.w.cols);
        format!("conv {} tokens, {channels} channels, {taps} taps", self.y.rows)
    }

    fn traffic(&self) -> Traffic {
        let read = self.x.dtype.bytes((self.x.rows * self.w.rows) as usize) as u64;
        let written = if self.single { 1 } else { self.kept(self.q_len as usize) as u32 };
        let inputs = self.rows * self.w.rows * (self.w.cols - 1 + written);
        let states = self.carry.dtype.bytes(inputs as usize) as u64;
        Traffic { weights: self.w.bytes(), values: read + self.y.bytes() + states }
    }

    fn step_size(&self) -> StepSize {
        StepSize::rows(self.rows)
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Read);
        visit(self.w.span, Access::Read);
        if let Some(bias) = &self.bias {
            visit(bias.span, Access::Read);
        }
        super::visit_step_tables(&self.state, visit);
        visit(self.carry.span, Access::Update);
        visit(self.y.span, Access::Write);
    }
}

impl Conv {
    /// Rows of inputs that a seat carries.
    fn places(&self) -> u32 {
        self.w.cols - 1 + self.state.limits.drafts()
    }

    /// How many of a row's inputs are kept: the last.
    fn kept(&self, tokens: usize) -> usize {
        if self.q_len > 1 { tokens } else { tokens.min(self.w.cols as usize - 1) }
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let tables = Tables::new(memory, &self.state);
        let (x, w) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.w));
        let (carry, y) = (Matrix::new(memory, &self.carry), Matrix::new(memory, &self.y));
        let bias = self.bias.as_ref().map(|bias| Matrix::new(memory, bias));
        let (channels, kept) = (w.rows, w.cols - 1);
        for row in 0..self.rows as usize {
            let Some(Fed { seat, tokens, before, .. }) = tables.fed(row, self.single) else {
                continue;
            };
            for c in 0..channels {
                let place = |position: usize| position % self.places() as usize * channels + c;
                let old = |i: usize| match (before + i).checked_sub(kept) {
                    Some(position) => carry.get(seat, place(position)),
                    None => 0.0,
                };
                let mut inputs: Vec<f32> = (0..kept).map(old).collect();
                inputs.extend(tokens.clone().map(|t| x.get(t, self.from as usize + c)));
                for (j, token) in tokens.clone().enumerate() {
                    let term = |i: usize| f64::from(w.get(c, i)) * f64::from(inputs[j + i]);
                    let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias.get(0, c)));
                    let sum = bias + (0..=kept).map(term).sum::<f64>();
                    y.set(token, c, (sum / (1.0 + (-sum).exp())) as f32);
                }
                let count = tokens.len();
                (count - self.kept(count)..count)
                    .for_each(|j| carry.set(seat, place(before + j), inputs[kept + j]));
            }
        }
    }
}
