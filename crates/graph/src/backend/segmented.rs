//! What `breakable` and `piecewise` have in common: a plan is a list of graphs, and of nodes that run on their own
//! between them. How it is recorded differs.

use super::{Backend, BackendKind, Context, prepare_nodes};
use crate::{Plan, ShapeKey};
use device::{Graph, Result};
use std::collections::BTreeMap;
use std::fmt;

/// One part of a plan.
#[derive(Debug)]
pub(super) enum Segment {
    /// A graph of some nodes.
    Recorded(Graph),
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

    /// Records the plan, in the order of its nodes.
    fn record(&self, cx: &Context<'_>, plan: &Plan) -> Result<Vec<Segment>>;
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

    fn record(&mut self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        self.plans.insert(plan.key, self.cut.record(cx, plan)?);
        Ok(())
    }

    fn has(&self, key: &ShapeKey) -> bool {
        self.plans.contains_key(key)
    }

    fn replay(&self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        for segment in &self.plans[&plan.key] {
            match segment {
                Segment::Recorded(graph) => graph.replay()?,
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
            Segment::Recorded(graph) => graph.bytes(),
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
