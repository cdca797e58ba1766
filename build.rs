//! Tells the program what it was built from: the commit, the platform and the profile.

use std::path::Path;
use std::process::Command;

fn main() {
    let commit = std::env::var("DACAPO_COMMIT").ok().or_else(of_checkout);
    set("DACAPO_COMMIT", commit.as_deref().unwrap_or("unknown commit"));
    set("DACAPO_TARGET", &std::env::var("TARGET").expect("cargo sets it"));
    set("DACAPO_PROFILE", &std::env::var("PROFILE").expect("cargo sets it"));
    println!("cargo::rerun-if-env-changed=DACAPO_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
}

fn set(name: &str, value: &str) {
    println!("cargo::rustc-env={name}={value}");
}

/// The commit of this checkout; `None` for a copy without a repository.
fn of_checkout() -> Option<String> {
    // Written at every commit and checkout, also in a worktree.
    for name in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", name])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned()).filter(|text| !text.is_empty())
}
