//! What all backends that record have in common: a plan is a list of graphs, and of nodes that run on their own between
//! them. How it is recorded differs.

use super::{Backend, BackendKind, Context, prepare_nodes};
use crate::{Plan, ShapeKey};
use device::{Graph, Node, Result};
use std::collections::BTreeMap;
use std::fmt;

/// One part of a plan.
#[derive(Debug)]
pub(super) enum Segment {
    /// A graph, with its nodes where it may be used again for the same ones.
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

/// A plan that was recorded, to be kept by a backend of the same kind ([`Backend::keep`]).
#[derive(Debug)]
pub struct Recorded {
    pub(super) segments: Vec<Segment>,
    /// Graphs that are new.
    pub(super) graphs: usize,
}

impl Recorded {
    /// How many graphs were recorded.
    pub fn graphs(&self) -> usize {
        self.graphs
    }

    /// Bytes the device spends on it.
    pub fn bytes(&self) -> u64 {
        let bytes = |segment: &Segment| match segment {
            Segment::Recorded(_, graph) => graph.bytes(),
            Segment::Eager(_) => 0,
        };
        self.segments.iter().map(bytes).sum()
    }
}

/// The recordings of a backend.
#[derive(Debug, Default)]
pub(super) struct Segmented<C> {
    cut: C,
    plans: BTreeMap<ShapeKey, Recorded>,
}

impl<C: Cut> Backend for Segmented<C> {
    fn kind(&self) -> BackendKind {
        self.cut.kind()
    }

    fn prepare(&self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        self.cut.prepare(cx, plan)
    }

    fn make(&mut self, cx: &Context<'_>, plan: &Plan) -> Result<Recorded> {
        let mut none = Vec::new();
        let old = self.plans.get_mut(&plan.key).map_or(&mut none, |old| &mut old.segments);
        self.cut.record(cx, plan, old)
    }

    fn keep(&mut self, key: &ShapeKey, recorded: Recorded) {
        self.plans.insert(*key, recorded);
    }

    fn has(&self, key: &ShapeKey) -> bool {
        self.plans.contains_key(key)
    }

    fn replay(&self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        for segment in &self.plans[&plan.key].segments {
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
        self.plans.get(key).map_or(0, Recorded::bytes)
    }

    fn forget(&mut self, key: &ShapeKey) -> Option<Recorded> {
        self.plans.remove(key)
    }

    fn clear(&mut self) {
        self.plans.clear();
    }
}
