//! Fuses the rotation of q and k and the KV write into the epilogue of the linear that makes q, k and v, or into the
//! attention that reads them, where the device has such a kernel for this many tokens: it saves a pass over the linear's
//! output.

use super::mark::Marks;
use super::{CompileTarget, merge};
use crate::plan::PlacedValue;
use device::Node;
use device::op::FusedKernel;

/// Fuses rotations with what is before or after them. A plan can still be cut at attention: with the rotation before it.
/// Other marked nodes are not fused.
pub(crate) fn rotate(
    target: &CompileTarget,
    nodes: &mut Vec<Node>,
    marks: &mut Marks,
    values: &mut Vec<PlacedValue>,
) {
    let mut at = 0;
    while at + 1 < nodes.len() {
        let [first, second] =
            [at, at + 1].map(|at| [&marks.breaks, &marks.splits].map(|of| of.contains(&at)));
        if first == [false; 2]
            && let Some(kernel) = target.device.rotation(&nodes[at], &nodes[at + 1])
            && (second == [false; 2] || kernel == FusedKernel::Attention)
        {
            // It has the name of the op whose kernel runs it.
            let named = usize::from(kernel == FusedKernel::Attention);
            let op = nodes[at].op.clone().join(nodes[at + 1].op.clone(), kernel);
            let one = Node { op, ..nodes[at + named].clone() };
            merge::join(at..at + 2, one, nodes, marks, values);
            for (list, cut) in [&mut marks.breaks, &mut marks.splits].into_iter().zip(second) {
                if cut {
                    list.insert(list.partition_point(|other| *other < at), at);
                }
            }
        }
        at += 1;
    }
}
