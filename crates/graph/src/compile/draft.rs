//! In a step that verifies drafts, the op that makes them stands between the prologue and everything that reads tokens.

use crate::ShapeKey;
use crate::program::Step;
use device::op::Draft;
use device::operand::Unset;

/// The steps, the first of which is the prologue, with the drafter after it if the key has drafts.
pub(crate) fn draft(mut steps: Vec<Step>, key: &ShapeKey) -> Vec<Step> {
    if key.q_len > 1 {
        let op = Draft { state: Unset, rows: Unset, q_len: Unset };
        let step = Step { op: op.into(), name: "draft".into(), layer: None, mark: None };
        steps.insert(1, step);
    }
    steps
}
