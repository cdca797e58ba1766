//! What differs between two plans: two buckets, two targets or two builds.

use super::Plan;
use std::collections::BTreeMap;
use std::fmt;

/// One difference between plan A and plan B.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// A number or name of the whole plan.
    Header {
        /// Which.
        what: &'static str,
        /// In A.
        a: String,
        /// In B.
        b: String,
    },
    /// A node only A has.
    OnlyA(String),
    /// A node only B has.
    OnlyB(String),
    /// A node both have, with different contents.
    Node {
        /// Its layer and name.
        name: String,
        /// What differs.
        what: &'static str,
        /// In A.
        a: String,
        /// In B.
        b: String,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Header { what, a, b } => write!(f, "{what}: {a} → {b}"),
            Difference::OnlyA(name) => write!(f, "- {name}"),
            Difference::OnlyB(name) => write!(f, "+ {name}"),
            Difference::Node { name, what, a, b } => write!(f, "~ {name} {what}: {a} → {b}"),
        }
    }
}

impl Plan {
    /// What differs from `other`; empty if the plans do the same with the same bytes. Nodes are
    /// matched by layer and name.
    pub fn diff(&self, other: &Plan) -> Vec<Difference> {
        let mut found = Vec::new();
        let headers = [
            ("program", self.program.clone(), other.program.clone()),
            ("target", self.target.clone(), other.target.clone()),
            ("key", self.key.to_string(), other.key.to_string()),
            ("nodes", self.nodes.len().to_string(), other.nodes.len().to_string()),
            ("workspace", self.workspace.to_string(), other.workspace.to_string()),
            ("breaks", format!("{:?}", self.breaks), format!("{:?}", other.breaks)),
            ("splits", format!("{:?}", self.splits), format!("{:?}", other.splits)),
        ];
        for (what, a, b) in headers {
            if a != b {
                found.push(Difference::Header { what, a, b });
            }
        }
        let index = |plan: &Plan| -> BTreeMap<String, usize> {
            (0..plan.nodes.len()).map(|i| (plan.node_name(i), i)).collect()
        };
        let theirs = index(other);
        let ours = index(self);
        for i in 0..self.nodes.len() {
            let name = self.node_name(i);
            match theirs.get(&name) {
                None => found.push(Difference::OnlyA(name)),
                Some(&j) => found.extend(self.diff_node(i, other, j)),
            }
        }
        let new = (0..other.nodes.len()).map(|j| other.node_name(j));
        found.extend(new.filter(|name| !ours.contains_key(name)).map(Difference::OnlyB));
        found
    }

    fn diff_node(&self, i: usize, other: &Plan, j: usize) -> Vec<Difference> {
        let (a, b) = (&self.nodes[i].op, &other.nodes[j].op);
        let spans = |op: &device::Op| {
            let (reads, writes) = super::check::spans(op);
            let text = |spans: Vec<device::Span>| {
                let part = |s: &device::Span| format!("{}:{}+{}", s.region.name(), s.offset, s.len);
                spans.iter().map(part).collect::<Vec<_>>().join(" ")
            };
            format!("{} | {}", text(reads), text(writes))
        };
        let parts = [("op", a.describe(), b.describe()), ("spans", spans(a), spans(b))];
        let changed = parts.into_iter().filter(|(_, a, b)| a != b);
        changed
            .map(|(what, a, b)| Difference::Node { name: self.node_name(i), what, a, b })
            .collect()
    }
}
