//! Tests that nothing would run: those in packages whose libraries and programs are not built as tests.

use super::Problem;
use super::public::Source;
use cargo_metadata::{Metadata, Package};

/// Every such test of a member of the workspace.
pub(super) fn check(metadata: &Metadata, sources: &[Source]) -> Vec<Problem> {
    let root = metadata.workspace_root.as_path();
    let members = metadata.workspace_packages().into_iter().filter(|package| !is_tested(package));
    let folders: Vec<String> = members
        .filter_map(|package| package.manifest_path.strip_prefix(root).ok())
        .map(|manifest| manifest.as_str().trim_end_matches("Cargo.toml").to_owned() + "src/")
        .collect();
    let untested = |path: &str| folders.iter().any(|folder| path.starts_with(folder.as_str()));
    sources
        .iter()
        .filter(|source| untested(&source.path))
        .flat_map(|source| check_text(&source.path, &source.text))
        .collect()
}

fn is_tested(package: &Package) -> bool {
    package.targets.iter().any(|target| target.test && target.src_path.as_str().contains("/src/"))
}

fn check_text(path: &str, text: &str) -> Vec<Problem> {
    let is_test = |line: &str| matches!(line.trim(), "#[test]" | "#[tokio::test]");
    let lines = text.lines().enumerate().filter(|(_, line)| is_test(line));
    let what = "nothing runs this test: Cargo.toml says test = false";
    lines.map(|(line, _)| Problem::new(path, line + 1, what)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_planted_test_is_found() {
        let text = "fn one() {}\n\n    #[test]\n    fn two() {}\n// #[test]\n";
        let found = check_text("testing/mock/src/lib.rs", text);
        assert_eq!(found.iter().map(|problem| problem.line).collect::<Vec<_>>(), [3]);
    }
}
