//! One recording, paused at every break: the nodes marked as breaks run eagerly between the recorded
//! segments, so the host may look at the device or take over there.

use super::{Backend, BackendKind, Context, Segment, push_node, replay_segments, segment_bytes};
use crate::{Plan, ShapeKey};
use device::Result;
use std::collections::BTreeMap;

/// See the module's words.
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
        // Where the graphs go among the eager nodes; a segment without nodes makes no graph.
        let mut order = Vec::new();
        let mut open = false;
        for (index, node) in plan.nodes.iter().enumerate() {
            if plan.breaks.contains(&index) {
                recording.pause()?;
                recording.resume()?;
                order.push(Some(index));
                open = false;
            } else {
                if !open {
                    order.push(None);
                }
                open = true;
                push_node(&mut recording, node)?;
            }
        }
        let mut graphs = recording.finish()?.into_iter();
        let segment = |at: Option<usize>| match at {
            Some(index) => Segment::Eager(index),
            None => Segment::Recorded(graphs.next().expect("one graph per segment with nodes")),
        };
        self.plans.insert(plan.key.clone(), order.into_iter().map(segment).collect());
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
