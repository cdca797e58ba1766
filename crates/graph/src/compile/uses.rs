//! Which steps read a value.

use crate::program::{ProgramOp, Step, ValueId};

/// Indices of the steps that read `value`.
pub(crate) fn readers(steps: &[Step], value: ValueId) -> Vec<usize> {
    let reads = |step: &Step| step.op.reads().contains(&value);
    steps.iter().enumerate().filter(|(_, step)| reads(step)).map(|(index, _)| index).collect()
}

/// Whether nothing but gathers reads `value`: only some of its rows are read.
pub(crate) fn only_gathered(steps: &[Step], value: ValueId) -> bool {
    let readers = readers(steps, value);
    let gather = |&reader: &usize| matches!(steps[reader].op, ProgramOp::Gather(_));
    !readers.is_empty() && readers.iter().all(gather)
}
