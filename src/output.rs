//! Standard output and standard error of all commands. Write errors never panic:
//!
//! - Results go through [`Output`]. If the pipe is closed (`dacapo … | head -1`) the program ends
//!   silently with the exit code of SIGPIPE; if the disk is full it fails with an error.
//! - Messages go through [`note!`]; errors in writing them are ignored.

use crate::log;
use std::fmt;
use std::io::{self, Stdout, Write};

/// Standard output was closed by its reader.
#[derive(Debug)]
pub(crate) struct OutputClosed;

impl fmt::Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for OutputClosed {}

impl OutputClosed {
    /// Whether this is the cause of an error.
    pub(crate) fn caused(error: &(dyn std::error::Error + 'static)) -> bool {
        let io = error.downcast_ref::<io::Error>();
        io.and_then(io::Error::get_ref).is_some_and(|inner| inner.is::<Self>())
    }
}

/// Standard output. Its errors are marked, so that a broken connection to a hub is not mistaken for
/// a closed pipe.
pub(crate) struct Output(Stdout);

impl Output {
    pub(crate) fn new() -> Self {
        Self(io::stdout())
    }

    /// Whether it is a terminal.
    pub(crate) fn is_terminal(&self) -> bool {
        io::IsTerminal::is_terminal(&self.0)
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(of_output)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(of_output)
    }
}

/// Marks an error as one of standard output.
pub(crate) fn of_output(error: io::Error) -> io::Error {
    match error.kind() {
        // `write_all` tries again.
        io::ErrorKind::Interrupted => error,
        io::ErrorKind::BrokenPipe => io::Error::new(io::ErrorKind::BrokenPipe, OutputClosed),
        kind => io::Error::new(kind, format!("standard output: {error}")),
    }
}

/// A line on standard output; `say!("{n} steps")?`. Fails as [`Output`] does.
macro_rules! say {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        writeln!($crate::output::Output::new(), $($words)*)
    }};
}
pub(crate) use say;

/// A line on standard error; `note!("loaded {n} bytes")`. Never fails.
macro_rules! note {
    ($($words:tt)*) => {
        $crate::output::note_line(&format!($($words)*))
    };
}
pub(crate) use note;

/// Prints a message on standard error; through the log's thread if it runs, so that a server never
/// blocks on standard error.
pub(crate) fn note_line(text: &str) {
    if !log::note(text) {
        // An error here cannot be reported anywhere.
        let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_broken_pipe_of_standard_output_counts_as_closed() {
        let closed = of_output(io::ErrorKind::BrokenPipe.into());
        assert!(OutputClosed::caused(&closed));
        let full = of_output(io::ErrorKind::StorageFull.into());
        assert!(!OutputClosed::caused(&full) && full.to_string().starts_with("standard output: "));
        let connection = io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(!OutputClosed::caused(&connection));
    }
}
