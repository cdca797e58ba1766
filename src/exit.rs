//! How the program ends: what each exit code promises, and how an error earns one.

use crate::log;
use crate::output::{Output, ReaderGone, note, of_output};
use engine::model::LoadError;
use std::fmt;
use std::io::Write;
use std::process::ExitCode;

/// The program did what it was asked.
pub(crate) const OK: u8 = 0;
/// It was asked for something sensible and could not do it.
pub(crate) const RUNTIME: u8 = 1;
/// What it was given is wrong: a flag, a name, a file.
pub(crate) const BAD_INPUT: u8 = 2;
/// The user interrupted it (128 + SIGINT, as shells count).
pub(crate) const INTERRUPTED: u8 = 130;
/// Whoever read its standard output stopped (128 + SIGPIPE): what it printed was cut off, so it is
/// not 0, and there is nobody to tell, so nothing is said.
pub(crate) const READER_GONE: u8 = 141;

/// Marks an error as the fault of what the user gave.
#[derive(Debug)]
pub(crate) struct BadInput(pub(crate) String);

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadInput {}

/// An error that says what is wrong with the input.
pub(crate) fn bad_input(what: impl Into<String>) -> anyhow::Error {
    BadInput(what.into()).into()
}

/// The user asked to stop.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// The exit code an error earns.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if cause.is::<Interrupted>() {
            return INTERRUPTED;
        }
        if ReaderGone::caused(cause) {
            return READER_GONE;
        }
        if cause.is::<BadInput>() || cause.is::<formats::Error>() || is_bad_model(cause) {
            return BAD_INPUT;
        }
    }
    RUNTIME
}

/// Whether the model's files, not the device, are what stood in the way.
fn is_bad_model(cause: &(dyn std::error::Error + 'static)) -> bool {
    matches!(
        cause.downcast_ref::<LoadError>(),
        Some(
            LoadError::Format(_)
                | LoadError::Tensors { .. }
                | LoadError::Quant(_)
                | LoadError::Program(_)
                | LoadError::Graphs(_)
                | LoadError::KvSize { .. }
        )
    )
}

/// Ends the program: nothing to say, or one line on standard error.
pub(crate) fn finish(outcome: anyhow::Result<()>) -> ExitCode {
    // What was printed is written only now if its last line has no end.
    let outcome = outcome.and_then(|()| Ok(Output::new().flush()?));
    let code = outcome.as_ref().map_or_else(code, |()| OK);
    if let Err(error) = outcome
        && !matches!(code, INTERRUPTED | READER_GONE)
    {
        note!("error: {}", one_line(&format!("{error:#}")));
    }
    log::finish();
    ExitCode::from(code)
}

/// Ends the program with what clap has to say: help and version on standard output, what is wrong
/// with the command line on standard error.
pub(crate) fn of_usage(said: &clap::Error) -> ExitCode {
    let printed = said.print();
    match said.use_stderr() {
        true => ExitCode::from(BAD_INPUT),
        false => finish(printed.map_err(|error| of_output(error).into())),
    }
}

fn one_line(text: &str) -> String {
    text.split('\n').map(str::trim).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn the_code_comes_from_anywhere_in_the_chain() {
        assert_eq!(code(&anyhow::anyhow!("disk full")), RUNTIME);
        let wrapped: anyhow::Result<()> = Err(bad_input("no such model")).context("loading");
        assert_eq!(code(&wrapped.unwrap_err()), BAD_INPUT);
        assert_eq!(code(&Interrupted.into()), INTERRUPTED);
        let pipe = || std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert_eq!(code(&of_output(pipe()).into()), READER_GONE);
        assert_eq!(code(&anyhow::Error::from(pipe()).context("asking the hub")), RUNTIME);
    }

    #[test]
    fn errors_are_one_line() {
        assert_eq!(one_line("a\n  b\n\nc"), "a; b; c");
    }
}
