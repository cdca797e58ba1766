//! Standard output and standard error, for every command. Neither can make the program panic:
//!
//! - What a command prints goes through [`Output`]. Where the reader is gone (`dacapo … | head -1`) the
//!   program ends without a word, with the exit code of a tool that SIGPIPE ended; where the disk is
//!   full it says so and fails.
//! - What is said beside the result goes through [`note!`]. Nobody may be there to read it, which is no
//!   reason to fail.

use crate::log;
use std::fmt;
use std::io::{self, Stdout, Write};

/// Nobody reads standard output any more.
#[derive(Debug)]
pub(crate) struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody reads standard output any more")
    }
}

impl std::error::Error for ReaderGone {}

impl ReaderGone {
    /// Whether this is why something failed.
    pub(crate) fn caused(error: &(dyn std::error::Error + 'static)) -> bool {
        let io = error.downcast_ref::<io::Error>();
        io.and_then(io::Error::get_ref).is_some_and(|inner| inner.is::<Self>())
    }
}

/// Standard output. Its errors say that they are of standard output, so that a broken connection to
/// a hub is never taken for a closed pipe.
pub(crate) struct Output(Stdout);

impl Output {
    pub(crate) fn new() -> Self {
        Self(io::stdout())
    }

    /// Whether somebody looks at it on a terminal.
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

/// Says whose error it is.
pub(crate) fn of_output(error: io::Error) -> io::Error {
    match error.kind() {
        // `write_all` tries again.
        io::ErrorKind::Interrupted => error,
        io::ErrorKind::BrokenPipe => io::Error::new(io::ErrorKind::BrokenPipe, ReaderGone),
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

/// Says something beside the result: through the log's thread where there is one, so that a server
/// never waits for whoever reads its standard error.
pub(crate) fn note_line(text: &str) {
    if !log::note(text) {
        // There is nobody to tell that nobody can be told.
        let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_closed_output_is_a_reader_that_is_gone() {
        let closed = of_output(io::ErrorKind::BrokenPipe.into());
        assert!(ReaderGone::caused(&closed));
        let full = of_output(io::ErrorKind::StorageFull.into());
        assert!(!ReaderGone::caused(&full) && full.to_string().starts_with("standard output: "));
        let connection = io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(!ReaderGone::caused(&connection));
    }
}
