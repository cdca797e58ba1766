//! Texts with places for values: `"%05d" % n` and `"{:>8}".format(s)`.

use super::budget::Budget;
use super::fault::{Fault, Outcome};
use super::python;
use super::value::{Builder, Value};
use crate::limits;
use minijinja::formatting::{FormatStyle, format};

pub(super) fn printf(budget: &Budget, text: &str, args: &[Value]) -> Outcome<Value> {
    run(budget, FormatStyle::Printf, '%', text, args)
}

pub(super) fn str_format(budget: &Budget, text: &str, args: &[Value]) -> Outcome<Value> {
    run(budget, FormatStyle::StrFormat, '{', text, args)
}

/// Formats with minijinja, once no width can make the result large: neither one in `text`, behind a
/// `mark`, nor one among `args`.
fn run(
    budget: &Budget,
    style: FormatStyle,
    mark: char,
    text: &str,
    args: &[Value],
) -> Outcome<Value> {
    budget.work(text.len())?;
    let cap = limits::FORMAT_WIDTH;
    let too_wide =
        || Fault::new(format!("found a format wider than {cap}, allowed: at most {cap}"));
    let (mut places, mut widest, mut indirect) = (0usize, 0, false);
    for (at, _) in text.match_indices(mark) {
        let after = &text[at + mark.len_utf8()..];
        let ends = |c: char| if mark == '%' { !"0123456789.+-# *".contains(c) } else { c == '}' };
        let place = &after[..after.find(ends).unwrap_or(after.len())];
        widest = digits(place).max(widest);
        indirect |= place.contains(['*', mark]);
        places += 1;
    }
    if widest > cap {
        return Err(too_wide());
    }
    // A float may be 309 digits long.
    let mut each = if indirect { cap } else { widest.max(320) };
    let mut plain = Vec::new();
    for arg in args {
        plain.push(match arg {
            Value::None => minijinja::Value::from(()),
            Value::Bool(b) => (*b).into(),
            Value::Int(n) if indirect && n.unsigned_abs() > cap as u128 => return Err(too_wide()),
            Value::Int(n) => (*n).into(),
            Value::Float(x) => (*x).into(),
            other => {
                let mut text = Builder::new(budget)?;
                python::write_str(&mut text, other)?;
                each = each.max(text.as_str().len());
                text.as_str().into()
            }
        });
    }
    drop(budget.hold(text.len().saturating_add(places.saturating_mul(each)))?);
    let made = format(style, text, &plain).map_err(|error| Fault::new(error.to_string()))?;
    Value::text(budget, &made)
}

/// The largest number written in `text`.
fn digits(text: &str) -> usize {
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.map(|digits| digits.parse().unwrap_or(usize::MAX)).max().unwrap_or(0)
}
