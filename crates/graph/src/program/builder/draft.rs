//! Ops of programs that draft.

use super::{Dim, ProgramBuilder, Value, ValueId};
use device::op::{Follow, Kept, Propose, Recall, Tap};
use device::operand::Unset;

impl ProgramBuilder {
    /// Drafts a token of each row from `logits`, fed at the position `behind` it; ends a program that drafts.
    pub fn propose(&mut self, name: &str, logits: ValueId, behind: u32) {
        let (state, rows, index, drafts) = (Unset, Unset, Unset, Unset);
        self.push(name, Propose { logits, behind, state, rows, index, drafts }.into());
    }

    /// What was kept of each row for a drafter: at its last token that was accepted, or after the drafter's last draft.
    pub fn recall(&mut self, name: &str, cols: u32, drafted: bool) -> ValueId {
        let dtype = self.program.shape.act_dtype;
        self.make(name, Dim::Tokens, cols, dtype, |y| Recall { drafted, y, state: Unset })
    }

    /// For each token of a step that ran the states that were kept of the token before it.
    pub fn follow(&mut self, name: &str, cols: u32) -> ValueId {
        let (dtype, x, own) = (self.program.shape.act_dtype, None, false);
        self.make(name, Dim::Tokens, cols, dtype, |y| Follow { x, own, y, state: Unset })
    }

    /// The states that were kept of each token of a step that ran.
    pub fn kept_states(&mut self, name: &str, cols: u32) -> ValueId {
        let (dtype, x, own) = (self.program.shape.act_dtype, None, true);
        self.make(name, Dim::Tokens, cols, dtype, |y| Follow { x, own, y, state: Unset })
    }

    /// As [`Self::follow`], of what was made of [`Self::kept_states`].
    pub fn follow_made(&mut self, name: &str, x: ValueId) -> ValueId {
        let Value { rows, cols, dtype, .. } = *self.program.value(x);
        let (x, own) = (Some(x), false);
        self.make(name, rows, cols, dtype, |y| Follow { x, own, y, state: Unset })
    }

    /// Keeps the drafter's own states of each row for its next draft.
    pub fn keep(&mut self, name: &str, x: ValueId) {
        self.push(name, Tap { x, to: Kept::Row, state: Unset }.into());
    }
}
