//! Runs Python isolated from the current folder, so that neither its modules nor a `python3` in it
//! are executed.

use anyhow::{Context, Result, anyhow, bail};
use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Variables of pip about package sources and network access. Others, such as `PIP_PYTHON`, which
/// names a program to run, are not passed on.
const OF_PIP: &[&str] = &[
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_NO_INDEX",
    "PIP_FIND_LINKS",
    "PIP_TRUSTED_HOST",
    "PIP_PROXY",
    "PIP_CERT",
    "PIP_CLIENT_CERT",
    "PIP_CONFIG_FILE",
    "PIP_KEYRING_PROVIDER",
    "PIP_DEFAULT_TIMEOUT",
    "PIP_TIMEOUT",
    "PIP_RETRIES",
    "PIP_CACHE_DIR",
    "PIP_NO_CACHE_DIR",
];

/// A Python interpreter with pip.
pub(super) struct Python {
    program: PathBuf,
}

impl Python {
    /// The first one on the PATH; `work` is an empty folder to run in.
    pub(super) fn find(work: &Path) -> Result<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = ["python3", "python"].into_iter().filter_map(|name| on_path(&path, name));
        let mut found = found.map(|program| Self { program });
        found
            .find(|python| python.run(work, &["-m", "pip", "--version"], "running pip").is_ok())
            .ok_or_else(|| anyhow!("no python3 with pip on the PATH"))
    }

    /// Runs it in `work` without output. The error is the last line of its standard error.
    pub(super) fn run<S: AsRef<OsStr>>(&self, work: &Path, args: &[S], what: &str) -> Result<()> {
        let mut command = self.command(work);
        let output = command.args(args).output().with_context(|| what.to_owned())?;
        if output.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&output.stderr);
        let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
        bail!("{what}: {}", last.trim())
    }

    /// Isolated mode (`-I`) ignores the current folder and Python's environment variables. The
    /// variables are removed as well, for processes that Python starts.
    fn command(&self, work: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("-I").current_dir(work).stdin(Stdio::null());
        for (name, value) in std::env::vars_os() {
            if !is_passed_on(&name.to_string_lossy(), &value) {
                command.env_remove(name);
            }
        }
        command
    }
}

fn is_passed_on(name: &str, value: &OsStr) -> bool {
    if name == "PIP_CONFIG_FILE" {
        // A relative path would depend on the current folder.
        return Path::new(value).is_absolute();
    }
    !name.starts_with("PYTHON") && (!name.starts_with("PIP_") || OF_PIP.contains(&name))
}

/// Finds a program in the folders of a PATH. Empty and relative folders are skipped, because they
/// depend on the current folder.
fn on_path(path: &OsStr, name: &str) -> Option<PathBuf> {
    let runs = |file: &PathBuf| {
        file.metadata()
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(path)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(name))
        .find(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn only_absolute_folders_are_searched() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("thing");
        fs::write(&program, "").unwrap();
        let path = |list: &str| std::ffi::OsString::from(list);
        let whole = path(&format!(":.:bin:{}", folder.path().display()));
        assert_eq!(on_path(&whole, "thing"), None, "not a program");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(on_path(&whole, "thing"), Some(program));
        // Tests run in the folder of the package.
        assert!(Path::new("Cargo.toml").exists() && Path::new("src").exists());
        for here in ["", ".", "..", "src"] {
            assert_eq!(on_path(&path(here), "Cargo.toml"), None);
        }
    }

    #[test]
    fn variables_passed_to_python() {
        let passed = |name: &str, value: &str| is_passed_on(name, OsStr::new(value));
        for good in ["PATH", "HOME", "HTTPS_PROXY", "SSL_CERT_FILE", "PIP_INDEX_URL", "PIP_CERT"] {
            assert!(passed(good, "x"), "{good}");
        }
        for bad in ["PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PIP_PYTHON", "PIP_TARGET"] {
            assert!(!passed(bad, "x"), "{bad}");
        }
        assert!(
            passed("PIP_CONFIG_FILE", "/etc/pip.conf") && !passed("PIP_CONFIG_FILE", "pip.conf")
        );
    }
}
