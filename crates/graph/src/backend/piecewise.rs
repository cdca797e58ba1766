//! The pieces between splits, each compiled and recorded on its own: a piece that fails to record, or
//! is slow to compile, is known by its own name. When a plan is recorded again, pieces whose nodes are the same keep their
//! graphs: [`crate::runner::Runner::replace_piece`] records one piece.

use super::segmented::{Cut, Recorded, Segment};
use super::{BackendKind, Context, Piece, prepare_nodes, push_nodes};
use crate::Plan;
use device::{Node, Result};

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

    fn record(&self, cx: &Context<'_>, plan: &Plan, old: &mut Vec<Segment>) -> Result<Recorded> {
        let pieces = self.kind().pieces(plan);
        let same = |nodes: &[Node], segment: &Segment| match segment {
            Segment::Recorded(recorded, _) => recorded == nodes,
            Segment::Eager(_) => false,
        };
        // New ones first: if one fails, all old ones are still there.
        let mut new = Vec::new();
        for (number, piece) in pieces.iter().enumerate() {
            let Piece::Graph(range) = piece else { continue };
            let nodes = &plan.nodes[range.clone()];
            if old.iter().any(|segment| same(nodes, segment)) {
                continue;
            }
            let name = format!("{}/piece {number}", plan.key);
            let mut recording = cx.device.record(cx.arena, &name, cx.options)?;
            push_nodes(&mut recording, nodes)?;
            new.extend(recording.finish()?.into_iter().map(|graph| (number, graph)));
        }
        let graphs = new.len();
        let mut new = new.into_iter().peekable();
        let segment = |(number, piece): (usize, Piece)| match piece {
            Piece::Alone(index) => Segment::Eager(index),
            Piece::Graph(range) => {
                let nodes = &plan.nodes[range];
                match new.next_if(|(of, _)| *of == number) {
                    Some((_, graph)) => Segment::Recorded(nodes.to_vec(), graph),
                    None => {
                        let at = old.iter().position(|segment| same(nodes, segment));
                        old.swap_remove(at.expect("it was there"))
                    }
                }
            }
        };
        let segments = pieces.into_iter().enumerate().map(segment).collect();
        Ok(Recorded { segments, graphs })
    }
}
