//! Splits Rust (or CUDA C++) source into code and comments, line by line, so that a rule about code
//! is not fooled by a string and a rule about comments is not fooled by code.

/// One line of a file.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Line {
    /// The line with comments dropped and the insides of literals blanked.
    pub(super) code: String,
    /// The text of comments on the line.
    pub(super) comment: String,
}

#[derive(Clone, Copy)]
enum State {
    Code,
    LineComment,
    /// How deep: Rust's block comments nest.
    BlockComment(usize),
    /// Inside quotes.
    Text,
    /// Inside `r#"…"#`, with this many hashes.
    RawText(usize),
}

/// Splits a whole file. Wrong source gives some split, never a panic.
pub(super) fn lines(source: &str) -> Vec<Line> {
    let chars: Vec<char> = source.chars().collect();
    let mut lines = vec![Line::default()];
    let mut state = State::Code;
    let mut i = 0;
    while i < chars.len() {
        let c = chars[i];
        if c == '\n' {
            lines.push(Line::default());
            if matches!(state, State::LineComment) {
                state = State::Code;
            }
            i += 1;
            continue;
        }
        let line = lines.last_mut().expect("starts with one line");
        let next = chars.get(i + 1).copied();
        match state {
            State::Code => match (c, next) {
                ('/', Some('/')) => {
                    state = State::LineComment;
                    i += 1;
                }
                ('/', Some('*')) => {
                    state = State::BlockComment(1);
                    i += 1;
                }
                ('r', Some('"' | '#')) if !in_word(&chars, i) => {
                    let hashes = chars[i + 1..].iter().take_while(|c| **c == '#').count();
                    if chars.get(i + 1 + hashes) == Some(&'"') {
                        state = State::RawText(hashes);
                        i += hashes + 1;
                    }
                    line.code.push('r');
                }
                ('"', _) => {
                    state = State::Text;
                    line.code.push('"');
                }
                ('\'', _) => {
                    line.code.push('\'');
                    i += char_literal(&chars, i);
                }
                _ => line.code.push(c),
            },
            State::LineComment => line.comment.push(c),
            State::BlockComment(depth) => match (c, next) {
                ('*', Some('/')) => {
                    state = if depth > 1 { State::BlockComment(depth - 1) } else { State::Code };
                    i += 1;
                }
                ('/', Some('*')) => {
                    state = State::BlockComment(depth + 1);
                    i += 1;
                }
                _ => line.comment.push(c),
            },
            State::Text => match c {
                // An escaped end of line continues the text; the newline itself must be seen above.
                '\\' if next != Some('\n') => i += 1,
                '"' => {
                    state = State::Code;
                    line.code.push('"');
                }
                _ => {}
            },
            State::RawText(hashes) => {
                let close = c == '"' && chars[i + 1..].iter().take(hashes).all(|c| *c == '#');
                if close && chars.len() > i + hashes {
                    state = State::Code;
                    i += hashes;
                }
            }
        }
        i += 1;
    }
    lines
}

/// Whether position `i` continues an identifier (`for"` is not a raw string; `br"` is one).
fn in_word(chars: &[char], i: usize) -> bool {
    let before = |back: usize| i.checked_sub(back).map(|at| chars[at]);
    let word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    match before(1) {
        Some('b' | 'c') => word(before(2)),
        other => word(other),
    }
}

/// How many characters after the opening quote belong to a character literal; 0 for a lifetime.
fn char_literal(chars: &[char], i: usize) -> usize {
    match (chars.get(i + 1), chars.get(i + 2)) {
        (Some('\\'), _) => {
            let tail = chars[(i + 3).min(chars.len())..].iter().take(12);
            tail.take_while(|c| **c != '\'' && **c != '\n').count() + 3
        }
        (Some(_), Some('\'')) => 2,
        _ => 0,
    }
}

/// Whether `word` stands in `code` on its own, not as a part of a longer identifier.
pub(super) fn has_word(code: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).any(|(at, _)| {
        !code[..at].chars().next_back().is_some_and(part)
            && !code[at + word.len()..].chars().next().is_some_and(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(source: &str) -> String {
        lines(source).into_iter().map(|line| line.code).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn literals_and_comments_are_not_code() {
        assert_eq!(code("let a = \"un//safe\"; // unsafe"), "let a = \"\"; ");
        assert_eq!(code("f(r#\"a \" unsafe\"#, 1)"), "f(r, 1)");
        assert_eq!(code("f(br\"\\\", 1)"), "f(br, 1)");
        assert_eq!(code("a /* x /* y */ unsafe */ b"), "a  b");
        assert_eq!(
            code("match c { '\"' => 1, '\\'' => 2, '\\u{1F600}' => 3 }").matches('=').count(),
            3
        );
        assert_eq!(
            code("fn f<'a>(x: &'a str) { unsafe {} }"),
            "fn f<'a>(x: &'a str) { unsafe {} }"
        );
        assert_eq!(
            code("let s = \"one \\\n unsafe two\";\nlet t = 1;"),
            "let s = \"\n\";\nlet t = 1;"
        );
    }

    #[test]
    fn comments_keep_their_line() {
        let split = lines("// SAFETY: a\nunsafe { x() } // b");
        assert_eq!(split[0].comment, " SAFETY: a");
        assert_eq!(split[1].code, "unsafe { x() } ");
        assert_eq!(split[1].comment, " b");
    }

    #[test]
    fn broken_source_does_not_panic() {
        for source in ["r#", "r###\"", "'", "'\\", "\"\\", "/*", "b'", "r\"", "'\\u{"] {
            lines(source);
        }
    }

    #[test]
    fn words_are_whole() {
        assert!(has_word("unsafe { }", "unsafe"));
        assert!(!has_word("unsafe_code = 1", "unsafe"));
        assert!(!has_word("an_unsafe", "unsafe"));
    }
}
