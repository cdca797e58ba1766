//! Checks a finished plan by the bytes that each node reads and writes. It does not use the placement
//! pass, so it can find that pass's mistakes.

use super::Plan;
use device::ops::{Access, StepSize};
use device::{Region, Span};

/// Something a plan must not do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Two values that live at the same time share bytes.
    #[error("`{a}` and `{b}` live at the same time and share bytes")]
    Overlap {
        /// One.
        a: String,
        /// The other.
        b: String,
    },
    /// A node overwrites a value that a later node still reads.
    #[error("node {node} `{name}` overwrites `{value}`, which is read later")]
    Clobber {
        /// The node.
        node: usize,
        /// Its name.
        name: String,
        /// Whose bytes.
        value: String,
    },
    /// A node reads workspace bytes that nothing wrote in this step.
    #[error("node {node} `{name}` reads {len} bytes at {offset} that no node wrote")]
    Unwritten {
        /// The node.
        node: usize,
        /// Its name.
        name: String,
        /// First byte read.
        offset: u64,
        /// Bytes read.
        len: u64,
    },
    /// A break or split that names no node.
    #[error("a break or split names node {node}; there are {nodes}")]
    Mark {
        /// The index.
        node: usize,
        /// Nodes there are.
        nodes: usize,
    },
    /// A node whose shape differs from the key's.
    #[error("node {node} `{name}` works on {found} rows, the key says {expected}")]
    Length {
        /// The node.
        node: usize,
        /// Its name.
        name: String,
        /// Its rows.
        found: u32,
        /// The key's.
        expected: u32,
    },
}

impl Plan {
    /// Everything wrong with the plan; empty if nothing is.
    pub fn check(&self) -> Vec<Problem> {
        let mut problems = self.overlaps();
        problems.extend(self.clobbers());
        problems.extend(self.unwritten());
        problems.extend(self.lengths());
        let marks = self.breaks.iter().chain(&self.splits);
        let (nodes, outside) = (self.nodes.len(), marks.filter(|&&node| node >= self.nodes.len()));
        problems.extend(outside.map(|&node| Problem::Mark { node, nodes }));
        problems
    }

    fn overlaps(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (index, a) in self.values.iter().enumerate() {
            for b in &self.values[index + 1..] {
                let handed_on = (a.span, a.first, a.last) == (b.span, b.first, b.last);
                let together = a.first <= b.last && b.first <= a.last;
                if together && !handed_on && a.span.overlaps(b.span) {
                    problems.push(Problem::Overlap { a: a.name.clone(), b: b.name.clone() });
                }
            }
        }
        problems
    }

    fn clobbers(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (node, item) in self.nodes.iter().enumerate() {
            let (reads, writes) = spans(&item.op);
            for value in self.values.iter().filter(|v| v.first < node && node < v.last) {
                let hit = |span: &&Span| span.overlaps(value.span);
                let in_place = reads.contains(&value.span) && writes.contains(&value.span);
                if !in_place && writes.iter().find(hit).is_some() {
                    let (name, value) = (self.node_name(node), value.name.clone());
                    problems.push(Problem::Clobber { node, name, value });
                }
            }
        }
        problems.dedup();
        problems
    }

    fn unwritten(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut written = Written::default();
        for (node, item) in self.nodes.iter().enumerate() {
            let (reads, writes) = spans(&item.op);
            for span in reads.iter().filter(|span| span.region == Region::Workspace) {
                if !written.covers(*span) {
                    let (name, offset, len) = (self.node_name(node), span.offset, span.len);
                    problems.push(Problem::Unwritten { node, name, offset, len });
                }
            }
            let workspace = writes.iter().filter(|span| span.region == Region::Workspace);
            workspace.for_each(|span| written.add(*span));
        }
        problems
    }

    /// One length feeds every node: an op for 112 rows in a plan for 100 is a bug.
    fn lengths(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for (node, item) in self.nodes.iter().enumerate() {
            let StepSize { rows, tokens } = item.op.step_size();
            let key = self.key_of(node);
            let sizes = [(rows, key.rows), (tokens, key.tokens)];
            for (found, expected) in
                sizes.into_iter().filter_map(|(found, key)| Some((found?, key)))
            {
                if found != expected {
                    let name = self.node_name(node);
                    problems.push(Problem::Length { node, name, found, expected });
                }
            }
        }
        problems
    }
}

/// What an op reads and what it writes.
pub(crate) fn spans(op: &device::Op) -> (Vec<Span>, Vec<Span>) {
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    op.visit_spans(&mut |span, access| {
        if access != Access::Write {
            reads.push(span);
        }
        if access != Access::Read {
            writes.push(span);
        }
    });
    (reads, writes)
}

/// Bytes of the workspace that have been written, as disjoint ranges in order.
#[derive(Default)]
struct Written(Vec<(u64, u64)>);

impl Written {
    fn add(&mut self, span: Span) {
        let (mut start, mut end) = (span.offset, span.end());
        self.0.retain(|&(s, e)| {
            let apart = e < start || end < s;
            if !apart {
                (start, end) = (start.min(s), end.max(e));
            }
            apart
        });
        self.0.push((start, end));
        self.0.sort_unstable();
    }

    fn covers(&self, span: Span) -> bool {
        span.len == 0 || self.0.iter().any(|&(s, e)| s <= span.offset && span.end() <= e)
    }
}
