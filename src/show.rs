//! Prints a model's text to standard output.

use crate::output::Output;
use std::io::Write;

/// Streams an answer to standard output.
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

    /// Prints a piece and flushes.
    pub(crate) fn show(&mut self, text: &str) -> std::io::Result<()> {
        let Some(last) = text.chars().next_back() else { return Ok(()) };
        self.ends_in_newline = last == '\n';
        match self.is_terminal {
            true => self.out.write_all(without_controls(text).as_bytes())?,
            false => self.out.write_all(text.as_bytes())?,
        }
        self.out.flush()
    }

    /// Ends the line if it is not ended.
    pub(crate) fn end_line(&mut self) -> std::io::Result<()> {
        if !std::mem::replace(&mut self.ends_in_newline, true) {
            self.out.write_all(b"\n")?;
        }
        self.out.flush()
    }
}

/// Replaces control characters except newlines and tabs, so that a model cannot send escape
/// sequences to the terminal.
fn without_controls(text: &str) -> String {
    let is_unsafe = |c: char| (c.is_control() && !matches!(c, '\n' | '\t')) || c == '\u{9b}';
    text.chars().map(|c| if is_unsafe(c) { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(
            without_controls("a\n\tb\u{1b}[2Jc\r\u{9b}"),
            "a\n\tb\u{fffd}[2Jc\u{fffd}\u{fffd}"
        );
    }
}
