//! The pieces between splits, each compiled and recorded on its own: a piece that fails to record, or
//! is slow to compile, is known by its own name, and pieces can be remade one at a time.

use super::segmented::{Cut, Segment};
use super::{BackendKind, Context, Piece, prepare_nodes, push_nodes};
use crate::Plan;
use device::Result;

/// Records each piece between splits on its own.
#[derive(Debug, Default)]
pub(super) struct Splits;

impl Cut for Splits {
    fn kind(&self) -> BackendKind {
        BackendKind::Piecewise
    }

    fn prepare(&self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        for piece in self.kind().pieces(plan) {
            let nodes = match piece {
                Piece::Graph(nodes) => nodes,
                Piece::Alone(index) => index..index + 1,
            };
            prepare_nodes(cx, &plan.nodes[nodes])?;
        }
        Ok(())
    }

    fn record(&self, cx: &Context<'_>, plan: &Plan) -> Result<Vec<Segment>> {
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
        Ok(segments)
    }
}
