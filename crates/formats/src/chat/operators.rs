//! What `+`, `in`, `[1:2]` and the like do, as in Python.

use super::budget::Budget;
use super::fault::{Fault, Outcome};
use super::format;
use super::python;
use super::tree::{Comparison, Math};
use super::value::{Builder, Value};
use crate::limits;

pub(super) fn math(budget: &Budget, op: Math, left: &Value, right: &Value) -> Outcome<Value> {
    match (op, left, right) {
        (Math::Concat, ..) => {
            let mut text = Builder::new(budget)?;
            python::write_str(&mut text, left)?;
            python::write_str(&mut text, right)?;
            Ok(text.finish())
        }
        (Math::Add, Value::Str(a), Value::Str(b)) => {
            let mut text = Builder::new(budget)?;
            text.push(a)?;
            text.push(b)?;
            Ok(text.finish())
        }
        (Math::Add, Value::List(a), Value::List(b)) => {
            Value::list(budget, gather(budget, &[a, b])?)
        }
        (Math::Add, Value::Tuple(a), Value::Tuple(b)) => {
            Value::tuple(budget, gather(budget, &[a, b])?)
        }
        (Math::Mul, Value::Str(text), times) | (Math::Mul, times, Value::Str(text)) => {
            let times = count(times)?;
            let mut out = Builder::new(budget)?;
            if !text.is_empty() {
                (0..times).try_for_each(|_| out.push(text))?;
            }
            Ok(out.finish())
        }
        (Math::Mul, Value::List(items), times) | (Math::Mul, times, Value::List(items)) => {
            Value::list(budget, repeat(budget, items, times)?)
        }
        (Math::Mul, Value::Tuple(items), times) | (Math::Mul, times, Value::Tuple(items)) => {
            Value::tuple(budget, repeat(budget, items, times)?)
        }
        (Math::Rem, Value::Str(text), Value::Tuple(args)) => format::printf(budget, text, args),
        (Math::Rem, Value::Str(text), arg) => {
            format::printf(budget, text, std::slice::from_ref(arg))
        }
        _ => number(op, left, right),
    }
}

/// The items of several lists, once it is known that there is room for them.
fn gather(budget: &Budget, lists: &[&[Value]]) -> Outcome<Vec<Value>> {
    let count: usize = lists.iter().map(|list| list.len()).sum();
    drop(budget.hold(count * size_of::<Value>())?);
    Ok(lists.concat())
}

fn repeat(budget: &Budget, items: &[Value], times: &Value) -> Outcome<Vec<Value>> {
    let bytes = items.len().saturating_mul(count(times)?).saturating_mul(size_of::<Value>());
    drop(budget.hold(bytes.min(limits::TEMPLATE_MEMORY + 1))?);
    let count = if items.is_empty() { 0 } else { count(times)? };
    Ok(std::iter::repeat_n(items, count).flatten().cloned().collect())
}

/// How often something is repeated: never, for a negative number.
fn count(times: &Value) -> Outcome<usize> {
    match times.as_int() {
        Some(n) => Ok(usize::try_from(n.max(0)).unwrap_or(usize::MAX)),
        None => Err(Fault::new(format!("a {} says no number of times", times.kind()))),
    }
}

fn number(op: Math, left: &Value, right: &Value) -> Outcome<Value> {
    let refuse = || {
        let (a, b) = (left.kind(), right.kind());
        Fault::new(format!("{a} and {b} do not go together here"))
    };
    let too_large = || Fault::new("found a number too large");
    let by_zero = || Fault::new("division by zero");
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        let whole = match op {
            Math::Add => a.checked_add(b),
            Math::Sub => a.checked_sub(b),
            Math::Mul => a.checked_mul(b),
            Math::FloorDiv | Math::Rem if b == 0 => return Err(by_zero()),
            Math::FloorDiv => a.checked_div_euclid(b).map(|q| {
                // Python rounds down, also where the divisor is negative.
                if b < 0 && a.rem_euclid(b) != 0 { q - 1 } else { q }
            }),
            Math::Rem => {
                a.checked_rem(b).map(|r| if r != 0 && (r < 0) != (b < 0) { r + b } else { r })
            }
            Math::Pow if b >= 0 => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
            _ => None,
        };
        match (op, whole) {
            (_, Some(n)) => return Ok(Value::Int(n)),
            (Math::Div | Math::Pow, None) => {}
            _ => return Err(too_large()),
        }
        if op == Math::Pow && b >= 0 {
            return Err(too_large());
        }
    }
    let (Some(a), Some(b)) = (left.as_float(), right.as_float()) else { return Err(refuse()) };
    Ok(Value::Float(match op {
        Math::Add => a + b,
        Math::Sub => a - b,
        Math::Mul => a * b,
        Math::Div | Math::FloorDiv | Math::Rem if b == 0.0 => return Err(by_zero()),
        Math::Div => a / b,
        Math::FloorDiv => (a / b).floor(),
        Math::Rem => a - b * (a / b).floor(),
        Math::Pow => a.powf(b),
        Math::Concat => return Err(refuse()),
    }))
}

pub(super) fn negative(value: &Value) -> Outcome<Value> {
    match value {
        Value::Float(x) => Ok(Value::Float(-x)),
        other => match other.as_int().map(i128::checked_neg) {
            Some(Some(n)) => Ok(Value::Int(n)),
            _ => Err(Fault::new(format!("a {} has no negative", value.kind()))),
        },
    }
}

pub(super) fn compare(
    budget: &Budget,
    op: Comparison,
    left: &Value,
    right: &Value,
) -> Outcome<bool> {
    use std::cmp::Ordering::{Equal, Greater, Less};
    match op {
        Comparison::Eq => left.equals(budget, right),
        Comparison::Ne => Ok(!left.equals(budget, right)?),
        Comparison::In => contains(budget, right, left),
        Comparison::NotIn => Ok(!contains(budget, right, left)?),
        Comparison::Lt => Ok(left.compare(budget, right)? == Less),
        Comparison::Lte => Ok(matches!(left.compare(budget, right)?, Less | Equal)),
        Comparison::Gt => Ok(left.compare(budget, right)? == Greater),
        Comparison::Gte => Ok(matches!(left.compare(budget, right)?, Greater | Equal)),
    }
}

pub(super) fn contains(budget: &Budget, within: &Value, what: &Value) -> Outcome<bool> {
    match (within, what) {
        (Value::Str(text), Value::Str(part)) => {
            budget.work(text.len() + part.len())?;
            Ok(text.contains(&***part))
        }
        (Value::Map(fields), key) => Ok(fields.get(budget, key)?.is_some()),
        (Value::List(items) | Value::Tuple(items), what) => {
            for item in items.iter() {
                if item.equals(budget, what)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        (Value::Undefined, _) => Ok(false),
        _ => {
            let (a, b) = (what.kind(), within.kind());
            Err(Fault::new(format!("cannot look for a {a} in a {b}")))
        }
    }
}

/// What `value[start:stop:step]` is.
pub(super) fn slice(budget: &Budget, value: &Value, bounds: [&Value; 3]) -> Outcome<Value> {
    match value {
        Value::Str(text) => {
            budget.work(text.len())?;
            if text.is_ascii() {
                let mut out = Builder::new(budget)?;
                for at in range(text.len(), bounds)? {
                    out.push(&text[at..=at])?;
                }
                return Ok(out.finish());
            }
            drop(budget.hold(text.len() * size_of::<char>())?);
            let chars: Vec<char> = text.chars().collect();
            let mut out = Builder::new(budget)?;
            range(chars.len(), bounds)?.try_for_each(|at| out.push_char(chars[at]))?;
            Ok(out.finish())
        }
        Value::List(items) | Value::Tuple(items) => {
            let places = range(items.len(), bounds)?;
            drop(budget.hold(items.len() * size_of::<Value>())?);
            let part: Vec<Value> = places.map(|at| items[at].clone()).collect();
            match value {
                Value::Tuple(_) => Value::tuple(budget, part),
                _ => Value::list(budget, part),
            }
        }
        Value::Undefined | Value::None => Value::list(budget, Vec::new()),
        other => Err(Fault::new(format!("a {} has no slices", other.kind()))),
    }
}

/// The places of a slice, by Python's rules for bounds that are left out, negative or too large.
fn range(length: usize, [start, stop, step]: [&Value; 3]) -> Outcome<impl Iterator<Item = usize>> {
    let bound = |value: &Value| match value {
        Value::None | Value::Undefined => Ok(None),
        other => match other.as_int() {
            Some(n) => Ok(Some(n)),
            None => Err(Fault::new(format!("a {} is no place in a list", other.kind()))),
        },
    };
    let length = length as i128;
    let step = bound(step)?.unwrap_or(1);
    if step == 0 {
        return Err(Fault::new("a slice has a step of 0"));
    }
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |bound: Option<i128>, missing: i128| match bound {
        None => missing,
        Some(n) if n < 0 => n.saturating_add(length).max(low),
        Some(n) => n.min(high),
    };
    let (start, stop) = if step > 0 {
        (place(bound(start)?, 0), place(bound(stop)?, length))
    } else {
        (place(bound(start)?, length - 1), place(bound(stop)?, -1))
    };
    let mut at = start;
    Ok(std::iter::from_fn(move || {
        let inside = if step > 0 { at < stop } else { at > stop };
        let place = inside.then_some(at as usize)?;
        at = at.saturating_add(step);
        Some(place)
    }))
}
