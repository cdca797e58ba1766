//! Turns a program's steps into stages; add and silu·mul become the epilogue of the linear before
//! them, and the prologue is put in front.

use super::CompileError;
use super::stage::{Fold, Kind, Rope, Stage};
use crate::program::{Program, ProgramOp, Step, ValueId, WeightLayout};
use std::collections::HashMap;

/// See the module's words.
pub fn fold(program: &Program) -> Result<Vec<Stage>, CompileError> {
    let mut folder = Folder { program, uses: uses(program), stages: vec![Some(prologue())] };
    for step in &program.steps {
        folder.step(step)?;
    }
    Ok(folder.stages.into_iter().flatten().collect())
}

fn prologue() -> Stage {
    Stage { kind: Kind::Prologue, name: "prologue".into(), layer: None, mark: None }
}

fn uses(program: &Program) -> HashMap<ValueId, usize> {
    let mut uses = HashMap::new();
    for input in program.steps.iter().flat_map(|step| step.op.inputs()) {
        *uses.entry(input).or_default() += 1;
    }
    uses
}

struct Folder<'a> {
    program: &'a Program,
    uses: HashMap<ValueId, usize>,
    /// A folded linear leaves `None` behind: it moves to where its epilogue stood, by when
    /// everything the epilogue reads is there.
    stages: Vec<Option<Stage>>,
}

impl Folder<'_> {
    fn step(&mut self, step: &Step) -> Result<(), CompileError> {
        let kind = match step.op {
            ProgramOp::Embed { table, out } => Kind::Embed { table, out },
            ProgramOp::RmsNorm { x, norm, out } => Kind::RmsNorm { x, norm, out },
            ProgramOp::Linear { x, w, bias, out } => {
                Kind::Linear { x, w, bias, norm: None, fold: Fold::Store, out }
            }
            ProgramOp::RopeKv { qkv, q_norm, k_norm, kv, out } => {
                Kind::RopeKv(Rope { qkv, q_norm, k_norm, kv, out })
            }
            ProgramOp::Attention { qkv, scale, window, kv, out } => {
                Kind::Attention { qkv, rope: None, scale, window, kv, out }
            }
            ProgramOp::GatherLast { x, out } => Kind::Gather { x, out },
            ProgramOp::Sample { logits } => Kind::Sample { logits },
            ProgramOp::Add { a, b, out } => {
                // `b` first: by habit the residual is written on the left.
                let (product, residual) = match self.foldable(b) {
                    Ok(_) => (b, a),
                    Err(_) => (a, b),
                };
                return self.fold_into(step, product, Fold::Residual(residual), out);
            }
            ProgramOp::SiluMul { x, out } => {
                let index = self.foldable(x).map_err(|why| no_epilogue(step, why))?;
                if let Some(Stage { kind: Kind::Linear { w, .. }, .. }) = &self.stages[index]
                    && self.program.weight(*w).layout != WeightLayout::GateUp
                {
                    return Err(no_epilogue(step, "gate and up rows do not alternate"));
                }
                return self.fold_into(step, x, Fold::SiluMul, out);
            }
        };
        let Step { name, layer, mark, .. } = step.clone();
        self.stages.push(Some(Stage { kind, name, layer, mark }));
        Ok(())
    }

    /// The stage that makes `value`, if it is a linear whose product may be changed.
    fn foldable(&self, value: ValueId) -> Result<usize, &'static str> {
        let made = |stage: &Option<Stage>| stage.as_ref().and_then(Stage::out) == Some(value);
        let index = self.stages.iter().position(made).ok_or("it is made later")?;
        match self.stages[index].as_ref().map(|stage| &stage.kind) {
            Some(Kind::Linear { fold: Fold::Store, .. }) if self.uses[&value] == 1 => Ok(index),
            Some(Kind::Linear { fold: Fold::Store, .. }) => Err("something else reads the product"),
            Some(Kind::Linear { .. }) => Err("the linear has an epilogue already"),
            _ => Err("no linear makes it"),
        }
    }

    fn fold_into(
        &mut self,
        step: &Step,
        product: ValueId,
        epilogue: Fold,
        result: ValueId,
    ) -> Result<(), CompileError> {
        let index = self.foldable(product).map_err(|why| no_epilogue(step, why))?;
        let mut stage = self.stages[index].take().expect("foldable found it");
        if let Kind::Linear { fold, out, .. } = &mut stage.kind {
            *fold = epilogue;
            *out = result;
        }
        stage.mark = stage.mark.or(step.mark);
        self.stages.push(Some(stage));
        Ok(())
    }
}

fn no_epilogue(step: &Step, why: &'static str) -> CompileError {
    CompileError::NoEpilogue { step: step.name.clone(), why }
}
