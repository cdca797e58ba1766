//! Exit codes, and how errors map to them.

use crate::log;
use crate::output::{Output, OutputClosed, note, of_output};
use graph::CompileError;
use model::LoadError;
use server::ServeError;
use std::fmt;
use std::io::Write;
use std::path::Path;

/// Success.
pub(crate) const OK: u8 = 0;
/// The input was valid, but the command failed.
pub(crate) const RUNTIME: u8 = 1;
/// The input is invalid: a flag, a name, a file.
pub(crate) const BAD_INPUT: u8 = 2;
/// Interrupted by the user (128 + SIGINT, as in shells).
pub(crate) const INTERRUPTED: u8 = 130;
/// Standard output was closed by its reader (128 + SIGPIPE). No message is printed, like other
/// tools that SIGPIPE ends.
pub(crate) const OUTPUT_CLOSED: u8 = 141;

/// An error caused by invalid input.
#[derive(Debug)]
pub(crate) struct BadInput(pub(crate) String);

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadInput {}

/// An error for invalid input.
pub(crate) fn bad_input(what: impl Into<String>) -> anyhow::Error {
    BadInput(what.into()).into()
}

/// Makes the error of a file that cannot be read or is not what it should be.
pub(crate) fn bad_file<E: fmt::Display>(path: &Path) -> impl FnOnce(E) -> anyhow::Error {
    move |error| bad_input(format!("{}: {error}", path.display()))
}

/// The user pressed Ctrl-C.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// The exit code of an error.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if cause.is::<Interrupted>() {
            return INTERRUPTED;
        }
        if OutputClosed::caused(cause) {
            return OUTPUT_CLOSED;
        }
        let config = matches!(cause.downcast_ref(), Some(ServeError::Config(_)));
        let of_input = cause.is::<BadInput>() || cause.is::<formats::Error>();
        if config || of_input || is_bad_model(cause) || is_bad_size(cause) {
            return BAD_INPUT;
        }
    }
    RUNTIME
}

/// Whether the model's files, not the device, caused the error.
fn is_bad_model(cause: &(dyn std::error::Error + 'static)) -> bool {
    matches!(
        cause.downcast_ref::<LoadError>(),
        Some(
            LoadError::Format(_)
                | LoadError::Tensors { .. }
                | LoadError::Quant(_)
                | LoadError::Program(_)
                | LoadError::GgmlExperts
                | LoadError::Graphs(_)
                | LoadError::KvSize { .. }
        )
    )
}

/// Whether the sizes on the command line, not the device, caused the error.
fn is_bad_size(cause: &(dyn std::error::Error + 'static)) -> bool {
    let compile = match cause.downcast_ref() {
        Some(LoadError::Compile(error)) => Some(error),
        _ => cause.downcast_ref(),
    };
    let device = match (compile, cause.downcast_ref()) {
        (Some(CompileError::Limits { .. }), _) => return true,
        (Some(CompileError::Device(error)), _) | (_, Some(LoadError::Device(error))) => Some(error),
        _ => cause.downcast_ref(),
    };
    matches!(device, Some(device::Error::Limits { .. }))
}

/// The exit code of a command; prints an error as one line on standard error.
pub(crate) fn finish(outcome: anyhow::Result<()>) -> u8 {
    // Output without a final newline is still buffered.
    let outcome = outcome.and_then(|()| Ok(Output::new().flush()?));
    let code = outcome.as_ref().map_or_else(code, |()| OK);
    if let Err(error) = outcome
        && !matches!(code, INTERRUPTED | OUTPUT_CLOSED)
    {
        note!("error: {}", one_line(&error));
    }
    log::finish();
    code
}

/// The exit code after clap's message: help and version on standard output, usage errors on
/// standard error.
pub(crate) fn of_usage(said: &clap::Error) -> u8 {
    let printed = said.print();
    match said.use_stderr() {
        true => BAD_INPUT,
        false => finish(printed.map_err(|error| of_output(error).into())),
    }
}

/// An error and its causes in one line.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    text.split('\n').map(str::trim).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn the_code_is_found_anywhere_in_the_error_chain() {
        assert_eq!(code(&anyhow::anyhow!("disk full")), RUNTIME);
        let wrapped: anyhow::Result<()> = Err(bad_input("no such model")).context("loading");
        assert_eq!(code(&wrapped.unwrap_err()), BAD_INPUT);
        assert_eq!(code(&Interrupted.into()), INTERRUPTED);
        let pipe = || std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert_eq!(code(&of_output(pipe()).into()), OUTPUT_CLOSED);
        assert_eq!(code(&anyhow::Error::from(pipe()).context("asking the hub")), RUNTIME);
    }

    #[test]
    fn errors_are_one_line() {
        assert_eq!(one_line(&anyhow::anyhow!("a\n  b\n\nc")), "a; b; c");
    }
}
