//! `cargo xtask bundle`: the tests and measurements of a machine with a GPU, as files that need no
//! Rust there. One folder, one script, one closing line.

use anyhow::{Context, Result, bail, ensure};
use cargo_metadata::{Message, Metadata};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What the folder may weigh: it is meant to be copied to machines over slow lines.
const MOST_BYTES: u64 = 48 << 20;

/// What to put in the bundle.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Packages whose tests are bundled
    #[arg(short, long = "package", default_values_t = [String::from("device")])]
    packages: Vec<String>,
    /// Build optimised: measurements of the host's own cost need it
    #[arg(long)]
    release: bool,
}

/// Builds, strips, copies and writes the script.
pub(crate) fn run(options: &Options) -> Result<()> {
    let metadata = cargo_metadata::MetadataCommand::new().no_deps().exec()?;
    let folder = metadata.target_directory.join("bundle").into_std_path_buf();
    if folder.exists() {
        std::fs::remove_dir_all(&folder).context("the last bundle cannot be removed")?;
    }
    std::fs::create_dir_all(&folder)?;
    let mut tests = Vec::new();
    let mut measures = Vec::new();
    for binary in build(options, &metadata)? {
        let file = folder.join(&binary.name);
        copy_stripped(&binary.path, &file)?;
        if binary.test { tests.push(binary.name) } else { measures.push(binary.name) }
    }
    ensure!(!tests.is_empty(), "no test binary was built");
    write_script(&folder.join("run.sh"), &tests, &measures)?;
    let mut bytes = 0;
    for entry in std::fs::read_dir(&folder)? {
        bytes += entry?.metadata()?.len();
    }
    if bytes > MOST_BYTES {
        bail!("the bundle has {} MiB; {} are allowed", bytes >> 20, MOST_BYTES >> 20);
    }
    println!("{}: {} files, {} MiB", folder.display(), tests.len() + measures.len(), bytes >> 20);
    Ok(())
}

struct Binary {
    name: String,
    path: PathBuf,
    test: bool,
}

/// The test binaries of the packages, and the program that measures.
fn build(options: &Options, metadata: &Metadata) -> Result<Vec<Binary>> {
    let mut tests = vec!["test", "--no-run", "--lib", "--tests"];
    tests.extend(options.packages.iter().flat_map(|package| ["-p", package]));
    let mut binaries = artifacts(options, metadata, &tests)?;
    let measure = ["build", "-p", "device", "--example", "measure"];
    binaries.extend(artifacts(options, metadata, &measure)?);
    Ok(binaries)
}

fn artifacts(options: &Options, metadata: &Metadata, command: &[&str]) -> Result<Vec<Binary>> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(command).arg("--message-format=json-render-diagnostics");
    if options.release {
        cargo.arg("--release");
    }
    let mut child = cargo.stdout(Stdio::piped()).spawn().context("cargo does not start")?;
    let output = BufReader::new(child.stdout.take().context("its output was piped")?);
    let mut binaries = Vec::new();
    for message in Message::parse_stream(output) {
        let Message::CompilerArtifact(artifact) = message? else { continue };
        let Some(path) = artifact.executable else { continue };
        let package = &metadata[&artifact.package_id].name;
        let (target, test) = (&artifact.target.name, artifact.profile.test);
        let name = match (test, artifact.target.is_lib()) {
            (false, _) => target.clone(),
            (true, true) => format!("{package}-unit"),
            (true, false) => format!("{package}-{target}"),
        };
        binaries.push(Binary { name, path: path.into(), test });
    }
    ensure!(child.wait()?.success(), "the build failed");
    Ok(binaries)
}

fn copy_stripped(from: &Path, to: &Path) -> Result<()> {
    let stripped = Command::new("strip").arg("-o").arg(to).arg(from).status();
    if !stripped.is_ok_and(|status| status.success()) {
        std::fs::copy(from, to).with_context(|| format!("{} cannot be copied", from.display()))?;
    }
    Ok(())
}

/// Tests first, then what is measured, then the one line that says how it went.
fn write_script(path: &Path, tests: &[String], measures: &[String]) -> Result<()> {
    let script = format!(
        r#"#!/usr/bin/env bash
# Runs every test and measurement of this folder; the last line says how it went.
# SANITIZER="compute-sanitizer --tool memcheck" runs the tests under a checker. MEASURE=0 leaves measurements out.
cd "$(dirname "$0")" || exit 1
passed=0 failed=0 skipped=0
log=$(mktemp)
for test in {tests}; do
    echo "== $test"
    ${{SANITIZER:-}} timeout "${{LIMIT:-300}}" "./$test" --nocapture "$@" >"$log" 2>&1
    code=$?
    p=$(grep -oE '[0-9]+ passed' "$log" | tail -1 | grep -oE '[0-9]+' || echo 0)
    f=$(grep -oE '[0-9]+ failed' "$log" | tail -1 | grep -oE '[0-9]+' || echo 0)
    s=$(grep -c '^skipped:' "$log")
    [ "$s" -gt "$p" ] && s=$p
    [ "$code" -ne 0 ] && [ "$f" -eq 0 ] && f=1
    if [ "$f" -ne 0 ]; then cat "$log"; else grep -E '^(skipped:|test result:|========= )' "$log" | sort | uniq -c; fi
    passed=$((passed + p - s)) failed=$((failed + f)) skipped=$((skipped + s))
done
if [ "${{MEASURE:-1}}" -ne 0 ]; then
    for measure in {measures}; do
        echo "== $measure"
        "./$measure" || failed=$((failed + 1))
    done
fi
rm -f "$log"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
"#,
        tests = tests.join(" "),
        measures = measures.join(" "),
    );
    std::fs::write(path, script)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}
