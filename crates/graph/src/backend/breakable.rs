//! One recording, paused at every break: the nodes marked as breaks run eagerly between the recorded
//! segments, so the host may look at the device or take over there.

use super::{
    Backend, BackendKind, Context, Piece, Segment, push_nodes, replay_segments, segment_bytes,
};
use crate::{Plan, ShapeKey};
use device::Result;
use std::collections::BTreeMap;

/// Records one graph per segment between breaks; breaks run eagerly.
#[derive(Debug, Default)]
pub struct Breakable {
    plans: BTreeMap<ShapeKey, Vec<Segment>>,
}

impl Backend for Breakable {
    fn kind(&self) -> BackendKind {
        BackendKind::Breakable
    }

    fn record(&mut self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        let mut recording = cx.device.record(cx.arena, &plan.key.to_string(), cx.options)?;
        let pieces = self.kind().pieces(plan);
        for piece in &pieces {
            match piece {
                Piece::Graph(nodes) => push_nodes(&mut recording, &plan.nodes[nodes.clone()])?,
                Piece::Alone(_) => {
                    recording.pause()?;
                    recording.resume()?;
                }
            }
        }
        // A segment without nodes makes no graph, so graphs and graph pieces pair up in order.
        let mut graphs = recording.finish()?.into_iter();
        let segment = |piece: Piece| match piece {
            Piece::Alone(index) => Segment::Eager(index),
            Piece::Graph(_) => Segment::Recorded(graphs.next().expect("one graph per piece")),
        };
        self.plans.insert(plan.key, pieces.into_iter().map(segment).collect());
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
