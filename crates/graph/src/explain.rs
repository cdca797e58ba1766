//! A plan explained: for each node its layer, kernel, grid, bytes and spans; as a table, as JSON, or as
//! a picture. Needs no device and no weights.

mod caches;
mod picture;

use crate::backend::Piece;
use crate::compile::CompileTarget;
use crate::explain::caches::Caches;
use crate::plan::{Plan, bytes, outputs};
use crate::program::Program;
use crate::{BackendKind, Phase};
use device::op::FusedKernel;
use device::ops::Traffic;
pub use device::target::KernelUse;
use device::{Op, StepLimits};
use serde::Serialize;

/// A node explained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NodeExplained {
    /// Its place.
    pub index: usize,
    /// Its layer, if any.
    pub layer: Option<u32>,
    /// Its name.
    pub name: String,
    /// The op in one line.
    pub op: String,
    /// What it becomes on the target; empty on a CPU.
    pub kernels: Vec<KernelUse>,
    /// Which variant of its kernel, and why; nothing where there is no choice.
    pub choice: Option<String>,
    /// Why it has no kernel, if the target has none for it.
    pub problem: Option<String>,
    /// Bytes of weights it reads.
    pub weight_bytes: u64,
    /// Bytes of activations it reads and writes, pages not counted.
    pub value_bytes: u64,
    /// Where its results lie in the workspace.
    pub writes: String,
    /// `breakable` breaks here.
    pub breaks: bool,
    /// `piecewise` splits here.
    pub splits: bool,
}

/// A plan explained.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// The program.
    pub program: String,
    /// The target.
    pub target: String,
    /// The phase.
    pub phase: Phase,
    /// The key.
    pub key: String,
    /// The plan's hash.
    pub hash: String,
    /// Bytes of weights a step reads.
    pub weight_bytes: u64,
    /// Bytes of workspace.
    pub workspace: u64,
    /// Kernels a step launches.
    pub launches: usize,
    /// Graphs and eager nodes of each backend that runs this plan. Those that cut plans at attention do not run one whose
    /// layers are one node: there layers are never merged.
    pub backends: Vec<(BackendKind, usize, usize)>,
    /// What the program keeps of tokens, if it is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) caches: Option<Caches>,
    /// The nodes.
    pub nodes: Vec<NodeExplained>,
}

/// Explains a plan for the target it was made for.
pub fn explain(plan: &Plan, target: &CompileTarget) -> Explanation {
    let nodes: Vec<_> = (0..plan.nodes.len()).map(|index| node(plan, target, index)).collect();
    Explanation {
        program: plan.program.clone(),
        target: plan.target.clone(),
        phase: plan.key.phase,
        key: plan.key.to_string(),
        hash: plan.hash(),
        weight_bytes: nodes.iter().map(|node| node.weight_bytes).sum(),
        workspace: plan.workspace,
        launches: nodes.iter().map(|node| node.kernels.len().max(1)).sum(),
        backends: BackendKind::ALL.into_iter().filter_map(|kind| parts(plan, kind)).collect(),
        caches: None,
        nodes,
    }
}

/// How many graphs a backend records and how many nodes it runs on their own; `None` if it never runs such a plan.
fn parts(plan: &Plan, kind: BackendKind) -> Option<(BackendKind, usize, usize)> {
    let merged = |node: &device::Node| {
        let Op::Fused(fused) = &node.op else { return false };
        matches!(fused.kernel, FusedKernel::Layers { .. } | FusedKernel::ExpertLayer { .. })
    };
    if kind.cuts() && plan.nodes.iter().any(merged) {
        return None;
    }
    let pieces = kind.pieces(plan);
    let graphs = pieces.iter().filter(|piece| matches!(piece, Piece::Graph(_))).count();
    Some((kind, graphs, pieces.len() - graphs))
}

fn node(plan: &Plan, target: &CompileTarget, index: usize) -> NodeExplained {
    let node = &plan.nodes[index];
    let (kernels, problem) = match target.device.kernels(&node.op) {
        Ok(kernels) => (kernels, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let Traffic { weights: weight_bytes, values: value_bytes } = node.op.traffic();
    let choice = target.device.choice(&node.op).filter(|_| problem.is_none());
    NodeExplained {
        index,
        layer: node.layer,
        name: node.name.clone(),
        op: node.op.describe(),
        kernels,
        choice,
        problem,
        weight_bytes,
        value_bytes,
        writes: outputs(&node.op),
        breaks: plan.breaks.contains(&index),
        splits: plan.splits.contains(&index),
    }
}

impl Explanation {
    /// The same with what the program keeps of tokens, where steps have these limits.
    pub fn with_caches(self, program: &Program, limits: &StepLimits) -> Explanation {
        Explanation { caches: Some(Caches::of(program, limits)), ..self }
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{} {} for {}: {} nodes, {} launches, {} of weights, workspace {}, hash {}\n",
            self.program,
            self.key,
            self.target,
            self.nodes.len(),
            self.launches,
            bytes(self.weight_bytes),
            bytes(self.workspace),
            &self.hash[..12]
        );
        for (kind, graphs, eager) in &self.backends {
            text.push_str(&format!(
                "  {:<10} {graphs} graphs, {eager} nodes op by op\n",
                kind.name()
            ));
        }
        text.push_str(&self.caches.as_ref().map(Caches::table).unwrap_or_default());
        let rows: Vec<[String; 8]> = self.nodes.iter().map(row).collect();
        let head = ["#", "node", "op", "kernel", "grid × block", "weights", "writes", "choice"]
            .map(String::from);
        let width = |column: usize| {
            let cells = rows.iter().chain([&head]).map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..8).map(width).collect();
        for row in [&head].into_iter().chain(&rows) {
            let cell = |(cell, &width): (&String, &usize)| {
                format!("{cell}{}", " ".repeat(width - cell.chars().count()))
            };
            let line: Vec<String> = row.iter().zip(&widths).map(cell).collect();
            text.push_str(line.join("  ").trim_end());
            text.push('\n');
        }
        text
    }

    /// For programs.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data serialises")
    }
}

fn row(node: &NodeExplained) -> [String; 8] {
    let full = node.layer.map_or(node.name.clone(), |layer| format!("{layer}.{}", node.name));
    let kernel = match (&node.problem, node.kernels.is_empty()) {
        (Some(_), _) => "none".to_owned(),
        (None, true) => "cpu".to_owned(),
        (None, false) => join(&node.kernels, |kernel| kernel.name.clone()),
    };
    let launch = |kernel: &KernelUse| match kernel.grid {
        [0, 0, 0] => "-".to_owned(),
        grid => format!("{} × {}", extent(grid), extent(kernel.block)),
    };
    let weights = if node.weight_bytes == 0 { String::new() } else { bytes(node.weight_bytes) };
    let grids = if node.kernels.is_empty() { String::new() } else { join(&node.kernels, launch) };
    let choice = node.choice.clone().unwrap_or_default();
    let (index, op, writes) = (node.index.to_string(), node.op.clone(), node.writes.clone());
    [index, full, op, kernel, grids, weights, writes, choice]
}

fn join<T>(items: &[T], text: impl Fn(&T) -> String) -> String {
    items.iter().map(text).collect::<Vec<_>>().join(" + ")
}

fn extent(size: [u32; 3]) -> String {
    let used = 1 + size.iter().rposition(|&n| n > 1).unwrap_or(0);
    size[..used].iter().map(u32::to_string).collect::<Vec<_>>().join("·")
}
