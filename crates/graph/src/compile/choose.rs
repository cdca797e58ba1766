//! Which kernel runs an op in this bucket, and the scratch it needs.
//!
//! A device has a rule of its own for the kernel, by shape; a key of fixed kernels overrides it.
//! Scratch is one span for all ops of all graphs: nothing in it outlives an op, except what a product
//! prepares for the norm of the next one.

use super::{Bindings, CompileError, CompileTarget, TargetDevice};
use crate::ShapeKey;
use device::cuda::lower;
use device::variant::Pick;
use device::{Node, Op};

/// Sets scratch, and what products prepare for each other.
pub fn choose(
    target: &CompileTarget,
    bindings: &Bindings,
    nodes: &mut [Node],
) -> Result<(), CompileError> {
    hand_on(target, nodes);
    for node in nodes {
        let needed = scratch_bytes(target, &node.op);
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

/// Norms between products go without launches of their own where the target's kernels can.
pub(super) fn hand_on(target: &CompileTarget, nodes: &mut [Node]) {
    if let TargetDevice::Cuda(target) = &target.device {
        lower::hand_on(nodes, target);
    }
}

/// What the target's kernels ask for.
pub fn scratch_bytes(target: &CompileTarget, op: &Op) -> u64 {
    match &target.device {
        TargetDevice::Cpu => 0,
        TargetDevice::Cuda(target) => lower::scratch_bytes(op, target),
    }
}

/// That the target has a kernel for the op as it was picked: a plan that cannot run is refused here.
pub(super) fn check_kernel(target: &CompileTarget, op: &Op) -> Result<(), CompileError> {
    match &target.device {
        TargetDevice::Cpu => Ok(()),
        TargetDevice::Cuda(target) => Ok(lower::lower(op, target).map(|_| ())?),
    }
}
