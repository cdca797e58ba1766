//! The program `dacapo`: the command line of the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(dacapo::run(std::env::args_os()))
}
