//! Puts the prologue in front of a step, and fuses additions and activations into the epilogue of the linear whose output they
//! read: its kernels apply them to sums in registers. One that cannot be fused stays a separate op.

use crate::program::{Program, ProgramOp, Step, ValueId};
use device::op::{Fused, FusedKernel, Prologue};
use device::operand::Unset;
use std::collections::HashMap;

/// The steps of a program with additions and activations folded.
pub fn fold(program: &Program) -> Vec<Step> {
    let first = program.is_step().then(|| Some(prologue()));
    let mut folder = Folder { uses: uses(program), steps: first.into_iter().collect() };
    program.steps.iter().for_each(|step| folder.step(step));
    folder.steps.into_iter().flatten().collect()
}

fn prologue() -> Step {
    let op = Prologue { state: Unset, rows: Unset, tokens: Unset, pages: Unset, given: Unset };
    Step { op: op.into(), name: "prologue".into(), layer: None, mark: None }
}

fn uses(program: &Program) -> HashMap<ValueId, usize> {
    let mut uses = HashMap::new();
    for input in program.steps.iter().flat_map(|step| step.op.reads()) {
        *uses.entry(input).or_default() += 1;
    }
    uses
}

struct Folder {
    uses: HashMap<ValueId, usize>,
    /// A folded linear leaves `None` behind: it moves to the place of its epilogue, where everything that the
    /// epilogue reads is available.
    steps: Vec<Option<Step>>,
}

impl Folder {
    fn step(&mut self, step: &Step) {
        let folded = step
            .op
            .epilogues()
            .into_iter()
            .find_map(|(input, end)| Some((self.foldable(input)?, end)));
        let Some((linear, end)) = folded else { return self.steps.push(Some(step.clone())) };
        let linear = self.steps[linear].take().expect("foldable found it");
        let kernel = FusedKernel::Linear { handoff: Unset };
        let op = Fused { members: vec![linear.op, end], kernel }.into();
        self.steps.push(Some(Step { op, mark: linear.mark.or(step.mark), ..linear }));
    }

    /// The linear that makes `value`, if nothing else reads it.
    fn foldable(&self, value: ValueId) -> Option<usize> {
        let made = |step: &Option<Step>| {
            let step = step.as_ref();
            step.is_some_and(|step| {
                matches!(step.op, ProgramOp::Linear(_)) && step.op.made() == Some(value)
            })
        };
        let index = self.steps.iter().position(made)?;
        (self.uses[&value] == 1).then_some(index)
    }
}
