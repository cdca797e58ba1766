//! Which crate may depend on which: the table of `docs/ARCHITECTURE.md`, compared with `cargo metadata`.

use super::Problem;
use cargo_metadata::Metadata;

/// What each member of the workspace may depend on inside it.
const MAY_KNOW: &[(&str, &[&str])] = &[
    ("device", &[]),
    ("formats", &[]),
    ("grammar", &[]),
    ("graph", &["device"]),
    ("text", &["formats"]),
    ("engine", &["grammar"]),
    ("model", &["formats", "graph", "device", "engine"]),
    ("server", &["engine", "formats", "grammar", "text"]),
    (
        "dacapo",
        &[
            "device", "graph", "formats", "grammar", "text", "engine", "model", "server",
            // Behind `dacapo bench` and `dacapo graph verify`.
            "figures", "fixtures", "load",
        ],
    ),
    ("python", &["dacapo"]),
    ("allocs", &[]),
    ("figures", &["device"]),
    ("fixtures", &["device", "graph"]),
    ("load", &[]),
    ("mock", &["engine", "grammar", "server", "text", "formats", "load", "model"]),
    ("sim", &["engine", "grammar"]),
    ("xtask", &[]),
];

/// Development crates: any member's tests may use them.
const TESTING: &[&str] = &["allocs", "figures", "fixtures", "load", "mock", "sim"];

/// Outside crates that only some members may use, and why.
const ONLY_IN: &[(&str, &[&str], &str)] = &[
    ("tokio", &["server", "load"], "only the server and its load generator are asynchronous"),
    ("axum", &["server"], "the server is the only part that knows HTTP"),
    ("hyper", &["server"], "the server is the only part that knows HTTP"),
    ("anyhow", &["dacapo", "sim", "xtask"], "libraries have error enums"),
    ("ureq", &["dacapo"], "only the binary downloads"),
    ("clap", &["dacapo", "sim", "xtask"], "only programs have flags"),
    ("pyo3", &["python"], "the Python package is the only part that knows Python"),
    ("rayon", &["model"], "the engine has no threads, the device has its own"),
    ("half", &["device", "formats", "model"], "only these parts touch weights"),
    ("cudarc", &["device"], "the device layer is the only part that knows CUDA"),
    ("libloading", &["device"], "the device layer is the only part that loads libraries"),
    ("tokenizers", &["formats"], "formats reads tokenizers"),
    ("minijinja", &["formats"], "formats renders templates"),
    ("llguidance", &["grammar"], "grammar bounds what is compiled"),
];

/// One dependency: who, on whom, and whether only its tests do.
#[derive(Clone, Debug)]
pub(super) struct Edge {
    pub(super) from: String,
    pub(super) manifest: String,
    pub(super) to: String,
    pub(super) only_tests: bool,
}

/// Every direct dependency of every member of the workspace.
pub(super) fn edges(metadata: &Metadata) -> Vec<Edge> {
    let root = &metadata.workspace_root;
    let mut edges = Vec::new();
    for package in metadata.workspace_packages() {
        let manifest = package.manifest_path.strip_prefix(root).unwrap_or(&package.manifest_path);
        for dependency in &package.dependencies {
            edges.push(Edge {
                from: package.name.to_string(),
                manifest: manifest.to_string(),
                to: dependency.name.clone(),
                only_tests: dependency.kind == cargo_metadata::DependencyKind::Development,
            });
        }
    }
    edges
}

/// Every edge that the tables do not allow.
pub(super) fn check(edges: &[Edge]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for edge in edges {
        let mut complain = |why: String| {
            let what = format!("{} must not depend on {}: {why}", edge.from, edge.to);
            problems.push(Problem::new(&edge.manifest, 0, what));
        };
        let Some((_, known)) = MAY_KNOW.iter().find(|(name, _)| *name == edge.from) else {
            complain("it has no line in the table of xtask/src/tidy/direction.rs".into());
            continue;
        };
        let inside = MAY_KNOW.iter().any(|(name, _)| *name == edge.to);
        let helps_tests = edge.only_tests && TESTING.contains(&edge.to.as_str());
        if inside && !helps_tests && !known.contains(&edge.to.as_str()) {
            complain(format!("it may know only {known:?}"));
        }
        for (outside, members, why) in ONLY_IN {
            // Tests may compare a part with a crate that the part itself must not depend on.
            if *outside == edge.to && !edge.only_tests && !members.contains(&edge.from.as_str()) {
                complain((*why).into());
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(from: &str, to: &str) -> Edge {
        let manifest = format!("crates/{from}/Cargo.toml");
        Edge { from: from.into(), manifest, to: to.into(), only_tests: false }
    }

    #[test]
    fn the_designed_direction_passes() {
        let good =
            [("graph", "device"), ("model", "graph"), ("server", "tokio"), ("dacapo", "load")];
        assert_eq!(check(&good.map(|(from, to)| edge(from, to))), []);
    }

    #[test]
    fn planted_edges_are_found() {
        let bad = [
            ("device", "graph"),
            ("device", "formats"),
            ("formats", "device"),
            ("graph", "engine"),
            ("engine", "server"),
            ("engine", "graph"),
            ("engine", "device"),
            ("engine", "rayon"),
            ("engine", "half"),
            ("server", "graph"),
            ("device", "figures"),
            ("graph", "fixtures"),
            ("server", "load"),
            ("server", "mock"),
            ("dacapo", "mock"),
            ("server", "device"),
            ("dacapo", "sim"),
            ("engine", "tokio"),
            ("graph", "anyhow"),
            ("dacapo", "tokio"),
            ("newcomer", "serde"),
        ];
        for (from, to) in bad {
            let found = check(&[edge(from, to)]);
            assert_eq!(found.len(), 1, "{from} → {to}");
            assert!(found[0].what.starts_with(&format!("{from} must not depend on {to}")));
        }
    }

    #[test]
    fn tests_may_use_what_the_code_may_not_but_not_turn_the_direction() {
        let tests = |from, to| Edge { only_tests: true, ..edge(from, to) };
        assert_eq!(check(&[tests("formats", "clap"), tests("graph", "fixtures")]), []);
        assert_eq!(check(&[tests("device", "graph")]).len(), 1);
    }
}
