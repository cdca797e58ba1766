//! Fewer nodes: a norm becomes the prologue of the linears that read it, rope and KV write become the
//! prologue of attention. Kernels exist for the fused and the unfused form; a test compares them.

use super::uses::readers;
use crate::ShapeKey;
use crate::program::{Program, ProgramOp, Step, ValueId};
use device::Target;
use device::op::{Fused, FusedKernel};
use device::operand::Unset;
use serde::{Deserialize, Serialize};

/// What to fuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fusion {
    /// Norms into linears.
    pub norm: bool,
    /// Rope and KV write into attention in decode steps of one token per row; in others into the linear before it, or
    /// into attention, where there is such a kernel (`rotate.rs`).
    pub rope: bool,
    /// Adapters into the linear that they add to (`adapt.rs`).
    pub adapters: bool,
}

impl Fusion {
    /// Nothing.
    pub const NONE: Fusion = Fusion { norm: false, rope: false, adapters: false };
    /// Everything.
    pub const ALL: Fusion = Fusion { norm: true, rope: true, adapters: true };

    /// The default for a device and a key: fuse everything. Exception: on a GPU fused kernels round in other
    /// places, so fixed kernels are never fused there.
    pub(crate) fn suited(target: &dyn Target, key: &ShapeKey) -> Fusion {
        if key.fixed && !target.fuses_exactly() { Fusion::NONE } else { Fusion::ALL }
    }
}

/// The steps with norms and rotations fused as `fusion` asks.
pub fn fuse(program: &Program, mut steps: Vec<Step>, key: &ShapeKey, fusion: Fusion) -> Vec<Step> {
    if fusion.norm {
        steps = fuse_norms(program, steps);
    }
    if fusion.rope && key.single() {
        steps = fuse_ropes(steps);
    }
    steps
}

/// A norm moves only if every reader is a linear without one, and only if it rounds like the fused
/// form does: to the dtype of its input.
fn fuse_norms(program: &Program, mut steps: Vec<Step>) -> Vec<Step> {
    let mut index = 0;
    while index < steps.len() {
        let ProgramOp::RmsNorm(norm) = steps[index].op.clone() else {
            index += 1;
            continue;
        };
        let users = readers(&steps, norm.y);
        let same_rounding = program.value(norm.x).dtype == program.value(norm.y).dtype;
        let takes_norm = |&user: &usize| takes_norm(&steps[user].op, norm.y);
        if users.is_empty() || !same_rounding || !users.iter().all(takes_norm) {
            index += 1;
            continue;
        }
        for user in users {
            let members = [&[norm.clone().into()], steps[user].op.members()].concat();
            let kernel = FusedKernel::Linear { handoff: Unset };
            steps[user].op = Fused { members, kernel }.into();
        }
        steps.remove(index);
    }
    steps
}

/// Whether an op begins with a linear over `value` and reads it nowhere else, but for the linear's adapters.
fn takes_norm(op: &ProgramOp, value: ValueId) -> bool {
    let [ProgramOp::Linear(linear), others @ ..] = op.members() else { return false };
    let others = if let [ProgramOp::Lora(_), rest @ ..] = others { rest } else { others };
    linear.x == value && others.iter().all(|other| !other.reads().contains(&value))
}

fn fuse_ropes(mut steps: Vec<Step>) -> Vec<Step> {
    let mut index = 0;
    while index < steps.len() {
        if let ProgramOp::RopeKv(rope) = &steps[index].op
            && let [user] = readers(&steps, rope.out)[..]
            && let ProgramOp::Attention(attention) = &steps[user].op
            && attention.kv == rope.kv
        {
            let members = vec![steps[index].op.clone(), steps[user].op.clone()];
            steps[user].op = Fused { members, kernel: FusedKernel::Attention }.into();
            steps.remove(index);
        } else {
            index += 1;
        }
    }
    steps
}
