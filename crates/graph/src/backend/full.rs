//! The whole plan as one graph: one launch per step, nothing for the host to do in between.

use super::segmented::{Cut, Recorded, Segment};
use super::{BackendKind, Context};
use crate::{Form, Plan};
use device::op::{Copy, Fill, Prologue};
use device::step::{count, repeat};
use device::{Item, Node, Op, Result};

/// Records the whole plan as one graph.
#[derive(Debug, Default)]
pub(super) struct Whole;

impl Cut for Whole {
    fn kind(&self) -> BackendKind {
        BackendKind::Full
    }

    fn record(&self, cx: &Context<'_>, plan: &Plan, _: &mut Vec<Segment>) -> Result<Recorded> {
        let mut recording = cx.device.record(cx.arena, &plan.key.to_string(), cx.options)?;
        for item in items(plan) {
            recording.push(item)?;
        }
        let graphs = recording.finish()?.into_iter();
        let segments: Vec<Segment> =
            graphs.map(|graph| Segment::Recorded(Vec::new(), graph)).collect();
        Ok(Recorded { graphs: segments.len(), segments })
    }
}

/// The plan's nodes with what its key's form puts around them.
fn items(plan: &Plan) -> Vec<Item> {
    let nodes = plan.nodes.iter().cloned().map(Item::Node);
    let node = |op: Op, name: &str| Item::Node(Node { op, name: name.into(), layer: None });
    match (plan.key.form, prologue(plan)) {
        (Form::Staged(block), Some(Prologue { state, rows, given: Some(given), .. })) => {
            let bytes = u64::from(state.limits.input_layout(*rows).words) * 4;
            let part = |blocks: [device::Span; 2]| blocks[usize::from(block)].part(0, bytes);
            let copy = Copy { from: part(given.staging), to: part(given.blocks) };
            [node(Op::Copy(copy), "inputs")].into_iter().chain(nodes).collect()
        }
        (Form::Repeated, Some(Prologue { state, .. })) => {
            let cond = state.counts.span.part(u64::from(count::AGAIN) * 4, 4);
            let first = Fill { to: cond, word: repeat::FIRST };
            vec![node(Op::Fill(first), "first"), Item::While { cond, body: nodes.collect() }]
        }
        _ => nodes.collect(),
    }
}

fn prologue(plan: &Plan) -> Option<&Prologue> {
    plan.nodes.iter().find_map(|node| {
        let Op::Prologue(prologue) = &node.op else { return None };
        Some(prologue)
    })
}
