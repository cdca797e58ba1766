//! Chores of development, run as `cargo xtask NAME`: nothing here is part of what users get.
//!
//! `tidy` holds the rules that neither rustc nor clippy can see: which crate may know which, where
//! `unsafe` may stand, how long a file may be, and what must never be written into the project. `bundle`
//! packs the tests and measurements for a machine with a GPU and no toolchain.

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
    /// Put tests and measurements into target/bundle for a GPU machine without Rust
    Bundle(bundle::Options),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().chore {
        Chore::Tidy => tidy::run(),
        Chore::Bundle(options) => bundle::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
