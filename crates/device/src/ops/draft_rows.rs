//! Begins the drafts of a step that verifies some, where another model makes them: derives what that model is fed first. Its
//! state is the step's with the tables of both models exchanged ([`StepState::exchanged`]): what it calls `drafting` is
//! what the model that verifies is fed. For each live row, with len tokens in its pages:
//!
//! 1. `row_drafts` gets the number of drafts that it may accept: as many as its flags say ([`crate::step::row::drafts`]), at
//!    most `drafts`, and no more than there are positions with a page after that of the token it feeds.
//! 2. The row feeds `each` tokens, the last of them the one at position len: those of its history. The token at len is the one
//!    that is known and has no keys yet; those before it have some, but for the last draft of a step that accepted all.
//!    Tokens before the first have no page, and such a row may see nothing.
//!
//! A drafter that reads hidden states of the model that verifies is fed every token at the position `behind` it, which is that of
//! the states.
//!
//! Pad rows get 0 drafts. The tables of what is fed are those of a prologue: pad rows, pad tokens, the longest row, the
//! attention split.

mod cuda;
pub(super) mod fed;

use super::{Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::operand::{Binder, Bound, OperandVisitor, Operands, unset};
use crate::step::row;
use crate::{Result, StepState};
use fed::Fed;
use serde::{Deserialize, Serialize};

/// Derives what a model is fed that drafts, and how many drafts each row may accept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct DraftRows<O: Operands = Bound> {
    /// Tokens that each row feeds.
    pub each: u32,
    /// By how much its positions are less than those of the tokens.
    #[serde(default)]
    pub behind: u32,
    /// The tables of both models.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// Rows of the bucket.
    #[serde(skip_serializing_if = "unset")]
    pub rows: O::Late<u32>,
    /// Most drafts of a row in this step: 1, unless it is set later.
    #[serde(skip_serializing_if = "unset")]
    pub drafts: O::Late<u32>,
}

impl<O: Operands> Bindable for DraftRows<O> {
    type O = O;
    type Bound = DraftRows;

    fn operands(&mut self, _visit: OperandVisitor<'_, O>) {}

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<DraftRows, B::Error> {
        let (state, rows, each, behind) = (to.state(), to.size().rows, self.each, self.behind);
        Ok(DraftRows { each, behind, state, rows, drafts: 1 })
    }
}

impl Contract for DraftRows {
    fn check(&self) -> Result<()> {
        fed::check(&self.state, self.rows, self.drafts, Self::NAME)?;
        let (rows, each, tokens) = (self.rows, self.each, self.state.limits.tokens);
        let fits = each > 0 && rows.checked_mul(each).is_some_and(|all| all <= tokens);
        require(fits, Self::NAME, || format!("{rows} rows of {each} tokens; {tokens} are most"))
    }

    fn describe(&self) -> String {
        let (rows, each, drafts) = (self.rows, self.each, self.drafts);
        format!("draft {drafts} for each of {rows} rows, {each} tokens of each at first")
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn step_size(&self) -> StepSize {
        StepSize { rows: Some(self.rows), tokens: Some(self.rows * self.each) }
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        fed::visit(&self.state, visit);
        if let Some(history) = &self.state.history {
            visit(history.span, Access::Read);
        }
        if let Some(drafts) = &self.state.row_drafts {
            visit(drafts.span, Access::Write);
        }
    }
}

impl DraftRows {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, DraftRows::reference)
    }

    /// Both the reference and the CPU version: it is a few words per row.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let mut fed = Fed::new(memory, &self.state, self.rows, self.each);
        let tables = fed.tables;
        let (drafts, history) = (tables.row_drafts, tables.history);
        let (drafts, history) = drafts.zip(history).expect("checked with the op");
        let (context, each) = (tables.limits.context() as usize, self.each as usize);
        let behind = self.behind as usize;
        for r in 0..fed.live {
            let (seat, len) = fed.seat(r);
            let asked = row::drafts(tables.row_flags.get(r)).min(self.drafts) as usize;
            let most = (1..=asked).take_while(|j| tables.page(seat, len + j) != 0).count();
            drafts.set(r, most as u32);
            for j in 0..each {
                let known = (len + j + 1).checked_sub(each).filter(|at| *at < context);
                let token = known.map_or(0, |at| history.get(seat * context + at));
                fed.put(r, j, known.and_then(|at| at.checked_sub(behind)), token);
            }
            fed.end_row(r, (len + 1).saturating_sub(behind));
        }
        (fed.live..self.rows as usize).for_each(|r| drafts.set(r, 0));
        fed.end();
    }
}
