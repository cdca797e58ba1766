//! Chooses a draft of each row, and derives what the model that drafts is fed next: that draft. Its state is exchanged, as that
//! of [`crate::op::DraftRows`]. For each live row r, draft `index` (from 0):
//!
//! 1. The draft is the token with the largest logit, the lowest among equals; NaN is less than every number. Where the drafter knows
//!    fewer tokens than the model, a table says which they are ([`crate::step::Features::ids`]).
//! 2. It becomes token `index + 1` of the row in the step that verifies, if the row may accept so many (`row_drafts`). The drafts of
//!    a `PROMPT` row are in the mail: they stay, and the next one is drafted after them.
//! 3. The row feeds it next, at position len + `index + 1` less `behind`.
//!
//! Other samplers than the greedy one would not make drafts likelier to be accepted: the token that is verified is drawn
//! with one random number, whatever was drafted.

mod cuda;

use super::draft_rows::fed::{self, Fed};
use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require, require_fit,
    require_float, require_indices,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Matrix, Words};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::step::row;
use crate::{Result, StepState, Tensor};
use serde::{Deserialize, Serialize};

/// Chooses a draft of each row and derives what is fed next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Propose<O: Operands = Bound> {
    /// rows × vocab, f32 or bf16.
    pub logits: O::Value,
    /// By how much its positions are less than those of the tokens.
    #[serde(default)]
    pub behind: u32,
    /// The tables of both models.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// Rows of the bucket.
    #[serde(skip_serializing_if = "unset")]
    pub rows: O::Late<u32>,
    /// Which draft it is: the first, unless it is set later.
    #[serde(skip_serializing_if = "unset")]
    pub index: O::Late<u32>,
    /// Most drafts of a row in this step; likewise.
    #[serde(skip_serializing_if = "unset")]
    pub drafts: O::Late<u32>,
}

impl<O: Operands> Bindable for Propose<O> {
    type O = O;
    type Bound = Propose;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.logits, Access::Read));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Propose, B::Error> {
        let (logits, state, rows) = (to.value(self.logits)?, to.state(), to.size().rows);
        Ok(Propose { logits, behind: self.behind, state, rows, index: 0, drafts: 1 })
    }
}

impl Contract for Propose {
    fn check(&self) -> Result<()> {
        fed::check(&self.state, self.rows, self.drafts, Self::NAME)?;
        require_fit(&self.logits, Self::NAME, "logits")?;
        require_float(&self.logits, Self::NAME, "logits")?;
        let (rows, cols, vocab) = (self.logits.rows, self.logits.cols, self.state.limits.vocab);
        require(rows == self.rows && cols <= vocab, Self::NAME, || {
            format!("{rows}×{cols} logits for {} rows and a vocabulary of {vocab}", self.rows)
        })?;
        if let Some(ids) = self.ids() {
            require_indices(&ids, cols, Self::NAME, "ids")?;
        }
        require(self.behind <= 1, Self::NAME, || format!("positions {} behind", self.behind))?;
        require(self.index < self.drafts, Self::NAME, || {
            format!("draft {} of {}", self.index, self.drafts)
        })
    }

    fn describe(&self) -> String {
        format!("propose draft {} of {} from {}", self.index + 1, self.drafts, self.logits)
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: self.logits.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::rows(self.rows)
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.logits.span, Access::Read);
        if let Some(ids) = self.ids() {
            visit(ids.span, Access::Read);
        }
        fed::visit(&self.state, visit);
        if let Some(verified) = &self.state.drafting {
            visit(verified.q_start.span, Access::Read);
            visit(verified.token.span, Access::Update);
        }
        if let Some(drafts) = &self.state.row_drafts {
            visit(drafts.span, Access::Read);
        }
    }
}

impl Propose {
    /// Which tokens of the model its own are, if they are not the same.
    fn ids(&self) -> Option<Tensor> {
        self.state.features.and_then(|features| features.ids)
    }

    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, Propose::reference)
    }

    /// Both the reference and the CPU version: one pass over the logits, which are in the cache.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let mut fed = Fed::new(memory, &self.state, self.rows, 1);
        let verified = self.state.exchanged().expect("checked with the op");
        let verified = Tables::new(memory, &verified);
        let logits = Matrix::new(memory, &self.logits);
        let mut values = vec![0.0; logits.cols];
        let ids = self.ids().map(|ids| Words::new(memory, &ids));
        let last = self.state.limits.vocab - 1;
        let known = |own: u32| ids.map_or(own, |ids| ids.get(own as usize)).min(last);
        let (next, behind) = (self.index as usize + 1, self.behind as usize);
        for r in 0..fed.live {
            logits.read_row(r, &mut values);
            let place = verified.q_start.get(r) as usize + next;
            let given = verified.row_flags.get(r) & row::PROMPT != 0;
            let token = if given { verified.token.get(place) } else { known(largest(&values)) };
            if !given && self.index < verified.drafts(r) {
                verified.token.set(place, token);
            }
            let (_, len) = fed.seat(r);
            let there = len + next < verified.limits.context() as usize;
            let position = (len + next).checked_sub(behind).filter(|_| there);
            fed.put(r, 0, position, token);
            fed.end_row(r, position.map_or(usize::MAX, |position| position + 1));
        }
        fed.end();
    }
}

/// The index of the largest number, the lowest among equals.
fn largest(values: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (index, &value) in values.iter().enumerate() {
        if value > best.1 {
            best = (index, value);
        }
    }
    best.0 as u32
}
