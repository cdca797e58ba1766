//! The whole plan as one graph: one launch per step, nothing for the host to do in between.

use super::{Backend, BackendKind, Context, push_nodes};
use crate::{Plan, ShapeKey};
use device::{Graph, Result};
use std::collections::BTreeMap;

/// See the module's words.
#[derive(Debug, Default)]
pub struct Full {
    graphs: BTreeMap<ShapeKey, Graph>,
}

impl Backend for Full {
    fn kind(&self) -> BackendKind {
        BackendKind::Full
    }

    fn record(&mut self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        let mut recording = cx.device.record(cx.arena, &plan.key.to_string(), cx.options)?;
        push_nodes(&mut recording, &plan.nodes)?;
        if let Some(graph) = recording.finish()?.pop() {
            self.graphs.insert(plan.key.clone(), graph);
        }
        Ok(())
    }

    fn has(&self, key: &ShapeKey) -> bool {
        self.graphs.contains_key(key)
    }

    fn replay(&self, _cx: &Context<'_>, plan: &Plan) -> Result<()> {
        self.graphs[&plan.key].replay()
    }

    fn bytes(&self, key: &ShapeKey) -> u64 {
        self.graphs.get(key).map_or(0, Graph::bytes)
    }

    fn forget(&mut self, key: &ShapeKey) {
        self.graphs.remove(key);
    }

    fn clear(&mut self) {
        self.graphs.clear();
    }
}
