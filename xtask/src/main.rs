//! Development tasks, run as `cargo xtask NAME`; not part of the product.
//!
//! `tidy` checks rules that neither rustc nor clippy can: which crate may depend on which, where
//! `unsafe` is allowed, how long a file or a function may be, which public items are unused, and what
//! must never be written into the project. `bundle` packs what is tested and measured on a machine with a
//! GPU and no toolchain.

mod bundle;
mod tidy;

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
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().chore {
        Chore::Tidy => tidy::run(),
        Chore::Bundle => bundle::run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
