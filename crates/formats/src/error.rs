//! The one error type: a line with the place, what was found and what is allowed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Why a file or text was refused. `Display` is always one line, whatever bytes the file holds.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused to open or read a file.
    #[error("{}: {action}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What was tried, as in "cannot open".
        action: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// A value in a file is not what the format allows.
    #[error("{}: byte {offset}: {field}: found {found}, allowed: {allowed}", file.display())]
    Invalid {
        /// The file.
        file: PathBuf,
        /// Where the value starts, in bytes from the start of the file.
        offset: u64,
        /// The name of the value in the format.
        field: String,
        /// What stands there.
        found: String,
        /// What may stand there.
        allowed: String,
    },
    /// The file has no bytes.
    #[error("{}: is empty", file.display())]
    Empty {
        /// The file.
        file: PathBuf,
    },
    /// The file ends before what its header promises.
    #[error("{}: is cut short; download it again ({what})", file.display())]
    CutShort {
        /// The file.
        file: PathBuf,
        /// What is missing.
        what: String,
    },
    /// The file is well-formed but asks for something that Dacapo does not support.
    #[error("{}: {field}: {found} is not supported; supported: {allowed}", file.display())]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The name of the value in the format.
        field: String,
        /// What stands there.
        found: String,
        /// What is supported.
        allowed: String,
    },
    /// A tensor, file or built-in name that does not exist.
    #[error("{}: no {what}", place.display())]
    Missing {
        /// Where it was looked for.
        place: PathBuf,
        /// What was looked for.
        what: String,
    },
    /// A chat template that does not compile, raises, or uses too much.
    #[error("chat template: {0}")]
    Template(String),
    /// Text that cannot be tokenized.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// Text of more tokens than the caller allows.
    #[error("tokenizer: text: found more than {max_tokens} tokens, allowed: at most {max_tokens}")]
    TooLong {
        /// How many there may be.
        max_tokens: usize,
    },
}

impl Error {
    pub(crate) fn io(file: &Path, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { file: file.to_owned(), action, source }
    }

    /// A value that is not what the format allows.
    pub fn invalid(
        file: &Path,
        offset: u64,
        field: impl AsRef<str>,
        found: impl std::fmt::Display,
        allowed: impl std::fmt::Display,
    ) -> Self {
        Self::Invalid {
            file: file.to_owned(),
            offset,
            field: one_line(field.as_ref()),
            found: one_line(&found.to_string()),
            allowed: one_line(&allowed.to_string()),
        }
    }

    /// A well-formed value that Dacapo does not support.
    pub fn unsupported(
        file: &Path,
        field: impl AsRef<str>,
        found: impl std::fmt::Display,
        allowed: impl std::fmt::Display,
    ) -> Self {
        Self::Unsupported {
            file: file.to_owned(),
            field: one_line(field.as_ref()),
            found: one_line(&found.to_string()),
            allowed: one_line(&allowed.to_string()),
        }
    }

    /// Something that does not exist.
    pub fn missing(place: &Path, what: impl AsRef<str>) -> Self {
        Self::Missing { place: place.to_owned(), what: one_line(what.as_ref()) }
    }
}

/// `text` cut to a readable length with control characters escaped, so that a hostile file cannot
/// write to the terminal or flood a log.
pub(crate) fn one_line(text: &str) -> String {
    const CHARS: usize = 200;
    let mut line = String::with_capacity(text.len().min(CHARS));
    for (n, c) in text.chars().enumerate() {
        if n == CHARS {
            line.push('…');
            break;
        }
        if c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') {
            let _ = write!(line, "{}", c.escape_default());
        } else {
            line.push(c);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_short_line_whatever_the_file_holds() {
        let hostile = "\x1b[2J\r\n".repeat(10_000);
        let error = Error::invalid(Path::new("a.gguf"), 7, &hostile, &hostile, "text").to_string();
        assert!(error.len() < 2_000);
        assert!(!error.contains('\n') && !error.contains('\x1b'));
        assert!(error.starts_with("a.gguf: byte 7: "));
    }
}
