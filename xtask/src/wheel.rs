//! `cargo xtask wheel`: the Python package (`python/build/wheel_of_cargo.py`).

use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The platform of a release, and its oldest C library.
pub(crate) const TARGET: &str = "x86_64-unknown-linux-gnu";
const GLIBC: &str = "2.28";
const TAG: &str = "cp39-abi3-manylinux_2_28_x86_64";
/// The largest wheel.
const MOST_BYTES: u64 = 30_000_000;
/// From PyPI: zig as C compiler and linker, which has the symbols of every C library, and tools that check wheels.
const TOOLS: [&str; 4] =
    ["cargo-zigbuild==0.24.0", "ziglang==0.17.0", "auditwheel==6.8.2", "abi3audit==0.0.26"];

/// Where cargo builds, and where the wheel goes.
pub(crate) struct Folders {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) dist: PathBuf,
}

impl Folders {
    pub(crate) fn find() -> Result<Folders> {
        let metadata = cargo_metadata::MetadataCommand::new().no_deps().exec()?;
        let (root, target) = (metadata.workspace_root, metadata.target_directory);
        let dist = root.join("dist");
        Ok(Folders { root: root.into(), target: target.into(), dist: dist.into() })
    }

    /// What a release was built to.
    pub(crate) fn release(&self) -> PathBuf {
        self.target.join(TARGET).join("release")
    }
}

/// Builds the wheel.
pub(crate) fn run() -> Result<()> {
    let wheel = build(&Folders::find()?)?;
    println!("{}: {:.1} MB", wheel.display(), fs::metadata(&wheel)?.len() as f64 * 1e-6);
    Ok(())
}

/// Builds program and module for the release platform, and the wheel of them.
pub(crate) fn build(folders: &Folders) -> Result<PathBuf> {
    let tools = install_tools(&folders.target)?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path =
        std::env::join_paths([tools.clone()].into_iter().chain(std::env::split_paths(&path)))?;
    let mut cargo = Command::new(tools.join("cargo-zigbuild"));
    cargo.args(["zigbuild", "--release", "--locked", "--package", "dacapo", "--package", "python"]);
    cargo.args(["--features", "dacapo/grpc"]);
    cargo.arg("--target").arg(format!("{TARGET}.{GLIBC}"));
    succeed(cargo.current_dir(&folders.root).env("PATH", path))?;
    let wheel = pack(folders)?;
    let bytes = fs::metadata(&wheel)?.len();
    ensure!(bytes <= MOST_BYTES, "the wheel has {bytes} bytes; at most {MOST_BYTES} are allowed");
    check(&tools, &wheel)?;
    Ok(wheel)
}

/// Asks tools of others whether the wheel is what its name says.
fn check(tools: &Path, wheel: &Path) -> Result<()> {
    let shown = Command::new(tools.join("auditwheel")).arg("show").arg(wheel).output();
    let shown = String::from_utf8(shown.context("auditwheel")?.stdout)?;
    let platform = TAG.rsplit('-').next().unwrap_or(TAG);
    ensure!(shown.contains(platform), "auditwheel does not find {platform}:\n{shown}");
    succeed(Command::new(tools.join("abi3audit")).arg("--strict").arg(wheel))
}

fn pack(folders: &Folders) -> Result<PathBuf> {
    fs::create_dir_all(&folders.dist)?;
    let mut python = Command::new("python3");
    python.arg(folders.root.join("python/build/wheel_of_cargo.py"));
    python.arg(folders.release()).arg(TAG).arg(&folders.dist);
    let output = python.output().context("python3")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim()))
}

/// The folder of the tools' programs, in an environment of their own.
fn install_tools(target: &Path) -> Result<PathBuf> {
    let folder = target.join("tools/wheel");
    let python = folder.join("bin/python");
    if !python.exists() {
        succeed(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    }
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    succeed(Command::new(python).args(pip).args(TOOLS))?;
    Ok(folder.join("bin"))
}

/// Runs a command that must succeed.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?} does not start"))?;
    ensure!(status.success(), "{command:?} failed");
    Ok(())
}
