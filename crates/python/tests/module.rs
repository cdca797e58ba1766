//! The extension module loads in this machine's Python, and its command line runs. The package is tested by
//! `testing/python/run`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The module that cargo built for this test.
fn module() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let built = test.parent().unwrap().join("lib_dacapo.so");
    assert!(built.exists(), "{} does not exist", built.display());
    built
}

#[test]
fn the_module_loads_and_runs_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let package = folder.path().join("dacapo");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/dacapo");
    std::fs::create_dir(&package).unwrap();
    for entry in std::fs::read_dir(sources).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "py") {
            std::fs::copy(&path, package.join(path.file_name().unwrap())).unwrap();
        }
    }
    std::os::unix::fs::symlink(module(), package.join("_dacapo.abi3.so")).unwrap();
    let python = |args: &[&str]| {
        let output = Command::new("python3").args(args).env("PYTHONPATH", folder.path()).output();
        output.expect("python3 is needed")
    };
    let version = python(&["-m", "dacapo", "--version"]);
    let said = String::from_utf8_lossy(&version.stdout);
    assert!(version.status.success() && said.contains(env!("CARGO_PKG_VERSION")), "{version:?}");
    let unknown = python(&["-c", "import dacapo; dacapo.LLM('x', no_such_option=1)"]);
    let said = String::from_utf8_lossy(&unknown.stderr);
    assert!(said.contains("InvalidInput") && said.contains("--no-such-option"), "{said}");
}
