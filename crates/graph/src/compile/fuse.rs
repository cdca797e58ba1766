//! Fewer nodes: a norm becomes the prologue of the linears that read it, rope and KV write become the
//! prologue of attention. Both have kernels either way, so this is a choice, and a test compares.

use super::stage::{Kind, Stage, readers};
use crate::program::Program;
use crate::{Phase, ShapeKey};
use device::Target;
use serde::{Deserialize, Serialize};

/// What to fuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fusion {
    /// Norms into linears.
    pub norm: bool,
    /// Rope and KV write into attention in decode steps (those kernels want one token per row), into the product
    /// before it in prefill steps, where there is such a kernel (`rotate.rs`).
    pub rope: bool,
}

impl Fusion {
    /// Nothing.
    pub const NONE: Fusion = Fusion { norm: false, rope: false };
    /// Everything.
    pub const ALL: Fusion = Fusion { norm: true, rope: true };

    /// What suits a device and a key: everything, except that fused kernels round in other places on a GPU,
    /// so fixed kernels are never fused there.
    pub fn suited(target: &dyn Target, key: &ShapeKey) -> Fusion {
        if key.fixed && !target.fuses_exactly() { Fusion::NONE } else { Fusion::ALL }
    }
}

/// See the module's words.
pub fn fuse(program: &Program, mut stages: Vec<Stage>, phase: Phase, fusion: Fusion) -> Vec<Stage> {
    if fusion.norm {
        stages = fuse_norms(program, stages);
    }
    if fusion.rope && phase == Phase::Decode {
        stages = fuse_ropes(stages);
    }
    stages
}

/// A norm moves only if every reader is a linear without one, and only if it rounds like the fused
/// form does: to the dtype of its input.
fn fuse_norms(program: &Program, mut stages: Vec<Stage>) -> Vec<Stage> {
    let mut index = 0;
    while index < stages.len() {
        let Kind::RmsNorm { x, norm, out } = stages[index].kind else {
            index += 1;
            continue;
        };
        let users = readers(&stages, out);
        let takes_norm = |&user: &usize| {
            matches!(&stages[user].kind, Kind::Linear { x, norm: None, .. } if *x == out)
                && !residual_is(&stages[user], out)
        };
        let same_rounding = program.value(x).dtype == program.value(out).dtype;
        if users.is_empty() || !same_rounding || !users.iter().all(takes_norm) {
            index += 1;
            continue;
        }
        for user in users {
            if let Kind::Linear { x: input, norm: slot, .. } = &mut stages[user].kind {
                (*input, *slot) = (x, Some(norm));
            }
        }
        stages.remove(index);
    }
    stages
}

fn residual_is(stage: &Stage, value: crate::program::ValueId) -> bool {
    matches!(stage.kind, Kind::Linear { fold: super::stage::Fold::Residual(r), .. } if r == value)
}

fn fuse_ropes(mut stages: Vec<Stage>) -> Vec<Stage> {
    let mut index = 0;
    while index < stages.len() {
        if let Kind::RopeKv(rope) = stages[index].kind
            && let [user] = readers(&stages, rope.out)[..]
            && let Kind::Attention { qkv, rope: slot @ None, kv, .. } = &mut stages[user].kind
            && *kv == rope.kv
        {
            (*qkv, *slot) = (rope.qkv, Some(rope));
            stages.remove(index);
        } else {
            index += 1;
        }
    }
    stages
}
