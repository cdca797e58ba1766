//! Where a plan may be cut: marks by op name (the target's) and by step (the model's).

use super::CompileTarget;
use super::stage::Stage;
use crate::program::Mark;

/// Node indices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Nodes `breakable` runs eagerly, between recorded segments.
    pub breaks: Vec<usize>,
    /// Nodes `piecewise` runs between its pieces.
    pub splits: Vec<usize>,
}

/// See the module's words.
pub fn mark(target: &CompileTarget, stages: &[Stage]) -> Marks {
    let at = |mark: Mark, names: &std::collections::BTreeSet<String>| {
        let marked = |stage: &Stage| stage.mark == Some(mark) || names.contains(stage.op_name());
        (0..stages.len()).filter(|&index| marked(&stages[index])).collect()
    };
    Marks { breaks: at(Mark::Break, &target.breaks), splits: at(Mark::Split, &target.splits) }
}
