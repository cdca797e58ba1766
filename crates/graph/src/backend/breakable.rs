//! One recording, paused at every break: the nodes marked as breaks run eagerly between the recorded
//! segments, so the host may look at the device or take over there.

use super::segmented::{Cut, Recorded, Segment};
use super::{BackendKind, Context, Piece, push_nodes};
use crate::Plan;
use device::Result;

/// Records one graph per segment between breaks; breaks run eagerly.
#[derive(Debug, Default)]
pub(super) struct Breaks;

impl Cut for Breaks {
    fn kind(&self) -> BackendKind {
        BackendKind::Breakable
    }

    fn record(&self, cx: &Context<'_>, plan: &Plan, _: &mut Vec<Segment>) -> Result<Recorded> {
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
        let graphs = recording.finish()?;
        let count = graphs.len();
        let mut graphs = graphs.into_iter();
        let segment = |piece: Piece| match piece {
            Piece::Alone(index) => Segment::Eager(index),
            Piece::Graph(_) => {
                Segment::Recorded(Vec::new(), graphs.next().expect("one graph per piece"))
            }
        };
        let segments = pieces.into_iter().map(segment).collect();
        Ok(Recorded { segments, graphs: count })
    }
}
