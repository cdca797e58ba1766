//! Methods of Python's strings, dicts and lists.

use super::args::{self, Args};
use super::checks::cased;
use super::fault::{Fault, Outcome};
use super::run::Run;
use super::value::{Builder, Loop, Method, Value};
use super::{filters, format, texts};
use std::sync::{Arc, PoisonError};

/// The methods of a string that can be called.
const OF_STRINGS: &[&str] = &[
    "capitalize",
    "count",
    "endswith",
    "find",
    "format",
    "isalnum",
    "isalpha",
    "isascii",
    "isdigit",
    "islower",
    "isnumeric",
    "isspace",
    "isupper",
    "join",
    "lower",
    "lstrip",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "title",
    "upper",
];

/// What `value.name` is, if that names a method: in Python, methods of a dict hide keys of the same name. Those that
/// would change it are undefined in a sandbox.
pub(super) fn named(value: &Value, name: &str) -> Option<Value> {
    let (known, changing): (&[&str], &[&str]) = match value {
        Value::Str(_) => (OF_STRINGS, &[]),
        Value::Map(_) => (
            &["copy", "fromkeys", "get", "items", "keys", "values"],
            &["clear", "pop", "popitem", "setdefault", "update"],
        ),
        Value::List(_) | Value::Tuple(_) => (&["count", "index"], &[]),
        _ => return None,
    };
    if changing.contains(&name) {
        return Some(Value::Undefined);
    }
    let name = known.iter().find(|&&known| known == name)?;
    Some(Value::Method(Arc::new(Method { of: value.clone(), name })))
}

/// What `value.name(args)` is.
pub(super) fn call(run: &mut Run, value: &Value, name: &str, args: Args) -> Outcome<Value> {
    let known = match value {
        Value::Str(text) => string(run, value, text, name, args)?,
        Value::Map(_) => map(run, value, name, args)?,
        Value::List(_) | Value::Tuple(_) => list(run, value, name, args)?,
        Value::Loop(state) => loop_state(run, state, name, args)?,
        _ => None,
    };
    known.ok_or_else(|| Fault::new(format!("a {} has no method called {name}", value.kind())))
}

fn string(
    run: &mut Run,
    value: &Value,
    text: &str,
    name: &str,
    args: Args,
) -> Outcome<Option<Value>> {
    let budget = run.budget;
    budget.work(text.len())?;
    let each = |of: fn(char) -> bool| Value::Bool(!text.is_empty() && text.chars().all(of));
    Ok(Some(match name {
        "upper" | "lower" | "title" | "capitalize" => {
            return run.filter(name, value, args).map(Some);
        }
        "replace" => texts::replace(budget, text, args)?,
        "format" => {
            if !args.named.is_empty() {
                return Err(Fault::new("format: names of arguments are not supported"));
            }
            format::str_format(budget, text, &args.plain)?
        }
        "join" => {
            let [over] = args.bind(name, ["iterable"])?;
            let items = run.items(&over.unwrap_or(Value::None))?;
            texts::join(budget, text, &items)?
        }
        "split" | "rsplit" => texts::split(budget, text, name == "rsplit", args)?,
        "splitlines" => texts::lines(budget, text, args)?,
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = args.bind(name, ["chars"])?;
            let sides = (name != "rstrip", name != "lstrip");
            texts::strip(budget, text, chars.as_ref(), sides)?
        }
        "removeprefix" | "removesuffix" => {
            let [part] = args.bind(name, ["part"])?;
            let part = args::text(name, &part.unwrap_or(Value::None))?;
            let rest = match name {
                "removeprefix" => text.strip_prefix(&part),
                _ => text.strip_suffix(&part),
            };
            Value::text(budget, rest.unwrap_or(text))?
        }
        "startswith" | "endswith" => {
            let [part] = args.bind(name, ["part"])?;
            let part = part.unwrap_or(Value::None);
            let parts = part.as_items().map_or(std::slice::from_ref(&part), |items| items);
            let mut found = false;
            for part in parts {
                let part = args::text(name, part)?;
                budget.work(part.len())?;
                found |= if name == "startswith" {
                    text.starts_with(&part)
                } else {
                    text.ends_with(&part)
                };
            }
            Value::Bool(found)
        }
        "count" | "find" | "rfind" => {
            let [part] = args.bind(name, ["part"])?;
            let part = args::text(name, &part.unwrap_or(Value::None))?;
            let place = |at: Option<usize>| match at {
                Some(at) => text[..at].chars().count().into(),
                None => Value::Int(-1),
            };
            match name {
                "count" => text.matches(&part).count().into(),
                "find" => place(text.find(&part)),
                _ => place(text.rfind(&part)),
            }
        }
        "isspace" => each(char::is_whitespace),
        "isdigit" | "isnumeric" => each(char::is_numeric),
        "isalnum" => each(char::is_alphanumeric),
        "isalpha" => each(char::is_alphabetic),
        "isascii" => Value::Bool(text.is_ascii()),
        "islower" => Value::Bool(cased(text, char::is_lowercase, char::is_uppercase)),
        "isupper" => Value::Bool(cased(text, char::is_uppercase, char::is_lowercase)),
        _ => return Ok(None),
    }))
}

fn map(run: &mut Run, value: &Value, name: &str, args: Args) -> Outcome<Option<Value>> {
    let Value::Map(fields) = value else { return Ok(None) };
    Ok(Some(match name {
        "items" | "keys" | "values" => {
            let [] = args.bind(name, [])?;
            match name {
                "items" => filters::items(run.budget, value)?,
                _ => {
                    drop(run.budget.hold(fields.entries().len() * size_of::<Value>())?);
                    let part = |(key, value): &(Value, Value)| {
                        if name == "keys" { key.clone() } else { value.clone() }
                    };
                    Value::list(run.budget, fields.entries().iter().map(part).collect())?
                }
            }
        }
        "get" => {
            let [key, default] = args.bind(name, ["key", "default"])?;
            let found = fields.get(run.budget, &key.unwrap_or(Value::None))?.cloned();
            found.or(default).unwrap_or(Value::None)
        }
        _ => return Ok(None),
    }))
}

fn list(run: &mut Run, value: &Value, name: &str, args: Args) -> Outcome<Option<Value>> {
    let Some(items) = value.as_items() else { return Ok(None) };
    if !matches!(name, "count" | "index") {
        return Ok(None);
    }
    let [what] = args.bind(name, ["value"])?;
    let what = what.unwrap_or(Value::None);
    let mut count = 0usize;
    for (at, item) in items.iter().enumerate() {
        if item.equals(run.budget, &what)? {
            if name == "index" {
                return Ok(Some(at.into()));
            }
            count += 1;
        }
    }
    match name {
        "index" => Err(Fault::new("index: the value is not in the list")),
        _ => Ok(Some(count.into())),
    }
}

fn loop_state(run: &mut Run, state: &Loop, name: &str, args: Args) -> Outcome<Option<Value>> {
    Ok(Some(match name {
        "cycle" => match args.plain.len() {
            0 => return Err(Fault::new("cycle: found no values to choose from")),
            count => args.plain[state.index % count].clone(),
        },
        "changed" => {
            let now = Value::tuple(run.budget, args.plain)?;
            let mut last = state.changed.lock().unwrap_or_else(PoisonError::into_inner);
            let same = match last.as_ref() {
                Some(last) => now.equals(run.budget, last)?,
                None => false,
            };
            *last = Some(now);
            Value::Bool(!same)
        }
        _ => return Ok(None),
    }))
}

/// The text of `value`, as Python's `str` makes it.
pub(super) fn text_of(run: &Run, value: &Value) -> Outcome<Value> {
    if let Value::Str(_) = value {
        return Ok(value.clone());
    }
    let mut text = Builder::new(run.budget)?;
    super::python::write_str(&mut text, value)?;
    Ok(text.finish())
}
