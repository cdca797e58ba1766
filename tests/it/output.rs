//! Commands whose standard output or standard error cannot be written. `… | head -1` ends them
//! silently with the exit code of SIGPIPE, a full disk is an error, and an unwritable standard
//! error changes nothing.

#![cfg(unix)]

use crate::smollm2;
use smollm2::{dacapo, smollm2};
use std::fs::{self, File};
use std::process::{Command, Output, Stdio};

/// 128 + SIGPIPE.
const OUTPUT_CLOSED: i32 = 141;

/// A pipe whose read end is closed.
fn closed_pipe() -> std::io::PipeWriter {
    std::io::pipe().unwrap().1
}

fn full() -> File {
    File::options().write(true).open("/dev/full").unwrap()
}

#[track_caller]
fn ends(mut command: Command, code: i32) -> String {
    let Output { status, stderr, .. } = command.stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(code), "{command:?}: {said}");
    assert!(!said.contains("panicked") && !said.contains("backtrace"), "{command:?}: {said}");
    said
}

/// Commands that print something without a model.
fn printing() -> Vec<Command> {
    let folder = tempfile::tempdir().unwrap().keep();
    let file = |name: &str, text: &str| -> String {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().into()
    };
    let sizes = file("sizes.json", r#"{"decode": {"3": 1000, "9": 500}}"#);
    let record = r#"{"step":1,"at":1,"phase":"decode","bucket_rows":8,"bucket_tokens":8,"live_rows":5,"padded_rows":3,"run":"replayed","host_us":7,"device_us":9}"#;
    let trace = file("trace.jsonl", &format!("{record}\n"));
    let dummy = ["qwen3-0.6b", "--load-format", "dummy"];
    let lists: [&[&str]; 9] = [
        &["--help"],
        &["serve", "--help"],
        &["--version"],
        &["doctor"],
        &["doctor", "--json"],
        &["graph", "tune", "--trace", &sizes],
        &["trace", &trace],
        &["graph", "explain", dummy[0], dummy[1], dummy[2]],
        &["graph", "diff", dummy[0], "decode/8", "decode/16", dummy[1], dummy[2]],
    ];
    let mut commands: Vec<Command> = lists.iter().map(|list| dacapo(list)).collect();
    for command in &mut commands {
        command.env("HOME", &folder).env("RUST_BACKTRACE", "1");
    }
    commands
}

#[test]
fn a_closed_pipe_ends_a_command_silently() {
    for mut command in printing() {
        command.stdout(closed_pipe());
        assert_eq!(ends(command, OUTPUT_CLOSED), "");
    }
}

#[test]
fn a_full_disk_is_an_error() {
    for mut command in printing() {
        command.stdout(full());
        let said = ends(command, 1);
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.starts_with("error: standard output: No space left"), "{said}");
    }
}

#[test]
fn an_unwritable_standard_error_changes_nothing() {
    let wrong = || dacapo(&["run", "./missing.gguf", "-p", "x"]);
    let usage = || dacapo(&["run", "--nothing"]);
    for command in [wrong, usage] {
        assert_eq!(command().stderr(full()).status().unwrap().code(), Some(2));
        assert_eq!(command().stderr(closed_pipe()).status().unwrap().code(), Some(2));
        let closed = ["-c", "exec \"$@\" 2>&-", "sh"];
        let mut shell = Command::new("sh");
        shell.args(closed).arg(command().get_program()).args(command().get_args());
        assert_eq!(shell.status().unwrap().code(), Some(2));
    }
}

#[test]
fn a_closed_pipe_ends_an_answer_silently() {
    let Some(model) = smollm2() else { return };
    let ask = |flags: &[&str]| {
        let mut command = dacapo(&["run", model, "-p", "Count to ten.", "-n", "20"]);
        command.args(flags);
        command
    };
    let mut command = ask(&["--json"]);
    command.stdout(closed_pipe());
    assert_eq!(ends(command, OUTPUT_CLOSED), "");
    let mut command = ask(&[]);
    command.stdout(closed_pipe());
    let said = ends(command, OUTPUT_CLOSED);
    assert!(said.starts_with("[memory: ") && said.lines().count() == 1, "{said}");
    // The summary on standard error is lost, but the answer is complete.
    for error in [Stdio::from(full()), Stdio::from(closed_pipe())] {
        let output = ask(&[]).stdout(Stdio::piped()).stderr(error).spawn().unwrap();
        let output = output.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(!output.stdout.is_empty());
    }
}
