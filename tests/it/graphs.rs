//! `dacapo graph verify` looks at the plans that serve, and every way of running graphs gives the same answers.

use crate::smollm2;
use serde_json::Value;
use smollm2::{dacapo, smollm2};
use std::process::Output;

/// A small checkpoint with random weights.
const SMALL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/crates/model/tests/goldens/qwen3");

fn lines(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// The lines of a run that must find no difference.
fn verified(flags: &[&str]) -> Vec<String> {
    let sizes = ["--steps", "2", "--buckets-decode", "1,4", "--buckets-prefill", "16,32"];
    let command = ["graph", "verify", SMALL];
    let output = dacapo(&[&command, &sizes[..], flags].concat()).output().unwrap();
    assert!(output.status.success(), "{flags:?}: {output:?}");
    let lines = lines(&output);
    assert_eq!(lines.last().map(String::as_str), Some("all replays match their plans"));
    lines
}

/// Lines of a backend about keys that end like this and were compared.
fn count(lines: &[String], backend: &str, end: &str) -> usize {
    let compared = |line: &&String| {
        let mut words = line.split_whitespace();
        words.next() == Some(backend)
            && words.next().is_some_and(|key| key.contains('/') && key.ends_with(end))
            && line.ends_with("steps agree")
            && !line.contains(" 0 steps agree")
    };
    lines.iter().filter(compared).count()
}

#[test]
fn verify_runs_what_serves() {
    let plain = verified(&[]);
    for backend in ["full", "breakable", "piecewise"] {
        assert_eq!(count(&plain, backend, ""), 4, "{plain:?}");
    }
    // It records nothing, so there is nothing to compare.
    assert_eq!(count(&plain, "disabled", ""), 0, "{plain:?}");

    let fixed = verified(&["--deterministic", "--max-context", "64"]);
    assert_eq!(count(&fixed, "full", "/fixed"), 4, "{fixed:?}");

    let loops = verified(&["--graph-steps", "4", "--backend", "full"]);
    assert_eq!(count(&loops, "full", "/repeated"), 2, "{loops:?}");
    assert_eq!(count(&loops, "full", ""), 6, "{loops:?}");

    let drafts = verified(&["--spec", "ngram:2", "--backend", "full"]);
    assert_eq!(count(&drafts, "full", "/q_len=3"), 2, "{drafts:?}");

    // A model drafts for itself, in the same graphs.
    let drafts = verified(&["--spec", "draft:2", "--spec-model", SMALL, "--backend", "full"]);
    assert_eq!(count(&drafts, "full", "/q_len=3"), 2, "{drafts:?}");

    // The copy of the inputs is part of the graph of a whole step: the others refuse it, and say so.
    let staged = verified(&["--graph-prep", "fused"]);
    assert_eq!(count(&staged, "full", "/staged=0"), 2, "{staged:?}");
    assert_eq!(count(&staged, "full", "/staged=1"), 2, "{staged:?}");
    let skipped = |line: &&String| line.contains("skipped: rule inputs-in-one-graph");
    assert_eq!(staged.iter().filter(skipped).count(), 2, "{staged:?}");

    // Without a list, no bucket is for more sequences than there may be.
    let few = ["graph", "verify", SMALL, "--max-batch", "3", "--backend", "full", "--steps", "1"];
    let few = dacapo(&few).output().unwrap();
    let said = String::from_utf8_lossy(&few.stdout);
    assert!(
        few.status.success() && said.contains("decode/3") && !said.contains("decode/4"),
        "{few:?}"
    );

    let none = dacapo(&["graph", "verify", SMALL, "--backend", "disabled"]).output().unwrap();
    assert_eq!(none.status.code(), Some(2), "{none:?}");
}

#[test]
fn explain_shows_the_bucket_that_serves() {
    let explain = |flags: &[&str]| {
        let command = ["graph", "explain", SMALL, "--target", "cpu", "--format", "json"];
        let output = dacapo(&[&command, flags].concat()).output().unwrap();
        assert!(output.status.success(), "{flags:?}: {output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    assert_eq!(explain(&["--batch", "3"])["key"], "decode/4");
    assert_eq!(explain(&["--batch", "3", "--graph-buckets-decode", "2,6"])["key"], "decode/6");
    let drafts = explain(&["--batch", "3", "--spec", "ngram:2", "--drafts", "2"]);
    assert_eq!(drafts["key"], "decode/4/q_len=3");
    assert_eq!(explain(&["--graph-prep", "fused"])["key"], "decode/1/staged=0");
    let config =
        r#"{"kernels": "fixed", "decode": {"backend": "breakable", "break_at": "sample"}}"#;
    let cut = explain(&["--graph-config", config]);
    assert_eq!(cut["key"], "decode/1/fixed");
    let breaks = cut["nodes"].as_array().unwrap().iter().filter(|node| node["breaks"] == true);
    assert_eq!(breaks.map(|node| node["name"].as_str().unwrap()).collect::<Vec<_>>(), ["sample"]);
    let refused = ["graph", "explain", SMALL, "--target", "cpu", "--batch", "99"];
    let refused = dacapo(&refused).output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
}

#[test]
fn every_way_to_run_graphs_gives_the_same_answers() {
    let Some(model) = smollm2() else { return };
    let flags = ["--tokens", "64", "--questions", "16", "--max-context", "512", "--json", "-"];
    let output = dacapo(&[&["bench", "accuracy", model][..], &flags].concat()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let record: Value = serde_json::from_slice(&output.stdout).unwrap();
    let figures = record["figures"].as_array().unwrap();
    assert_eq!(figures.len(), 10, "{figures:?}");
    for figure in figures {
        assert_eq!(figure["agrees"], true, "{figure}");
        // It can add, and knows animals from plants more often than not.
        assert!(figure["right"].as_u64().unwrap() >= 8, "{figure}");
    }
}

#[test]
fn a_profile_has_the_nodes_of_its_steps() {
    let Some(model) = smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profile.json");
    let flags = ["-p", "Hi", "-n", "5", "--temperature", "0", "--json", "--profile-steps", "2-3"];
    let command = dacapo(&[&["run", model][..], &flags].concat())
        .args(["--profile-file", file.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(command.status.success(), "{command:?}");
    let answer: Value = serde_json::from_slice(&command.stdout).unwrap();
    let steps = &answer["steps"];
    assert_eq!(steps["op_by_op"]["profiled"], 2, "{steps}");
    let replayed = steps["replayed"].as_u64().unwrap();
    assert_eq!(steps["steps"].as_u64().unwrap(), replayed + 2, "{steps}");
    let trace: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |name: &str| events.iter().filter(|event| event["name"] == name).count();
    assert_eq!((named("decode/1"), named("sample")), (2, 2));
    assert!(named("29.attn") >= 2, "{} events", events.len());
}
