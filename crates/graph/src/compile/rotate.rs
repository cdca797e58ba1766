//! Fuses the rotation of q and k and the KV write into the epilogue of the linear that makes q, k and v, where the
//! device has such a kernel for this many tokens: it saves a pass over the linear's output.

use super::mark::Marks;
use super::{CompileTarget, merge};
use crate::plan::PlacedValue;
use device::Node;
use device::op::{FusedKernel, NormHandoff};

/// Fuses linears with rotations. A marked node is not fused.
pub(crate) fn rotate(
    target: &CompileTarget,
    nodes: &mut Vec<Node>,
    marks: &mut Marks,
    values: &mut Vec<PlacedValue>,
) {
    let mut at = 0;
    while at + 1 < nodes.len() {
        let marked = |at| marks.breaks.contains(&at) || marks.splits.contains(&at);
        if !marked(at) && !marked(at + 1) && target.device.can_rotate(&nodes[at], &nodes[at + 1]) {
            let kernel = FusedKernel::Linear { handoff: NormHandoff::Nothing };
            let op = nodes[at].op.clone().join(nodes[at + 1].op.clone(), kernel);
            let one = Node { op, ..nodes[at].clone() };
            merge::join(at..at + 2, one, nodes, marks, values);
        }
        at += 1;
    }
}
