//! `cargo xtask dist`: everything of a release in `dist`: the wheel, an archive of the program with completions,
//! manual pages and a systemd unit, and checksums.

use crate::wheel::{self, Folders, TARGET, succeed};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;

/// What is copied from the tree, and where the archive has it.
const FILES: [(&str, &str); 5] = [
    ("README.md", "README.md"),
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("LICENSE", "LICENSE"),
    ("packaging/dacapo.service", "dacapo.service"),
    ("packaging/Containerfile", "Containerfile"),
];
/// Shells, and the names of their completions.
const SHELLS: [(&str, &str); 3] =
    [("bash", "dacapo.bash"), ("zsh", "_dacapo"), ("fish", "dacapo.fish")];

/// Builds and packs.
pub(crate) fn run() -> Result<()> {
    let folders = Folders::find()?;
    if folders.dist.exists() {
        fs::remove_dir_all(&folders.dist).context("the last release cannot be removed")?;
    }
    wheel::build(&folders)?;
    let name = format!("dacapo-{}-{TARGET}", env!("CARGO_PKG_VERSION"));
    let staged = folders.target.join("dist");
    let folder = staged.join(&name);
    if staged.exists() {
        fs::remove_dir_all(&staged)?;
    }
    fill(&folders, &folder)?;
    let mut tar = Command::new("tar");
    // The same files give the same archive.
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=1980-01-01"]);
    tar.arg("-cJf").arg(folders.dist.join(format!("{name}.tar.xz")));
    succeed(tar.arg("-C").arg(&staged).arg(&name))?;
    fs::copy(folder.join("Containerfile"), folders.dist.join("Containerfile"))?;
    write_checksums(&folders.dist)
}

/// The content of the archive.
fn fill(folders: &Folders, folder: &Path) -> Result<()> {
    let completions = folder.join("completions");
    fs::create_dir_all(&completions)?;
    let program = folder.join("dacapo");
    fs::copy(folders.release().join("dacapo"), &program)?;
    for (from, to) in FILES {
        fs::copy(folders.root.join(from), folder.join(to)).with_context(|| from.to_owned())?;
    }
    for (shell, name) in SHELLS {
        let output = Command::new(&program).args(["completions", shell]).output()?;
        ensure!(output.status.success(), "completions of {shell}");
        fs::write(completions.join(name), output.stdout)?;
    }
    succeed(Command::new(&program).arg("man").arg(folder.join("man")))
}

/// `SHA256SUMS`, as `sha256sum --check` reads it.
fn write_checksums(dist: &Path) -> Result<()> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dist)? {
        names.push(entry?.file_name());
    }
    names.sort();
    let output = Command::new("sha256sum").args(&names).current_dir(dist).output()?;
    ensure!(output.status.success(), "sha256sum failed");
    fs::write(dist.join("SHA256SUMS"), &output.stdout)?;
    print!("{}", String::from_utf8_lossy(&output.stdout));
    Ok(())
}
