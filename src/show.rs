//! Prints a model's text to standard output, and its reasoning to standard error.

use crate::output::Output;
use server::answer::Delta;
use std::io::{IsTerminal, Write, stderr};

/// Streams an answer.
pub(crate) struct Screen {
    out: Output,
    is_terminal: bool,
    ends_in_newline: bool,
    /// The reasoning is not over.
    reasons: bool,
}

/// Reasoning on a terminal is dimmed.
const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

impl Screen {
    pub(crate) fn new() -> Self {
        let out = Output::new();
        let is_terminal = out.is_terminal();
        Self { out, is_terminal, ends_in_newline: true, reasons: false }
    }

    /// Prints a piece and flushes.
    pub(crate) fn show(&mut self, piece: &Delta) -> std::io::Result<()> {
        match piece {
            Delta::Text(text) => self.text(text),
            Delta::Reasoning(text) => {
                self.reasoning(text);
                Ok(())
            }
            Delta::ToolStart { .. } | Delta::ToolArguments(_) | Delta::ToolEnd => Ok(()),
        }
    }

    fn text(&mut self, text: &str) -> std::io::Result<()> {
        let Some(last) = text.chars().next_back() else { return Ok(()) };
        self.end_reasoning();
        self.ends_in_newline = last == '\n';
        match self.is_terminal {
            true => self.out.write_all(without_controls(text).as_bytes())?,
            false => self.out.write_all(text.as_bytes())?,
        }
        self.out.flush()
    }

    /// Errors are ignored, as those of all messages.
    fn reasoning(&mut self, text: &str) {
        let mut err = stderr();
        let (begin, text) = match (err.is_terminal(), self.reasons) {
            (true, false) => (DIM, without_controls(text)),
            (true, true) => ("", without_controls(text)),
            (false, _) => ("", text.to_owned()),
        };
        self.reasons = true;
        let _ = write!(err, "{begin}{text}").and_then(|()| err.flush());
    }

    fn end_reasoning(&mut self) {
        if std::mem::take(&mut self.reasons) {
            let mut err = stderr();
            let _ = writeln!(err, "{}\n", if err.is_terminal() { PLAIN } else { "" });
        }
    }

    /// Ends the line if it is not ended.
    pub(crate) fn end_line(&mut self) -> std::io::Result<()> {
        self.end_reasoning();
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
