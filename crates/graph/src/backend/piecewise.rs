//! The pieces between splits, each compiled and recorded on its own: a piece that fails to record, or
//! is slow to compile, is known by its own name, and pieces can be remade one at a time.

use super::{
    Backend, BackendKind, Context, Piece, Segment, push_nodes, replay_segments, segment_bytes,
};
use crate::{Plan, ShapeKey};
use device::{Item, Result};
use std::collections::BTreeMap;

/// Records each piece between splits on its own.
#[derive(Debug, Default)]
pub struct Piecewise {
    plans: BTreeMap<ShapeKey, Vec<Segment>>,
}

impl Backend for Piecewise {
    fn kind(&self) -> BackendKind {
        BackendKind::Piecewise
    }

    fn prepare(&mut self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        for piece in self.kind().pieces(plan) {
            let nodes = match piece {
                Piece::Graph(nodes) => nodes,
                Piece::Alone(index) => index..index + 1,
            };
            let items: Vec<Item> = plan.nodes[nodes].iter().cloned().map(Item::Node).collect();
            cx.device.prepare(&items, cx.options)?;
        }
        Ok(())
    }

    fn record(&mut self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        let mut segments = Vec::new();
        for (number, piece) in self.kind().pieces(plan).into_iter().enumerate() {
            match piece {
                Piece::Alone(index) => segments.push(Segment::Eager(index)),
                Piece::Graph(nodes) => {
                    let name = format!("{}/piece {number}", plan.key);
                    let mut recording = cx.device.record(cx.arena, &name, cx.options)?;
                    push_nodes(&mut recording, &plan.nodes[nodes])?;
                    segments.extend(recording.finish()?.into_iter().map(Segment::Recorded));
                }
            }
        }
        self.plans.insert(plan.key, segments);
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
