//! Counts the values of JSON before it is parsed, because a parsed tree can take forty times the
//! memory of its text.

use crate::config::Limits;

/// Why a body is refused before it is parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShapeError {
    /// It is not an object but this.
    NotAnObject(&'static str),
    /// It has more than this many nesting levels.
    TooDeep(u64),
    /// It has more than this many values.
    TooManyValues(u64),
}

impl std::fmt::Display for ShapeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotAnObject("not JSON") => {
                f.write_str("the body is not JSON: it must begin with {")
            }
            Self::NotAnObject(found) => {
                write!(f, "the body must be a JSON object; it is {found}")
            }
            Self::TooDeep(most) => {
                write!(f, "the JSON is nested too deeply; at most {most} levels are allowed")
            }
            Self::TooManyValues(most) => {
                write!(f, "the JSON has too many values; at most {most} are allowed")
            }
        }
    }
}

/// Checks a body. `numbers` says whether numbers count as values; token ids do not, because they
/// take no more memory than their text.
pub(crate) fn check_body(bytes: &[u8], limits: &Limits, numbers: bool) -> Result<(), ShapeError> {
    let start = bytes.iter().position(|b| !b.is_ascii_whitespace());
    let found = match start.map(|at| bytes[at]) {
        Some(b'{') => {
            let most = limits.json_values;
            return count(bytes, limits.json_depth, most, numbers).map(|_| ());
        }
        None => "empty",
        Some(b'[') => "a JSON list",
        Some(b'"') => "a JSON string",
        Some(b'0'..=b'9' | b'-') => "a number",
        Some(b't' | b'f') => "true or false",
        Some(b'n') => "null",
        Some(0xef) if bytes.starts_with(b"\xef\xbb\xbf") => "text with a byte order mark",
        Some(0xfe | 0xff | 0) => "not UTF-8",
        Some(_) => "not JSON",
    };
    Err(ShapeError::NotAnObject(found))
}

/// Counts strings (names too), lists and objects, and with `numbers` also numbers and literals, in
/// one pass. Invalid JSON gets some count; the parser refuses it later.
pub(crate) fn count(
    bytes: &[u8],
    depth_most: u64,
    most: u64,
    numbers: bool,
) -> Result<u64, ShapeError> {
    let (mut depth, mut values, mut in_scalar) = (0u64, 0u64, false);
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        at += 1;
        let scalar = matches!(byte, b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'-' | b'+' | b'.');
        let begins = match byte {
            b'{' | b'[' => {
                depth += 1;
                true
            }
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                false
            }
            b'"' => {
                while let Some(&inner) = bytes.get(at) {
                    at += if inner == b'\\' { 2 } else { 1 };
                    if inner == b'"' {
                        break;
                    }
                }
                true
            }
            _ => scalar && !in_scalar && numbers,
        };
        in_scalar = scalar;
        values += u64::from(begins);
        if depth > depth_most {
            return Err(ShapeError::TooDeep(depth_most));
        }
        if values > most {
            return Err(ShapeError::TooManyValues(most));
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted() {
        let all = |text: &str| count(text.as_bytes(), 128, 1000, true).unwrap();
        assert_eq!(all(r#"{"a": [1, -2.5e+3, true, null, "x\"]"]}"#), 8);
        let ids = |text: &str| count(text.as_bytes(), 128, 1000, false).unwrap();
        assert_eq!(ids(r#"{"prompt": [[1, 2], [3]]}"#), 5);
        assert_eq!(count(b"[1, 2, 3]", 128, 3, true), Err(ShapeError::TooManyValues(3)));
        assert_eq!(count(b"[[[]]]", 2, 100, true), Err(ShapeError::TooDeep(2)));
        for odd in [&b"\"\\"[..], b"\"", b"]]]]", b"", b"\\\"\\\"", b"{\"a"] {
            assert!(count(odd, 128, 1000, true).is_ok());
        }
    }

    #[test]
    fn a_body_must_be_an_object() {
        let limits = Limits::default();
        for (text, found) in [
            (&b""[..], "empty"),
            (b" [1]", "a JSON list"),
            (b"\"x\"", "a JSON string"),
            (b"-1", "a number"),
            (b"null", "null"),
            (b"\xef\xbb\xbf{}", "text with a byte order mark"),
            (b"\xff\xfe{\0}\0", "not UTF-8"),
            (b"x", "not JSON"),
        ] {
            let problem = check_body(text, &limits, true).unwrap_err();
            assert_eq!(problem, ShapeError::NotAnObject(found));
        }
        assert_eq!(check_body(b"\n {}", &limits, true), Ok(()));
    }
}
