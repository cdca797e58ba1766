//! The tests of templates: what may stand behind `is`.

use super::args::Args;
use super::fault::{Fault, Outcome};
use super::operators;
use super::run::Run;
use super::tree::Comparison;
use super::value::Value;

impl Run<'_> {
    /// Whether `value is name`.
    pub(super) fn test(&mut self, name: &str, value: &Value, args: Args) -> Outcome<bool> {
        self.budget.step()?;
        if let Some(op) = comparison(name) {
            let [other] = args.bind(name, ["other"])?;
            return operators::compare(self.budget, op, value, &other.unwrap_or(Value::Undefined));
        }
        match name {
            "startingwith" | "endingwith" | "divisibleby" | "sameas" | "filter" | "test" => {}
            _ => {
                let [] = args.bind(name, [])?;
                return plain(name, value);
            }
        }
        let [other] = args.bind(name, ["other"])?;
        let other = other.unwrap_or(Value::Undefined);
        let texts = value.as_str().zip(other.as_str());
        Ok(match name {
            "startingwith" => texts.is_some_and(|(a, b)| a.starts_with(b)),
            "endingwith" => texts.is_some_and(|(a, b)| a.ends_with(b)),
            "sameas" => value.kind() == other.kind() && value.equals(self.budget, &other)?,
            "filter" => super::filters::NAMES.contains(&other.as_str().unwrap_or_default()),
            "test" => NAMES.contains(&other.as_str().unwrap_or_default()),
            _ => match (value.as_int(), other.as_int()) {
                (Some(a), Some(b)) if b != 0 => a.checked_rem(b) == Some(0),
                _ => false,
            },
        })
    }
}

fn comparison(name: &str) -> Option<Comparison> {
    Some(match name {
        "eq" | "equalto" | "==" => Comparison::Eq,
        "ne" | "!=" => Comparison::Ne,
        "lt" | "lessthan" | "<" => Comparison::Lt,
        "le" | "<=" => Comparison::Lte,
        "gt" | "greaterthan" | ">" => Comparison::Gt,
        "ge" | ">=" => Comparison::Gte,
        "in" => Comparison::In,
        _ => return None,
    })
}

const NAMES: &[&str] = &[
    "eq",
    "equalto",
    "==",
    "ne",
    "!=",
    "lt",
    "lessthan",
    "<",
    "le",
    "<=",
    "gt",
    "greaterthan",
    ">",
    "ge",
    ">=",
    "in",
    "startingwith",
    "endingwith",
    "divisibleby",
    "sameas",
    "filter",
    "test",
    "undefined",
    "defined",
    "none",
    "boolean",
    "odd",
    "even",
    "number",
    "integer",
    "int",
    "float",
    "string",
    "sequence",
    "iterable",
    "mapping",
    "lower",
    "upper",
    "true",
    "false",
    "callable",
    "safe",
    "escaped",
];

fn plain(name: &str, value: &Value) -> Outcome<bool> {
    let text = value.as_str();
    Ok(match name {
        "undefined" => value.is_undefined(),
        "defined" => !value.is_undefined(),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "odd" => value.as_int().is_some_and(|n| n % 2 != 0),
        "even" => value.as_int().is_some_and(|n| n % 2 == 0),
        "number" => matches!(value, Value::Int(_) | Value::Float(_) | Value::Bool(_)),
        "integer" | "int" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "string" => text.is_some(),
        // Python can also tell how long a dict is and what its first item would be.
        "sequence" | "iterable" => matches!(
            value,
            Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Map(_) | Value::Undefined
        ),
        "mapping" => matches!(value, Value::Map(_)),
        "lower" => text.is_some_and(|text| cased(text, char::is_lowercase, char::is_uppercase)),
        "upper" => text.is_some_and(|text| cased(text, char::is_uppercase, char::is_lowercase)),
        "callable" => matches!(value, Value::Macro(_) | Value::Function(_) | Value::Method(_)),
        // Nothing is escaped here.
        "safe" | "escaped" => false,
        _ => return Err(Fault::new(format!("there is no test called {name}"))),
    })
}

/// Whether `text` has characters of one case and none of the other.
pub(super) fn cased(text: &str, of: fn(char) -> bool, not: fn(char) -> bool) -> bool {
    text.contains(of) && !text.contains(not)
}
