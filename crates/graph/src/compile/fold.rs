//! Puts the prologue in front of a step, and fuses additions and activations into the epilogue of the linear whose output they
//! read: its kernels apply them to sums in registers. One that cannot be fused stays a separate op. Adapters are fused with
//! their linear where the caller says so.

use crate::program::{Program, ProgramOp, Step, Symbolic, ValueId};
use device::op::{Fused, FusedKernel, Lora, Prologue};
use device::operand::Unset;
use std::collections::HashMap;

/// Whether adapters are fused with their linear.
pub(crate) type Takes<'a> = &'a dyn Fn(&Lora<Symbolic>) -> bool;

/// The steps of a program with additions and activations folded, and adapters that `takes` names.
pub(crate) fn fold(program: &Program, takes: Takes<'_>) -> Vec<Step> {
    let first = program.is_step().then(|| Some(prologue()));
    let mut folder = Folder { uses: uses(program), takes, steps: first.into_iter().collect() };
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

struct Folder<'a> {
    takes: Takes<'a>,
    uses: HashMap<ValueId, usize>,
    /// A folded linear leaves `None` behind: it moves to the place of its epilogue, where everything that the
    /// epilogue reads is available.
    steps: Vec<Option<Step>>,
}

impl Folder<'_> {
    fn step(&mut self, step: &Step) {
        let ends = match &step.op {
            ProgramOp::Lora(lora) if (self.takes)(lora) => vec![(lora.base, step.op.clone())],
            op => op.epilogues(),
        };
        let folded = ends.into_iter().find_map(|(input, end)| Some((self.foldable(input)?, end)));
        let Some((linear, end)) = folded else { return self.steps.push(Some(step.clone())) };
        let linear = self.steps[linear].take().expect("foldable found it");
        let kernel = FusedKernel::Linear { handoff: Unset };
        let members = [linear.op.members(), &[end]].concat();
        let op = Fused { members, kernel }.into();
        self.steps.push(Some(Step { op, mark: linear.mark.or(step.mark), ..linear }));
    }

    /// The linear that makes `value`, alone or with adapters, if nothing else reads it.
    fn foldable(&self, value: ValueId) -> Option<usize> {
        let made = |step: &Option<Step>| {
            let step = step.as_ref();
            step.is_some_and(|step| {
                let linear = matches!(
                    step.op.members(),
                    [ProgramOp::Linear(_)] | [ProgramOp::Linear(_), ProgramOp::Lora(_)]
                );
                linear && step.op.made() == Some(value)
            })
        };
        let index = self.steps.iter().position(made)?;
        (self.uses[&value] == 1).then_some(index)
    }
}
