//! Profilers see loading, compiling, recording and steps as NVTX ranges.

use crate::smollm2::{dacapo, smollm2};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The tool of `nvtx_tool.c`, compiled; `None`, with a note, without a C compiler.
fn tool(folder: &Path) -> Option<PathBuf> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/nvtx_tool.c");
    let library = folder.join("tool.so");
    let output = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
        .args([library.as_os_str(), source.as_ref()])
        .output();
    let Ok(output) = output else {
        eprintln!("skipped: there is no C compiler (cc)");
        return None;
    };
    assert!(output.status.success(), "{output:?}");
    Some(library)
}

/// Five greedy tokens, with the variable that profilers set.
fn run(model: &str, tool: &Path, log: &Path) -> Output {
    let flags = ["-p", "Hi", "-n", "5", "--temperature", "0", "--profile-steps", "3"];
    let mut command = dacapo(&[&["run", model][..], &flags].concat());
    command.arg("--profile-file").arg(tool.with_extension("json"));
    command.env("NVTX_INJECTION64_PATH", tool).env("NVTX_TOOL_LOG", log).output().unwrap()
}

#[test]
fn a_tool_sees_ranges_that_nest() {
    let Some(model) = smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let Some(tool) = tool(folder.path()) else { return };
    let log = folder.path().join("ranges");
    let output = run(model, &tool, &log);
    assert!(output.status.success(), "{output:?}");

    let log = std::fs::read_to_string(&log).unwrap();
    let (mut open, mut seen): (Vec<&str>, BTreeMap<&str, u32>) = Default::default();
    let mut steps = Vec::new();
    for line in log.lines() {
        match line.split_once(' ').unwrap() {
            ("push", rest) => {
                let (_, name) = rest.split_once(' ').unwrap();
                let kind = name.split([' ', ':']).next().unwrap();
                *seen.entry(kind).or_default() += 1;
                if kind == "step" {
                    assert!(!open.contains(&"load"), "{log}");
                    steps.push(name);
                }
                if kind == "record" {
                    assert!(open.contains(&"load"), "graphs are recorded while loading: {log}");
                }
                open.push(name);
            }
            ("pop", _) => assert!(open.pop().is_some(), "{log}"),
            _ => panic!("{line}"),
        }
    }
    assert_eq!(open, [""; 0], "{log}");
    // The model, and its weights.
    assert_eq!((seen["load"], seen["plan"]), (2, 2), "{log}");
    assert!(seen["compile"] > 0 && seen["record"] > 1, "{log}");
    // The prompt in one step, which gives the first token, and one for each of the others.
    assert!(steps[0].starts_with("step 1 prefill/"), "{steps:?}");
    let prompt: u32 = steps[0].split(' ').nth(3).unwrap().parse().unwrap();
    assert!((2..=64).contains(&prompt), "{steps:?}");
    assert_eq!(steps[1], "step 2 decode/1: 1 tokens");
    assert_eq!(steps[2], "step 3 decode/1: 1 tokens, op by op");
    assert_eq!(steps[3], "step 4 decode/1: 1 tokens");
}

/// Nothing depends on the tool: one that cannot be loaded is one line, one that does not want to start none.
#[test]
fn a_tool_that_fails_changes_nothing() {
    let Some(model) = smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let Some(tool) = tool(folder.path()) else { return };
    let missing = run(model, &folder.path().join("missing.so"), &folder.path().join("a"));
    // Its log is in a folder that does not exist.
    let refuses = run(model, &tool, &folder.path().join("none/b"));
    let said = |output: &Output| {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        text.lines().filter(|line| line.contains("NVTX")).count()
    };
    assert!(missing.status.success(), "{missing:?}");
    assert_eq!((said(&missing), said(&refuses)), (1, 0), "{missing:?} {refuses:?}");
    assert!(!missing.stdout.is_empty());
}
