//! `dacapo`: the command line ([`run`]) and the engine for programs in other languages ([`library`]).
//! Each subcommand is a file here; the work is done in the crates.

mod bench;
mod chat;
mod cli;
mod doctor;
mod embed;
mod exit;
mod generate;
mod graph_args;
mod graph_cli;
mod install;
mod interrupt;
pub mod library;
mod loading;
mod log;
mod models;
mod numbers;
mod output;
mod profile;
mod programs;
mod progress;
mod prompt;
mod pull;
mod quantize;
mod run;
mod sampling;
mod serve;
mod show;
mod steps;
mod trace;
mod version;

use clap::Parser;
use cli::{Cli, Command, Global};
use std::ffi::OsString;
use std::panic::AssertUnwindSafe;

/// Runs the command line, the program's name first; returns the exit code.
pub fn run(line: impl IntoIterator<Item = OsString>) -> u8 {
    let Cli { global, command } = match Cli::try_parse_from(line) {
        Ok(cli) => cli,
        Err(other) => return exit::of_usage(&other),
    };
    device::notice::send_to(output::note_line);
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| execute(&command, &global)));
    match outcome {
        Ok(outcome) => exit::finish(outcome),
        // The message was printed where it panicked.
        Err(_) => exit::RUNTIME,
    }
}

fn execute(command: &Command, global: &Global) -> anyhow::Result<()> {
    match command {
        Command::Serve(args) => serve::run(args, global),
        Command::Run(args) => run::run(args, global),
        Command::Chat(args) => chat::run(args, global),
        Command::Embed(args) => embed::run(args, global),
        Command::Pull(args) => pull::run(args),
        Command::Quantize(args) => quantize::run(args, global),
        Command::Bench(args) => bench::run(args, global),
        Command::Graph(args) => graph_cli::run(args, &programs::Programs { global }),
        Command::Trace(args) => trace::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Completions(args) => install::completions(args),
        Command::Man(args) => install::man(args),
    }
}
