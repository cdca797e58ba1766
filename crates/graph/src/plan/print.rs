//! A plan for people.

use super::Plan;
use device::dtype::Bytes;
use device::{Op, Region};
use std::fmt;

impl Plan {
    /// What it is a plan of, in one line.
    pub(crate) fn title(&self) -> String {
        let Plan { program, key, target, nodes, workspace, .. } = self;
        let room = bytes(*workspace);
        format!("{program} {key} for {target}: {} nodes, workspace {room}", nodes.len())
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title())?;
        for index in 0..self.nodes.len() {
            let op = &self.nodes[index].op;
            let mark = match (self.breaks.contains(&index), self.splits.contains(&index)) {
                (true, true) => "break+split",
                (true, false) => "break",
                (false, true) => "split",
                (false, false) => "",
            };
            let line = format!(
                "{index:>4}  {:<14} {:<58} {:<24} {mark}",
                self.node_name(index),
                op.describe(),
                outputs(op)
            );
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Where an op's workspace outputs lie.
pub fn outputs(op: &Op) -> String {
    let (_, writes) = super::check::spans(op);
    let workspace = writes.iter().filter(|span| span.region == Region::Workspace);
    let part = |span: &device::Span| format!("@{}+{}", span.offset, span.len);
    workspace.map(part).collect::<Vec<_>>().join(" ")
}

/// A byte count for people, exact below one KiB.
pub fn bytes(count: u64) -> String {
    Bytes(count).to_string()
}
