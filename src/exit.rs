//! How the program ends: what each exit code promises, and how an error earns one.

use engine::model::LoadError;
use std::fmt;
use std::process::ExitCode;

/// The program did what it was asked.
pub(crate) const OK: u8 = 0;
/// It was asked for something sensible and could not do it.
pub(crate) const RUNTIME: u8 = 1;
/// What it was given is wrong: a flag, a name, a file.
pub(crate) const BAD_INPUT: u8 = 2;
/// The user interrupted it (128 + SIGINT, as shells count).
pub(crate) const INTERRUPTED: u8 = 130;

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
        )
    )
}

/// Ends the program: nothing to say, or one line on standard error.
pub(crate) fn finish(outcome: anyhow::Result<()>) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::from(OK) };
    let code = code(&error);
    if is_closed_pipe(&error) {
        // The reader of our output has what it wanted (`dacapo … | head`).
        return ExitCode::from(OK);
    }
    if code != INTERRUPTED {
        eprintln!("error: {}", one_line(&format!("{error:#}")));
    }
    ExitCode::from(code)
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
    })
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
    }

    #[test]
    fn errors_are_one_line() {
        assert_eq!(one_line("a\n  b\n\nc"), "a; b; c");
    }
}
