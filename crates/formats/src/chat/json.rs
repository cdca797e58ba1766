//! `tojson` as Python's `json.dumps` spells it.

use super::args::Args;
use super::budget::Budget;
use super::fault::{Fault, Outcome};
use super::python;
use super::value::{Builder, Value};

struct Style {
    indent: Option<String>,
    item: String,
    key: String,
    ensure_ascii: bool,
    sort_keys: bool,
    /// What marks control tokens, and must survive `ensure_ascii`.
    marker: Option<char>,
}

/// The filter: `indent`, `separators`, `ensure_ascii` and `sort_keys` as in Python, with the
/// defaults of `transformers`.
pub(super) fn tojson(
    budget: &Budget,
    marker: Option<char>,
    value: &Value,
    args: Args,
) -> Outcome<Value> {
    let [indent, ensure_ascii, separators, sort_keys] =
        args.bind("tojson", ["indent", "ensure_ascii", "separators", "sort_keys"])?;
    let indent = match indent {
        None | Some(Value::None | Value::Undefined) => None,
        Some(Value::Str(text)) => Some(text.to_string()),
        Some(number) => Some(" ".repeat(number.as_int().map_or(0, |n| n.clamp(0, 16) as usize))),
    };
    let separators = separators.as_ref().and_then(Value::as_items).map(|items| &items[..]);
    let (item, key) = match separators {
        Some([Value::Str(item), Value::Str(key)]) => (item.to_string(), key.to_string()),
        _ if indent.is_some() => (",".into(), ": ".into()),
        _ => (", ".into(), ": ".into()),
    };
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let style = Style {
        indent,
        item,
        key,
        ensure_ascii: is_true(ensure_ascii),
        sort_keys: is_true(sort_keys),
        marker,
    };
    let mut out = Builder::new(budget)?;
    write(&mut out, value, &style, 0)?;
    Ok(out.finish())
}

fn write(out: &mut Builder, value: &Value, style: &Style, depth: usize) -> Outcome<()> {
    match value {
        Value::None => out.push("null"),
        Value::Bool(true) => out.push("true"),
        Value::Bool(false) => out.push("false"),
        Value::Int(n) => out.push(&n.to_string()),
        Value::Float(x) if x.is_nan() => out.push("NaN"),
        Value::Float(x) if x.is_infinite() => {
            out.push(if *x > 0.0 { "Infinity" } else { "-Infinity" })
        }
        Value::Float(x) => python::float(out, *x),
        Value::Str(text) => string(out, text, style),
        Value::List(items) | Value::Tuple(items) => {
            list(out, style, depth, ["[", "]"], items.len(), |out, i| {
                write(out, &items[i], style, depth + 1)
            })
        }
        Value::Map(fields) => {
            let mut entries: Vec<(String, &Value)> = Vec::new();
            for (key, value) in fields.entries() {
                let spelled = match key {
                    Value::Str(text) => text.to_string(),
                    Value::None => "null".to_owned(),
                    Value::Bool(b) => b.to_string(),
                    Value::Int(n) => n.to_string(),
                    Value::Float(x) => format!("{x:?}"),
                    other => return Err(unknown(other)),
                };
                entries.push((spelled, value));
            }
            if style.sort_keys {
                entries.sort_by(|a, b| a.0.cmp(&b.0));
            }
            list(out, style, depth, ["{", "}"], entries.len(), |out, i| {
                string(out, &entries[i].0, style)?;
                out.push(&style.key)?;
                write(out, entries[i].1, style, depth + 1)
            })
        }
        other => Err(unknown(other)),
    }
}

fn unknown(value: &Value) -> Fault {
    Fault::new(format!("Object of type {} is not JSON serializable", value.kind()))
}

fn list(
    out: &mut Builder,
    style: &Style,
    depth: usize,
    [open, close]: [&str; 2],
    count: usize,
    mut each: impl FnMut(&mut Builder, usize) -> Outcome<()>,
) -> Outcome<()> {
    let line = |out: &mut Builder, depth: usize| {
        let Some(indent) = &style.indent else { return Ok(()) };
        out.push("\n")?;
        (0..depth).try_for_each(|_| out.push(indent))
    };
    out.push(open)?;
    for i in 0..count {
        if i > 0 {
            out.push(&style.item)?;
        }
        line(out, depth + 1)?;
        each(out, i)?;
    }
    if count > 0 {
        line(out, depth)?;
    }
    out.push(close)
}

fn string(out: &mut Builder, text: &str, style: &Style) -> Outcome<()> {
    // Python escapes DEL only when it escapes everything that is not ASCII; it is ASCII.
    let foreign = |c: char| style.ensure_ascii && !c.is_ascii() && style.marker != Some(c);
    let special = |c: char| matches!(c, '"' | '\\') || (c as u32) < 0x20 || foreign(c);
    out.push("\"")?;
    let mut rest = text;
    while let Some(at) = rest.find(special) {
        out.push(&rest[..at])?;
        let mut after = rest[at..].chars();
        match after.next() {
            Some('"') => out.push("\\\"")?,
            Some('\\') => out.push("\\\\")?,
            Some('\n') => out.push("\\n")?,
            Some('\r') => out.push("\\r")?,
            Some('\t') => out.push("\\t")?,
            Some('\u{8}') => out.push("\\b")?,
            Some('\u{c}') => out.push("\\f")?,
            Some(c) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push(&format!("\\u{unit:04x}"))?;
                }
            }
            None => {}
        }
        rest = after.as_str();
    }
    out.push(rest)?;
    out.push("\"")
}
