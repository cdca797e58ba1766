//! The order stages run in.

use super::CompileError;
use super::stage::{Kind, Stage};
use crate::program::ValueId;
use crate::{Phase, ShapeKey};
use std::collections::HashSet;

/// In decode a row is a token, so the last token of each row is the value itself: such a gather
/// disappears.
pub fn drop_idle_gathers(mut stages: Vec<Stage>, key: &ShapeKey) -> Vec<Stage> {
    if key.phase != Phase::Decode {
        return stages;
    }
    while let Some(index) = stages.iter().position(|s| matches!(s.kind, Kind::Gather { .. })) {
        let Kind::Gather { x, out } = stages.remove(index).kind else { unreachable!("just found") };
        stages.iter_mut().for_each(|stage| stage.redirect(out, x));
    }
    stages
}

/// A topological order that keeps the given one wherever it can: each time the first stage whose
/// inputs are there. The prologue comes first and the sampler last, because they own the state.
pub fn order(mut waiting: Vec<Stage>) -> Result<Vec<Stage>, CompileError> {
    let made: HashSet<ValueId> = waiting.iter().filter_map(Stage::out).collect();
    let mut ready: HashSet<ValueId> = HashSet::new();
    let mut ordered = Vec::with_capacity(waiting.len());
    while !waiting.is_empty() {
        let last = waiting.len() == 1;
        let can_run = |stage: &Stage| match stage.kind {
            Kind::Prologue => true,
            Kind::Sample { .. } if !last => false,
            _ => stage.reads().iter().all(|v| ready.contains(v) || !made.contains(v)),
        };
        let prologue = waiting.iter().position(|stage| matches!(stage.kind, Kind::Prologue));
        let Some(next) = prologue.or_else(|| waiting.iter().position(can_run)) else {
            let names: Vec<String> = waiting.iter().map(Stage::full_name).collect();
            return Err(CompileError::Cycle { steps: names.join(", ") });
        };
        let stage = waiting.remove(next);
        ready.extend(stage.out());
        ordered.push(stage);
    }
    Ok(ordered)
}
