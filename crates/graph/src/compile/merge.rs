//! Nodes of a decode step that become one node, because the gaps between them take as long as they do: all layers of a
//! small model, or a norm, a router, its experts and a shared one. A device that has one kernel for them gets them as one op, where
//! that was measured to be faster or asked for. What such a kernel cannot run stays separate nodes, and the plan shows it.

use super::mark::Marks;
use super::{Bindings, CompileError, CompileTarget};
use crate::ShapeKey;
use crate::plan::PlacedValue;
use device::op::{Fused, FusedKernel};
use device::ops::Access;
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
    if !may_merge(target, key) {
        return 0;
    }
    let layers = possible(target, key, nodes).map_or(0, |found| found.bytes);
    let runs = (0..nodes.len()).flat_map(|at| expert_layers(nodes, at));
    let experts = runs.map(|run| expert_layer(&nodes[run], None));
    experts.map(|op| target.device.exchange_bytes(&op)).fold(layers, u64::max)
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

/// Nodes of a layer of experts: a norm, a router, its experts; then perhaps both linears of an MLP beside them; then perhaps
/// an addition with a gate. The longest first.
const EXPERT_LAYERS: [usize; 3] = [6, 5, 3];

/// Runs of nodes from `at` on that may be a layer of experts.
fn expert_layers(nodes: &[Node], at: usize) -> impl Iterator<Item = Range<usize>> {
    let ops = nodes.get(at).zip(nodes.get(at + 1)).map(|(norm, route)| (&norm.op, &route.op));
    let begins = matches!(ops, Some((Op::RmsNorm(_), Op::Route(_))));
    let lengths = EXPERT_LAYERS.into_iter().filter(move |_| begins);
    let count = nodes.len();
    lengths.map(move |length| at..at + length).filter(move |run| run.end <= count)
}

fn expert_layer(run: &[Node], exchange: Option<Span>) -> Op {
    let members = run.iter().map(|node| node.op.clone()).collect();
    Fused { members, kernel: FusedKernel::ExpertLayer { exchange } }.into()
}

/// Nodes of a recurrent layer between its linears: perhaps the linear that makes gates, a convolution, a scan, a norm with a gate.
fn recurrent(nodes: &[Node], at: usize) -> Option<(Range<usize>, Op)> {
    let is = |index: usize, kind: fn(&Op) -> bool| nodes.get(index).is_some_and(|n| kind(&n.op));
    let conv = if is(at, |op| matches!(op, Op::Conv(_))) { at } else { at + 1 };
    let found = is(conv, |op| matches!(op, Op::Conv(_)))
        && is(conv + 1, |op| matches!(op, Op::Scan(_)))
        && is(conv + 2, |op| matches!(op, Op::Gated(_)));
    let run = at..conv + 3;
    let members = || nodes[run.clone()].iter().map(|node| node.op.clone()).collect();
    let one = || Fused { members: members(), kernel: FusedKernel::Recurrent }.into();
    found.then(|| (run.clone(), one()))
}

/// Makes one node of each norm, router, its experts and an MLP beside them, and of each recurrent layer between its linears,
/// where a kernel can run them and is known to be faster, unless another node reads what lies between them.
pub(crate) fn merge_parts(
    target: &CompileTarget,
    key: &ShapeKey,
    bindings: &Bindings,
    nodes: &mut Vec<Node>,
    marks: &mut Marks,
    values: &mut Vec<PlacedValue>,
) {
    if !may_merge(target, key) {
        return;
    }
    let room = bindings.exchange.map_or(0, |span| span.len);
    let fits = |(run, one): &(Range<usize>, Op), values: &[PlacedValue], nodes: &[Node]| {
        let wanted = target.merge == Merge::Always || target.device.prefers_one_node(one);
        wanted
            && one.check().is_ok()
            && target.device.exchange_bytes(one) <= room
            && target.device.kernels(one).is_ok_and(|kernels| !kernels.is_empty())
            && keeps_to_itself(run, nodes, values)
    };
    for at in 0.. {
        if at >= nodes.len() {
            return;
        }
        let experts = expert_layers(nodes, at)
            .map(|run| (run.clone(), expert_layer(&nodes[run], bindings.exchange)));
        let found = experts.chain(recurrent(nodes, at)).find(|found| fits(found, values, nodes));
        let Some((run, op)) = found else { continue };
        // The experts, or the scan.
        let main =
            nodes[run.clone()].iter().find(|node| matches!(node.op, Op::Experts(_) | Op::Scan(_)));
        let Some(Node { name, layer, .. }) = main else { continue };
        let one = Node { op, name: name.clone(), layer: *layer };
        join(run, one, nodes, marks, values);
    }
}

/// Whether no node outside a run reads what its nodes make, but the result of the last one.
fn keeps_to_itself(run: &Range<usize>, nodes: &[Node], values: &[PlacedValue]) -> bool {
    let mut results = Vec::new();
    nodes[run.end - 1].op.visit_spans(&mut |span, access| {
        if access != Access::Read {
            results.push(span);
        }
    });
    let mut made = values.iter().filter(|value| run.contains(&value.first));
    made.all(|value| value.last < run.end || results.contains(&value.span))
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
