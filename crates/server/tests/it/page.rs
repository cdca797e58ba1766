//! The page: the files that it loads, and the tests of its scripts.

use crate::bed::Bed;
use mock::MockConfig;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// The parts of `text` between `before` and the next quote.
fn quoted<'a>(text: &'a str, before: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(before).skip(1).filter_map(|rest| rest.split('"').next())
}

#[tokio::test]
async fn every_file_that_the_page_loads_is_served() {
    let bed = Bed::new(MockConfig::default()).await;
    let (_, body) = bed.get("/").await;
    let page = String::from_utf8(body).unwrap();
    let scripts = quoted(&page, "<script src=\"");
    let mut open: Vec<String> = scripts.map(String::from).collect();
    open.extend(quoted(&page, "<link rel=\"stylesheet\" href=\"").map(String::from));
    let mut seen = BTreeSet::new();
    while let Some(name) = open.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        let (head, body) = bed.get(&format!("/{name}")).await;
        assert_eq!(head.status, 200, "{name}");
        let kind = if name.ends_with(".css") { "text/css" } else { "text/javascript" };
        assert!(head.header("content-type").unwrap().starts_with(kind), "{name}");
        assert!(head.header("content-security-policy").unwrap().contains("script-src 'self'"));
        let text = String::from_utf8(body).unwrap();
        // Text of a model is never parsed as HTML or run.
        for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!text.contains(word), "{name} has {word}");
        }
        open.extend(quoted(&text, "from \"./").map(String::from));
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/page");
    let names = folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name());
    let present: BTreeSet<String> = names
        .map(|name| name.into_string().unwrap())
        .filter(|name| name.ends_with(".js") || name.ends_with(".css"))
        .collect();
    assert_eq!(seen, present, "a file of the page is not loaded");
}

/// Whether a Node with a test runner is installed.
fn has_node() -> bool {
    let Ok(output) = Command::new("node").arg("--version").output() else { return false };
    let version = String::from_utf8_lossy(&output.stdout);
    let major = version.trim().trim_start_matches('v').split('.').next();
    major.and_then(|major| major.parse::<u32>().ok()).is_some_and(|major| major >= 20)
}

#[test]
fn scripts_pass_their_own_tests() {
    if !has_node() {
        eprintln!("skipped: the scripts of the page, because Node 20 or later is not installed");
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/page");
    let entries = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> =
        entries.filter(|path| path.to_string_lossy().ends_with(".test.mjs")).collect();
    assert!(files.len() >= 5, "{} files", files.len());
    let output = Command::new("node").arg("--test").args(&files).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let passed = text
        .lines()
        .find_map(|line| line.trim_start_matches(['#', 'ℹ', ' ']).strip_prefix("pass "));
    assert!(passed.unwrap().parse::<u32>().unwrap() >= 25, "{text}");
}
