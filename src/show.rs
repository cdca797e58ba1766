//! Text of a model on somebody's terminal.

use crate::output::Output;
use std::io::Write;

/// Writes an answer to standard output as it comes.
pub(crate) struct Screen {
    out: Output,
    is_terminal: bool,
    ends_in_newline: bool,
}

impl Screen {
    pub(crate) fn new() -> Self {
        let out = Output::new();
        let is_terminal = out.is_terminal();
        Self { out, is_terminal, ends_in_newline: true }
    }

    /// Shows a piece at once.
    pub(crate) fn show(&mut self, text: &str) -> std::io::Result<()> {
        let Some(last) = text.chars().next_back() else { return Ok(()) };
        self.ends_in_newline = last == '\n';
        match self.is_terminal {
            true => self.out.write_all(harmless(text).as_bytes())?,
            false => self.out.write_all(text.as_bytes())?,
        }
        self.out.flush()
    }

    /// Ends the line, if it is not ended.
    pub(crate) fn end_line(&mut self) -> std::io::Result<()> {
        if !std::mem::replace(&mut self.ends_in_newline, true) {
            self.out.write_all(b"\n")?;
        }
        self.out.flush()
    }
}

/// A model must not be able to steer the terminal: control characters but line ends and tabs are
/// shown, not sent.
fn harmless(text: &str) -> String {
    let steers = |c: char| (c.is_control() && !matches!(c, '\n' | '\t')) || c == '\u{9b}';
    text.chars().map(|c| if steers(c) { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_not_sent() {
        assert_eq!(harmless("a\n\tb\u{1b}[2Jc\r\u{9b}"), "a\n\tb\u{fffd}[2Jc\u{fffd}\u{fffd}");
    }
}
