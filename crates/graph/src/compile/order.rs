//! The order steps run in.

use super::CompileError;
use crate::program::{ProgramOp, Step, ValueId};
use crate::{Phase, ShapeKey};
use std::collections::HashSet;

/// In a decode step a token is sampled after each token, drafts included, so there is nothing to select: gathers of
/// the last token of each row disappear.
pub(crate) fn drop_idle_gathers(mut steps: Vec<Step>, key: &ShapeKey) -> Vec<Step> {
    if key.phase != Phase::Decode {
        return steps;
    }
    let mut index = 0;
    while index < steps.len() {
        let ProgramOp::Gather(gather) = &steps[index].op else {
            index += 1;
            continue;
        };
        let (x, y) = (gather.x, gather.y);
        steps.remove(index);
        steps.iter_mut().for_each(|step| step.op.redirect(y, x));
    }
    steps
}

/// A topological order that keeps the given one wherever it can: each time the first step whose
/// inputs are there. The prologue comes first and the end last, because they own the state.
pub fn order(mut waiting: Vec<Step>) -> Result<Vec<Step>, CompileError> {
    let made: HashSet<ValueId> = waiting.iter().filter_map(|step| step.op.made()).collect();
    let mut ready: HashSet<ValueId> = HashSet::new();
    let mut ordered = Vec::with_capacity(waiting.len());
    while !waiting.is_empty() {
        let last = waiting.len() == 1;
        let can_run = |step: &Step| {
            let ends = matches!(step.op, ProgramOp::Sample(_) | ProgramOp::Publish(_));
            let early = ends && !last;
            !early && step.op.reads().iter().all(|v| ready.contains(v) || !made.contains(v))
        };
        let prologue = waiting.iter().position(|step| matches!(step.op, ProgramOp::Prologue(_)));
        let Some(next) = prologue.or_else(|| waiting.iter().position(can_run)) else {
            let names: Vec<String> = waiting.iter().map(Step::full_name).collect();
            return Err(CompileError::Cycle { steps: names.join(", ") });
        };
        let step = waiting.remove(next);
        ready.extend(step.op.made());
        ordered.push(step);
    }
    Ok(ordered)
}
