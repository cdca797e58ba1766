//! Size checks for regular expressions and Lark grammars.

use crate::bounds::{Limits, TooLarge, at_most};

/// Refuses a regular expression that exceeds the limits.
pub(crate) fn check(text: &str, limits: &Limits) -> Result<(), TooLarge> {
    at_most("bytes of regular expressions", text.len() as u64, limits.regex_bytes)?;
    nesting(text, limits)
}

/// Counts open brackets of any kind, which is an upper bound of the nesting.
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
    at_most("levels of nested groups", most, limits.groups)
}
