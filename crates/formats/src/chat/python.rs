//! Values as Python prints them.

use super::fault::Outcome;
use super::value::{Builder, Value};
use std::fmt::Write;

/// Writes what `{{ value }}` prints: Python's `str`.
pub(super) fn write_str(out: &mut Builder, value: &Value) -> Outcome<()> {
    match value {
        Value::Undefined => Ok(()),
        Value::Str(text) => out.push(text),
        other => repr(out, other),
    }
}

/// Writes Python's `repr`. Values are never nested so deep that this would be.
fn repr(out: &mut Builder, value: &Value) -> Outcome<()> {
    match value {
        Value::None => out.push("None"),
        Value::Bool(true) => out.push("True"),
        Value::Bool(false) => out.push("False"),
        Value::Int(n) => out.push(&n.to_string()),
        Value::Float(x) => float(out, *x),
        Value::Str(text) => string(out, text),
        Value::List(items) => {
            out.push("[")?;
            list(out, items)?;
            out.push("]")
        }
        Value::Tuple(items) => {
            out.push("(")?;
            list(out, items)?;
            out.push(if items.len() == 1 { ",)" } else { ")" })
        }
        Value::Map(fields) => {
            out.push("{")?;
            for (i, (key, value)) in fields.entries().iter().enumerate() {
                out.push(if i > 0 { ", " } else { "" })?;
                repr(out, key)?;
                out.push(": ")?;
                repr(out, value)?;
            }
            out.push("}")
        }
        Value::Undefined => out.push("Undefined"),
        other => out.push(&format!("<{}>", other.kind())),
    }
}

fn list(out: &mut Builder, items: &[Value]) -> Outcome<()> {
    for (i, item) in items.iter().enumerate() {
        out.push(if i > 0 { ", " } else { "" })?;
        repr(out, item)?;
    }
    Ok(())
}

fn string(out: &mut Builder, text: &str) -> Outcome<()> {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push_char(quote)?;
    let special = |c: char| c == '\\' || c == quote || !is_printable(c);
    let mut rest = text;
    while let Some(at) = rest.find(special) {
        out.push(&rest[..at])?;
        let mut after = rest[at..].chars();
        match after.next() {
            Some('\n') => out.push("\\n")?,
            Some('\r') => out.push("\\r")?,
            Some('\t') => out.push("\\t")?,
            Some(c @ ('\\' | '\'' | '"')) => {
                out.push("\\")?;
                out.push_char(c)?;
            }
            Some(c) if c <= '\u{ff}' => out.push(&format!("\\x{:02x}", c as u32))?,
            Some(c) if c <= '\u{ffff}' => out.push(&format!("\\u{:04x}", c as u32))?,
            Some(c) => out.push(&format!("\\U{:08x}", c as u32))?,
            None => {}
        }
        rest = after.as_str();
    }
    out.push(rest)?;
    out.push_char(quote)
}

/// Whether Python prints a character as it is: not if it is a control, a separator other than the space, or
/// unassigned. `escape_debug` has the same rule for every character of a string but the first.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    let mut bytes = [b'a'; 5];
    let length = c.encode_utf8(&mut bytes[1..]).len();
    let text = str::from_utf8(&bytes[..=length]).unwrap_or_default();
    text.escape_debug().nth(1) == Some(c)
}

/// Writes a number that is not whole, or not meant to be.
pub(super) fn float(out: &mut Builder, x: f64) -> Outcome<()> {
    if !x.is_finite() {
        return out.push(if x.is_nan() {
            "nan"
        } else if x > 0.0 {
            "inf"
        } else {
            "-inf"
        });
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let mut text = String::new();
    if x == 0.0 || (-4..16).contains(&exponent) {
        let _ = write!(text, "{x:?}");
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        let _ = write!(text, "{digits}e{sign}{:02}", exponent.abs());
    }
    out.push(&text)
}
