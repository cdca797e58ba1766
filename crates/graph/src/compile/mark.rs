//! Where a plan may be cut: marks by op name (the target's) and by step (the model's).

use super::CompileTarget;
use crate::program::{Mark, Step};

/// Node indices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Nodes `breakable` runs eagerly, between recorded segments.
    pub breaks: Vec<usize>,
    /// Nodes `piecewise` runs between its pieces.
    pub splits: Vec<usize>,
}

/// The marks of a target and a model.
pub fn mark(target: &CompileTarget, steps: &[Step]) -> Marks {
    let at = |mark: Mark, names: &std::collections::BTreeSet<String>| {
        let marked = |step: &Step| step.mark == Some(mark) || names.contains(step.op.name());
        (0..steps.len()).filter(|&index| marked(&steps[index])).collect()
    };
    Marks { breaks: at(Mark::Break, &target.breaks), splits: at(Mark::Split, &target.splits) }
}
