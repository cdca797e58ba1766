//! All layers of a decode step as one node. For small models the gaps between nodes are longer than the
//! nodes; a device that has one kernel for a run of layers gets them as one op, where that was measured to
//! be faster or asked for. Layers that such a kernel cannot run stay separate nodes, and the plan shows it.

use super::mark::Marks;
use super::{Bindings, CompileError, CompileTarget};
use crate::ShapeKey;
use crate::plan::PlacedValue;
use device::op::{Fused, FusedKernel};
use device::{Node, Op, Span};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// No kernel merges layers of more rows than this.
pub(crate) const MOST_ROWS: u32 = 8;

/// Nodes that can be one.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Which.
    pub run: Range<usize>,
    /// What they become, without a place for the exchange.
    pub members: Vec<Op>,
    /// Bytes they exchange.
    pub bytes: u64,
}

/// When layers become one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Merge {
    /// Never.
    #[default]
    Never,
    /// Where the device's table of measured choices says that it is faster.
    Measured,
    /// Wherever there is a kernel for it.
    Always,
}

impl Merge {
    /// Its name in options.
    pub const fn name(self) -> &'static str {
        match self {
            Merge::Never => "nodes",
            Merge::Measured => "auto",
            Merge::Always => "one",
        }
    }

    /// The one of that name.
    pub fn named(name: &str) -> Option<Merge> {
        [Merge::Never, Merge::Measured, Merge::Always]
            .into_iter()
            .find(|merge| merge.name() == name)
    }
}

/// Whether layers of this key may become one node at all. Merged kernels have no fixed order of summation, so
/// they are excluded where one is required.
fn may_merge(target: &CompileTarget, key: &ShapeKey) -> bool {
    target.merge != Merge::Never && key.single() && !key.fixed
}

/// Bytes that the layers of a key exchange if they become one node. Independent of the measured choice, because
/// tuning must be able to try it.
pub(crate) fn exchange_bytes(target: &CompileTarget, key: &ShapeKey, nodes: &[Node]) -> u64 {
    possible(target, key, nodes).map_or(0, |found| found.bytes)
}

/// The layers of a plan, if they should become one node and a kernel can run them.
pub fn find(target: &CompileTarget, key: &ShapeKey, nodes: &[Node]) -> Option<Found> {
    let found = possible(target, key, nodes)?;
    let faster = target.device.prefers_one_node(&layers(found.members.clone(), None));
    (target.merge == Merge::Always || faster).then_some(found)
}

fn possible(target: &CompileTarget, key: &ShapeKey, nodes: &[Node]) -> Option<Found> {
    if !may_merge(target, key) {
        return None;
    }
    let first = nodes.iter().position(|node| node.layer.is_some())?;
    let last = nodes.iter().rposition(|node| node.layer.is_some())?;
    let run = first..last + 1;
    let members: Vec<Op> = nodes[run.clone()].iter().map(|node| node.op.clone()).collect();
    let bytes = target.device.exchange_bytes(&layers(members.clone(), None));
    (bytes > 0).then_some(Found { run, members, bytes })
}

fn layers(members: Vec<Op>, exchange: Option<Span>) -> Op {
    Fused { members, kernel: FusedKernel::Layers { exchange } }.into()
}

/// Replaces all layers by one node, where [`find`] says so.
pub fn merge(
    target: &CompileTarget,
    key: &ShapeKey,
    bindings: &Bindings,
    nodes: &mut Vec<Node>,
    marks: &mut Marks,
    values: &mut Vec<PlacedValue>,
) -> Result<(), CompileError> {
    let Some(Found { run, members, bytes }) = find(target, key, nodes) else { return Ok(()) };
    let exchange = bindings.exchange.filter(|span| span.len >= bytes);
    let exchange = exchange.ok_or_else(|| CompileError::Binding {
        what: "exchange of merged layers".into(),
        problem: format!(
            "{bytes} bytes are needed, {} are bound",
            bindings.exchange.map_or(0, |span| span.len)
        ),
    })?;
    let one = Node { op: layers(members, Some(exchange)), name: "layers".into(), layer: None };
    join(run, one, nodes, marks, values);
    Ok(())
}

/// Replaces a run of nodes by one node and adjusts all node indices. Values that live only inside the run are
/// dropped: no other node uses them.
pub(super) fn join(
    run: Range<usize>,
    one: Node,
    nodes: &mut Vec<Node>,
    marks: &mut Marks,
    values: &mut Vec<PlacedValue>,
) {
    nodes.splice(run.clone(), [one]);
    let moved = |index: usize| match index {
        index if index < run.start => index,
        index if index < run.end => run.start,
        index => index + 1 - run.len(),
    };
    for list in [&mut marks.breaks, &mut marks.splits] {
        list.retain(|index| !run.contains(index));
        list.iter_mut().for_each(|index| *index = moved(*index));
    }
    values.retain(|value| !(run.contains(&value.first) && run.contains(&value.last)));
    for value in values {
        (value.first, value.last) = (moved(value.first), moved(value.last));
    }
}
