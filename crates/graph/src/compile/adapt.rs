//! Steps without adapters have none of their nodes: their plans are those of a program that knows no adapters. In steps with
//! adapters, linears take theirs in where the device has one kernel for both; other adapters are nodes of their own.

use super::{CompileError, CompileTarget, Schedule, bind};
use crate::ShapeKey;
use crate::layout::Layout;
use crate::program::{Program, ProgramOp, ValueId};
use device::{Op, StepLimits};
use std::borrow::Cow;
use std::collections::HashSet;

/// The program for a key: without what adapters add, unless the key asks for it.
pub(crate) fn adapt<'a>(program: &'a Program, key: &ShapeKey) -> Cow<'a, Program> {
    if key.adapters || !program.has_adapters() {
        return Cow::Borrowed(program);
    }
    let mut plain = program.clone();
    let mut index = 0;
    while index < plain.steps.len() {
        let ProgramOp::Lora(lora) = &plain.steps[index].op else {
            index += 1;
            continue;
        };
        let (base, y) = (lora.base, lora.y);
        plain.steps.remove(index);
        plain.steps.iter_mut().for_each(|step| step.op.redirect(y, base));
    }
    Cow::Owned(plain)
}

/// The results of adapters that a schedule has in linears which no kernel of the device runs so.
pub(crate) fn refused(
    program: &Program,
    target: &CompileTarget,
    limits: &StepLimits,
    key: &ShapeKey,
    schedule: &Schedule,
) -> Result<HashSet<ValueId>, CompileError> {
    let Schedule { steps, placement } = schedule;
    let adapters_of = |op: &ProgramOp| {
        let members = op.members().iter();
        members
            .filter_map(|op| if let ProgramOp::Lora(lora) = op { Some(lora.y) } else { None })
            .next()
    };
    let fused =
        |op: &ProgramOp| matches!(op, ProgramOp::Fused(_)).then(|| adapters_of(op)).flatten();
    if steps.iter().all(|step| fused(&step.op).is_none()) {
        return Ok(HashSet::new());
    }
    // Kernels are asked about bound ops; a layout that never becomes memory binds them.
    let bindings = Layout::imagined(program, *limits, placement.bytes)?.bindings;
    let nodes = bind::bind(program, key, &bindings, steps, placement)?;
    let unfit = |op: &Op| !target.device.adapts(op);
    let pairs = steps.iter().zip(&nodes).filter(|(_, node)| unfit(&node.op));
    Ok(pairs.filter_map(|(step, _)| fused(&step.op)).collect())
}
