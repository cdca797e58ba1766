//! The pieces between splits, each compiled and recorded on its own: a piece that fails to record, or
//! is slow to compile, is known by its own name, and pieces can be remade one at a time.

use super::{Backend, BackendKind, Context, Segment, push_node, replay_segments, segment_bytes};
use crate::{Plan, ShapeKey};
use device::{Item, Result};
use std::collections::BTreeMap;
use std::ops::Range;

/// See the module's words.
#[derive(Debug, Default)]
pub struct Piecewise {
    plans: BTreeMap<ShapeKey, Vec<Segment>>,
}

/// The runs of nodes between splits; a split is a run of its own.
fn pieces(plan: &Plan) -> Vec<(Range<usize>, bool)> {
    let mut pieces = Vec::new();
    let mut start = 0;
    for &split in &plan.splits {
        if start < split {
            pieces.push((start..split, false));
        }
        pieces.push((split..split + 1, true));
        start = split + 1;
    }
    if start < plan.nodes.len() {
        pieces.push((start..plan.nodes.len(), false));
    }
    pieces
}

impl Backend for Piecewise {
    fn kind(&self) -> BackendKind {
        BackendKind::Piecewise
    }

    fn prepare(&mut self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        for (piece, _) in pieces(plan) {
            let items: Vec<Item> = plan.nodes[piece].iter().cloned().map(Item::Node).collect();
            cx.device.prepare(&items, cx.options)?;
        }
        Ok(())
    }

    fn record(&mut self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        let mut segments = Vec::new();
        for (number, (piece, split)) in pieces(plan).into_iter().enumerate() {
            if split {
                segments.push(Segment::Eager(piece.start));
                continue;
            }
            let name = format!("{}/piece {number}", plan.key);
            let mut recording = cx.device.record(cx.arena, &name, cx.options)?;
            plan.nodes[piece].iter().try_for_each(|node| push_node(&mut recording, node))?;
            segments.extend(recording.finish()?.into_iter().map(Segment::Recorded));
        }
        self.plans.insert(plan.key.clone(), segments);
        Ok(())
    }

    fn has(&self, key: &ShapeKey) -> bool {
        self.plans.contains_key(key)
    }

    fn replay(&self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        replay_segments(cx, plan, &self.plans[&plan.key])
    }

    fn bytes(&self, key: &ShapeKey) -> u64 {
        self.plans.get(key).map_or(0, |segments| segment_bytes(segments))
    }

    fn forget(&mut self, key: &ShapeKey) {
        self.plans.remove(key);
    }

    fn clear(&mut self) {
        self.plans.clear();
    }
}
