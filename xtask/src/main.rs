//! Development tasks, run as `cargo xtask NAME`; not part of the product.
//!
//! `tidy` checks rules that neither rustc nor clippy can: which crate may depend on which, where
//! `unsafe` is allowed, how long a file or a function may be, which public items are unused, and what
//! must never be written into the project. `bundle` packs what is tested and measured on a machine with a
//! GPU and no toolchain. `wheel` makes the Python package, `dist` everything of a release.

mod bundle;
mod dist;
mod tidy;
mod wheel;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Development chores")]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Check the rules of the source tree: crate direction, unsafe code, sizes, names, words
    Tidy,
    /// Pack target/bundle.tar.xz for a GPU machine without Rust; `check` in it runs everything
    Bundle,
    /// Make the Python package in dist: the program and the engine for Linux with glibc 2.28 and Python 3.9 or newer
    Wheel,
    /// Make everything of a release in dist: the wheel, an archive of the program, checksums
    Dist,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().chore {
        Chore::Tidy => tidy::run(),
        Chore::Bundle => bundle::run(),
        Chore::Wheel => wheel::run(),
        Chore::Dist => dist::run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
