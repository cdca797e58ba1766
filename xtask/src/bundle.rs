//! `cargo xtask bundle`: the program, the tests and the script that a machine with a GPU and no Rust needs to
//! run the tests that need a GPU (`tools/gpu/check`), as one archive.

use anyhow::{Context, Result, ensure};
use cargo_metadata::{Message, Metadata};
use std::fs;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The largest size of the archive: it is copied to machines over slow lines.
const MOST_BYTES: u64 = 48 << 20;

/// What is not compiled, and where the bundle has it.
const FILES: [(&str, &str); 3] = [
    ("tools/gpu/check", "check"),
    ("tools/gpu/compare_transformers.py", "compare_transformers.py"),
    ("crates/model/tests/goldens", "crates/model/tests/goldens"),
];

/// Builds, strips, copies and packs.
pub(crate) fn run() -> Result<()> {
    let metadata = cargo_metadata::MetadataCommand::new().no_deps().exec()?;
    let root = metadata.workspace_root.as_std_path();
    let target = metadata.target_directory.as_std_path();
    let folder = target.join("bundle");
    if folder.exists() {
        fs::remove_dir_all(&folder).context("the last bundle cannot be removed")?;
    }
    let tested = ["-p", "device", "-p", "graph", "-p", "engine"];
    // Tests are built with overflow checks, as usual; the long run is not, since it would take hours that way.
    for (place, command, of) in [
        ("tests", &["test", "--no-run", "--lib", "--tests"][..], &tested[..]),
        ("bin", &["build", "--release"], &[]),
        ("bin", &["build", "--release", "--example", "parity"], &["-p", "model"]),
        ("bin", &["test", "--no-run", "--release", "--test", "it"], &["-p", "graph"]),
    ] {
        fs::create_dir_all(folder.join(place))?;
        for binary in build(&metadata, &[command, of].concat())? {
            copy_stripped(&binary.path, &folder.join(place).join(&binary.name))?;
        }
    }
    for (from, to) in FILES {
        let to = folder.join(to);
        fs::create_dir_all(to.parent().context("it lies in the bundle")?)?;
        let copied = Command::new("cp").arg("-r").arg(root.join(from)).arg(&to).status()?;
        ensure!(copied.success(), "{from} cannot be copied");
    }
    let archive = target.join("bundle.tar.xz");
    let mut tar = Command::new("tar");
    tar.arg("-cJf").arg(&archive).arg("-C").arg(target).arg("bundle");
    ensure!(tar.status().context("tar does not start")?.success(), "tar failed");
    let bytes = fs::metadata(&archive)?.len();
    ensure!(
        bytes <= MOST_BYTES,
        "the bundle has {} MiB; {} are allowed",
        bytes >> 20,
        MOST_BYTES >> 20
    );
    println!("{}: {} MiB", archive.display(), bytes >> 20);
    Ok(())
}

struct Binary {
    name: String,
    path: PathBuf,
}

/// Runs cargo; the programs it made, tests under the names of their packages.
fn build(metadata: &Metadata, command: &[&str]) -> Result<Vec<Binary>> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(command).arg("--message-format=json-render-diagnostics");
    let mut child = cargo.stdout(Stdio::piped()).spawn().context("cargo does not start")?;
    let output = BufReader::new(child.stdout.take().context("its output was piped")?);
    let mut binaries = Vec::new();
    for message in Message::parse_stream(output) {
        let Message::CompilerArtifact(artifact) = message? else { continue };
        let Some(path) = artifact.executable else { continue };
        let package = &metadata[&artifact.package_id].name;
        let target = &artifact.target.name;
        let name = match (artifact.profile.test, artifact.target.is_lib()) {
            (false, _) => target.clone(),
            (true, true) => format!("{package}-unit"),
            (true, false) => format!("{package}-{target}"),
        };
        binaries.push(Binary { name, path: path.into() });
    }
    ensure!(child.wait()?.success(), "the build failed");
    ensure!(!binaries.is_empty(), "cargo {} made no program", command.join(" "));
    Ok(binaries)
}

fn copy_stripped(from: &Path, to: &Path) -> Result<()> {
    let stripped = Command::new("strip").arg("-o").arg(to).arg(from).status();
    if !stripped.is_ok_and(|status| status.success()) {
        fs::copy(from, to).with_context(|| format!("{} cannot be copied", from.display()))?;
    }
    Ok(())
}
