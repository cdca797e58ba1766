//! Which kernel runs an op in this bucket, and the scratch it needs.
//!
//! The device chooses the kernel by shape; a key of fixed kernels overrides it. Scratch is one span for
//! all ops of all graphs: nothing in it outlives an op, except what a linear prepares for the norm of
//! the next one.

use super::{Bindings, CompileError, CompileTarget};
use crate::ShapeKey;
use device::Node;
use device::variant::Pick;

/// Sets scratch, and what linears prepare for each other's norms.
pub(crate) fn choose(
    target: &CompileTarget,
    bindings: &Bindings,
    nodes: &mut [Node],
) -> Result<(), CompileError> {
    target.device.hand_on(nodes);
    for node in nodes {
        let needed = target.device.scratch_bytes(&node.op);
        if needed == 0 {
            continue;
        }
        let span = bindings.scratch.filter(|span| span.len >= needed).ok_or_else(|| {
            let available = bindings.scratch.map_or(0, |span| span.len);
            CompileError::Binding {
                what: format!("scratch for `{}`", node.name),
                problem: format!("{needed} bytes are needed, {available} are bound"),
            }
        })?;
        if !node.op.set_scratch(Some(span)) {
            let what = format!("scratch for `{}`", node.name);
            let problem = format!("{} never has any", node.op.name());
            return Err(CompileError::Binding { what, problem });
        }
    }
    Ok(())
}

/// In a step of fixed kernels every op that has a choice of kernels takes the fixed one.
pub(super) fn set_fixed(key: &ShapeKey, nodes: &mut [Node]) {
    for node in nodes.iter_mut().filter(|_| key.fixed) {
        node.op.set_pick(Pick::Fixed);
    }
}
