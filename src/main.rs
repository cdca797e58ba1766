//! `dacapo`: one binary that serves, answers, measures and explains. A subcommand is a file here;
//! what it does lies in the crates.

mod exit;
mod models;
mod progress;
mod pull;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Runs language models by recording them as device graphs and replaying those
#[derive(Parser, Debug)]
#[command(name = "dacapo", version, propagate_version = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Pull(pull::PullArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    exit::finish(match &cli.command {
        Command::Pull(args) => pull::run(args),
    })
}
