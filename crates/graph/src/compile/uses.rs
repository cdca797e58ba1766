//! Who reads what, among steps in the making.

use crate::program::{ProgramOp, Step, ValueId};

/// Indices of the steps that read `value`.
pub fn readers(steps: &[Step], value: ValueId) -> Vec<usize> {
    let reads = |step: &Step| step.op.reads().contains(&value);
    steps.iter().enumerate().filter(|(_, step)| reads(step)).map(|(index, _)| index).collect()
}

/// Whether nothing but gathers reads `value`: of its rows only some are ever looked at.
pub fn only_gathered(steps: &[Step], value: ValueId) -> bool {
    let readers = readers(steps, value);
    let gather = |&reader: &usize| matches!(steps[reader].op, ProgramOp::Gather(_));
    !readers.is_empty() && readers.iter().all(gather)
}
