//! Checks of a finished process.

use std::process::Output;

/// Expects this exit code, nothing on standard output, and one error line; returns the line.
#[track_caller]
pub(crate) fn fails(output: Output, code: i32) -> String {
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.starts_with("error: "), "{error}");
    assert_eq!(output.stdout, b"");
    error
}
