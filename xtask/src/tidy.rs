//! The rules of the source tree, checked over every file git knows.

mod dependencies;
mod direction;
mod functions;
mod public;
mod source;
mod syntax;
mod text;
mod untested;
mod wildcards;

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One broken rule, at a place an editor can jump to.
#[derive(Debug, PartialEq, Eq)]
struct Problem {
    path: String,
    /// From 1; 0 when the whole file is meant.
    line: usize,
    what: String,
}

impl Problem {
    fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.into(), line, what: what.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.what),
            line => write!(f, "{}:{line}: {}", self.path, self.what),
        }
    }
}

/// Checks the tree this was built from; prints every problem, fails if there is one.
pub(crate) fn run() -> Result<()> {
    let root = workspace_root();
    let files = tracked_files(&root)?;
    let problems = check_tree(&root, &files)?;
    for problem in &problems {
        eprintln!("{problem}");
    }
    match problems.len() {
        0 => println!("tidy: {} files, nothing to say", files.len()),
        n => bail!("tidy: {n} problem{}", if n == 1 { "" } else { "s" }),
    }
    Ok(())
}

fn check_tree(root: &Path, files: &[String]) -> Result<Vec<Problem>> {
    // Of one platform, because crates of others may not have been downloaded.
    let options = ["--offline", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"];
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(root.join("Cargo.toml"))
        .other_options(options.map(str::to_owned).to_vec())
        .exec()
        .context("cargo metadata")?;
    let edges = direction::edges(&metadata);
    let mut problems = direction::check(&edges);
    problems.extend(dependencies::check(&metadata));
    let mut sources = Vec::new();
    for path in files {
        problems.extend(source::check_path(path));
        let bytes = std::fs::read(root.join(path)).with_context(|| path.clone())?;
        let Ok(text) = String::from_utf8(bytes) else { continue };
        problems.extend(source::check_text(path, &text));
        if path.ends_with(".rs") {
            let syntax = syn::parse_file(&text).with_context(|| path.clone())?;
            sources.push(public::Source { path: path.clone(), text, syntax });
        }
    }
    problems.extend(untested::check(&metadata, &sources));
    for source in sources.iter().filter(|source| !syntax::is_test_file(&source.path)) {
        problems.extend(functions::check(&source.path, &source.syntax));
        problems.extend(wildcards::check(&source.path, &source.syntax));
    }
    for library in libraries(&edges) {
        problems.extend(public::check(&library, &sources));
    }
    Ok(problems)
}

/// The members of the workspace under `crates` and `testing`, with those that depend on them. The fuzz targets are not a
/// member and may use all.
fn libraries(edges: &[direction::Edge]) -> Vec<public::Library> {
    let folder = |manifest: &str| manifest.trim_end_matches("Cargo.toml").to_owned();
    let members: BTreeMap<&str, String> =
        edges.iter().map(|edge| (edge.from.as_str(), folder(&edge.manifest))).collect();
    let libraries =
        members.iter().filter(|(_, folder)| folder.contains('/') && *folder != "xtask/");
    libraries
        .map(|(name, home)| {
            let users = edges.iter().filter(|edge| edge.to == *name);
            let users = users.map(|edge| folder(&edge.manifest)).chain(["fuzz/".into()]);
            public::Library { folder: home.clone(), users: users.collect() }
        })
        .collect()
}

fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask sits in the root").to_owned()
}

/// Files git tracks or would track, as paths from the root with forward slashes.
fn tracked_files(root: &Path) -> Result<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("git ls-files")?;
    if !output.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let listed = String::from_utf8(output.stdout).context("a path that is not UTF-8")?;
    let mut files: Vec<String> = listed
        .split_terminator('\0')
        .filter(|path| root.join(path).is_file())
        .map(str::to_owned)
        .collect();
    files.sort();
    files.dedup();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_tree_is_tidy() {
        let root = workspace_root();
        let files = match tracked_files(&root) {
            Ok(files) => files,
            Err(error) => return eprintln!("skipped: not a git checkout ({error:#})"),
        };
        let problems = check_tree(&root, &files).unwrap();
        let list: Vec<String> = problems.iter().map(Problem::to_string).collect();
        assert!(list.is_empty(), "\n{}", list.join("\n"));
    }
}
