//! Why a template could not be compiled or rendered.

use crate::Error;
use crate::error::one_line;

#[derive(Debug)]
pub(super) struct Fault {
    words: String,
    line: Option<u32>,
}

pub(super) type Outcome<T> = std::result::Result<T, Fault>;

impl Fault {
    pub(super) fn new(words: impl Into<String>) -> Self {
        Self { words: words.into(), line: None }
    }

    /// The message of a template's `raise_exception`.
    pub(super) fn raised(words: &str) -> Self {
        Self { words: format!("raised by the template: {words}"), line: Some(0) }
    }

    /// Sets the line where it happened, unless one is set already.
    pub(super) fn at(mut self, line: u32) -> Self {
        self.line.get_or_insert(line);
        self
    }

    pub(super) fn explain(self) -> Error {
        Error::Template(match self.line.filter(|&line| line > 0) {
            Some(line) => one_line(&format!("line {line}: {}", self.words)),
            None => one_line(&self.words),
        })
    }
}
