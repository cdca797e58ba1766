//! How large a regular expression or a Lark grammar is.

use crate::bounds::{Limits, TooLarge, at_most};

/// Refuses a regular expression beyond the limits.
pub(crate) fn check(text: &str, limits: &Limits) -> Result<(), TooLarge> {
    at_most("bytes of regular expressions", text.len() as u64, limits.regex_bytes)?;
    nesting(text, limits)
}

/// Brackets open at once, whatever they mean: an upper bound of what nests.
pub(crate) fn nesting(text: &str, limits: &Limits) -> Result<(), TooLarge> {
    let (mut depth, mut most) = (0u64, 0u64);
    let mut escaped = false;
    for byte in text.bytes() {
        if std::mem::take(&mut escaped) {
            continue;
        }
        match byte {
            b'\\' => escaped = true,
            b'(' | b'[' | b'{' => {
                depth += 1;
                most = most.max(depth);
            }
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    at_most("groups nested in each other", most, limits.groups)
}
