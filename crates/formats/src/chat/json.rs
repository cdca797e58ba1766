//! `tojson` as Python's `json.dumps` spells it.

use super::python;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use std::fmt::Write;

/// The variable that holds the escape marker, which must survive `ensure_ascii`.
pub(super) const MARKER: &str = "__marker";

struct Style {
    indent: Option<String>,
    item: String,
    key: String,
    ensure_ascii: bool,
    sort_keys: bool,
    marker: Option<char>,
}

/// The filter: `indent`, `separators`, `ensure_ascii` and `sort_keys` as in Python, with the
/// defaults of `transformers`.
pub(super) fn tojson(
    state: &State,
    value: &Value,
    indent: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = match indent.filter(|indent| !indent.is_none()) {
        Some(text) if text.as_str().is_some() => Some(text.to_string()),
        Some(number) => Some(" ".repeat(number.as_usize().unwrap_or(0).min(16))),
        None => None,
    };
    let (item, key) = match options.get::<Option<Vec<String>>>("separators")?.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ if indent.is_some() => (",".into(), ": ".into()),
        _ => (", ".into(), ": ".into()),
    };
    let style = Style {
        indent,
        item,
        key,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        marker: state.lookup(MARKER).and_then(|marker| marker.as_str()?.chars().next()),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    write(&mut out, value, &style, 0)?;
    Ok(out)
}

fn write(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if depth > crate::limits::MESSAGE_DEPTH * 2 || out.len() > crate::limits::RENDERED_BYTES {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: too deep or too long"));
    }
    match value.kind() {
        ValueKind::Undefined => {
            let message = "Object of type Undefined is not JSON serializable";
            return Err(Error::new(ErrorKind::UndefinedError, message));
        }
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => python::number(out, value),
        ValueKind::String => string(out, value.as_str().unwrap_or_default(), style),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            list(out, style, depth, ('[', ']'), items.len(), |out, i| {
                write(out, &items[i], style, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort_by_key(|key| key.to_string());
            }
            list(out, style, depth, ('{', '}'), keys.len(), |out, i| {
                string(out, &keys[i].to_string(), style);
                out.push_str(&style.key);
                write(out, &value.get_item(&keys[i])?, style, depth + 1)
            })?;
        }
        other => {
            let message = format!("Object of type {other} is not JSON serializable");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    }
    Ok(())
}

fn list(
    out: &mut String,
    style: &Style,
    depth: usize,
    (open, close): (char, char),
    count: usize,
    mut each: impl FnMut(&mut String, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    };
    out.push(open);
    for i in 0..count {
        if i > 0 {
            out.push_str(&style.item);
        }
        line(out, depth + 1);
        each(out, i)?;
    }
    if count > 0 {
        line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn string(out: &mut String, text: &str, style: &Style) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c if style.ensure_ascii && !c.is_ascii() && style.marker != Some(c) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            // Python escapes DEL only when it escapes everything that is not ASCII; it is ASCII.
            c => out.push(c),
        }
    }
    out.push('"');
}
