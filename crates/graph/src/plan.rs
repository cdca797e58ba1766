//! A plan: one program for one key, every op with its spans. Plain data that prints, diffs, hashes,
//! serialises and can be checked; the four backends run the same one.

mod check;
mod diff;
mod print;

pub use check::Problem;
pub(crate) use check::spans;
pub use diff::Difference;
pub use print::{bytes, outputs};

use crate::ShapeKey;
use device::{DType, Node, Span};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// One program for one key: every op with its spans, in order of execution.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The program's name.
    pub program: String,
    /// What it was made for.
    pub target: String,
    /// Which shape.
    pub key: ShapeKey,
    /// Bytes of workspace it uses.
    pub workspace: u64,
    /// In order of execution.
    pub nodes: Vec<Node>,
    /// Nodes `breakable` runs eagerly, ascending.
    pub breaks: Vec<usize>,
    /// Nodes `piecewise` runs between its pieces, ascending.
    pub splits: Vec<usize>,
    /// Where values lie and when they live.
    pub values: Vec<PlacedValue>,
    /// Nodes of other programs than the one that the step is of, ascending: those of a model that drafts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passes: Vec<Pass>,
}

/// A part of a plan that another program computes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// Its nodes.
    pub nodes: Range<usize>,
    /// Their shape.
    pub key: ShapeKey,
}

/// A value with its place and life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedValue {
    /// The program's name for it.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Rows in this bucket.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// Its bytes.
    pub span: Span,
    /// The node that writes its buffer first.
    pub first: usize,
    /// The last node that touches its buffer.
    pub last: usize,
}

impl Plan {
    /// A hash of the whole plan, the same in every process and build. Arena ids are left
    /// out: they only count arenas.
    pub fn hash(&self) -> String {
        let mut json = serde_json::to_value(self).expect("plain data serialises");
        forget_arena(&mut json);
        blake3::hash(json.to_string().as_bytes()).to_hex().to_string()
    }

    /// The first 12 digits of [`Plan::hash`], for listings.
    pub fn short_hash(&self) -> String {
        self.hash()[..12].to_owned()
    }

    /// Layer and name of a node.
    pub fn node_name(&self, index: usize) -> String {
        let node = &self.nodes[index];
        node.layer.map_or(node.name.clone(), |layer| format!("{layer}.{}", node.name))
    }

    /// The shape of a node: the step's, or that of its pass.
    pub fn key_of(&self, node: usize) -> ShapeKey {
        let pass = self.passes.iter().find(|pass| pass.nodes.contains(&node));
        pass.map_or(self.key, |pass| pass.key)
    }

    /// The nodes of the step's own program.
    pub fn own_nodes(&self) -> Vec<Node> {
        let passed = |node: usize| self.passes.iter().any(|pass| pass.nodes.contains(&node));
        let nodes = self.nodes.iter().enumerate().filter(|(node, _)| !passed(*node));
        nodes.map(|(_, node)| node.clone()).collect()
    }

    /// The plan of the first `nodes` nodes: what a bisection runs.
    pub fn prefix(&self, nodes: usize) -> Plan {
        let keep = |marks: &[usize]| marks.iter().copied().filter(|&at| at < nodes).collect();
        Plan {
            nodes: self.nodes[..nodes].to_vec(),
            breaks: keep(&self.breaks),
            splits: keep(&self.splits),
            ..self.clone()
        }
    }
}

fn forget_arena(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(fields) => {
            fields.remove("arena");
            fields.values_mut().for_each(forget_arena);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(forget_arena),
        _ => {}
    }
}
