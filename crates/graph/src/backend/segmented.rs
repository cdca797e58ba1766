//! What `breakable` and `piecewise` have in common: a plan is a list of graphs, and of nodes that run on their own
//! between them. How it is recorded differs.

use super::{Backend, BackendKind, Context, prepare_nodes};
use crate::{Plan, ShapeKey};
use device::{Graph, Node, Result};
use std::collections::BTreeMap;
use std::fmt;

/// One part of a plan.
#[derive(Debug)]
pub(super) enum Segment {
    /// A graph of these nodes.
    Recorded(Vec<Node>, Graph),
    /// The node of this index, which runs on its own.
    Eager(usize),
}

/// How plans are cut and recorded.
pub(super) trait Cut: fmt::Debug + Send {
    /// The backend that cuts this way.
    fn kind(&self) -> BackendKind;

    /// Compiles what the plan's nodes need.
    fn prepare(&self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        prepare_nodes(cx, &plan.nodes)
    }

    /// Records the plan, in the order of its nodes. What was recorded of `old` under its key may be used again.
    fn record(&self, cx: &Context<'_>, plan: &Plan, old: &mut Vec<Segment>) -> Result<Recorded>;
}

/// A plan recorded in parts.
pub(super) struct Recorded {
    pub(super) segments: Vec<Segment>,
    /// Graphs that are new.
    pub(super) graphs: usize,
}

/// The recordings of a backend that cuts plans.
#[derive(Debug, Default)]
pub(super) struct Segmented<C> {
    cut: C,
    plans: BTreeMap<ShapeKey, Vec<Segment>>,
}

impl<C: Cut> Backend for Segmented<C> {
    fn kind(&self) -> BackendKind {
        self.cut.kind()
    }

    fn prepare(&mut self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        self.cut.prepare(cx, plan)
    }

    fn record(&mut self, cx: &Context<'_>, plan: &Plan) -> Result<usize> {
        let Recorded { segments, graphs } = {
            let mut none = Vec::new();
            let old = self.plans.get_mut(&plan.key).unwrap_or(&mut none);
            self.cut.record(cx, plan, old)?
        };
        self.plans.insert(plan.key, segments);
        Ok(graphs)
    }

    fn has(&self, key: &ShapeKey) -> bool {
        self.plans.contains_key(key)
    }

    fn replay(&self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        for segment in &self.plans[&plan.key] {
            match segment {
                Segment::Recorded(_, graph) => graph.replay()?,
                Segment::Eager(index) => {
                    let node = &plan.nodes[*index];
                    cx.at_break.map_or(Ok(()), |hook| hook(*index, node))?;
                    cx.device.run(cx.arena, node)?;
                }
            }
        }
        Ok(())
    }

    fn bytes(&self, key: &ShapeKey) -> u64 {
        let bytes = |segment: &Segment| match segment {
            Segment::Recorded(_, graph) => graph.bytes(),
            Segment::Eager(_) => 0,
        };
        self.plans.get(key).map_or(0, |segments| segments.iter().map(bytes).sum())
    }

    fn forget(&mut self, key: &ShapeKey) {
        self.plans.remove(key);
    }

    fn clear(&mut self) {
        self.plans.clear();
    }
}
