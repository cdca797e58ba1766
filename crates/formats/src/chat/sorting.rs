//! Filters that put values in order, or find the equal among them.

use super::args::{self, Args};
use super::fault::{Fault, Outcome};
use super::run::Run;
use super::value::Value;
use std::cmp::Ordering;

pub(super) fn filter(run: &mut Run, name: &str, value: &Value, args: Args) -> Outcome<Value> {
    match name {
        "dictsort" => dictsort(run, value, args),
        "sort" => {
            let names = ["reverse", "case_sensitive", "attribute"];
            let [reverse, sensitive, path] = args.bind(name, names)?;
            let items = run.items(value)?;
            let keyed = keyed(run, &items, path.as_ref(), is_true(sensitive))?;
            let sorted = sorted(run, keyed, is_true(reverse))?;
            Value::list(run.budget, sorted)
        }
        "min" | "max" => {
            let [sensitive, path] = args.bind(name, ["case_sensitive", "attribute"])?;
            let items = run.items(value)?;
            let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
            let mut best: Option<(Value, Value)> = None;
            for (key, item) in keyed(run, &items, path.as_ref(), is_true(sensitive))? {
                let better = match &best {
                    Some((known, _)) => key.compare(run.budget, known)? == wanted,
                    None => true,
                };
                if better {
                    best = Some((key, item));
                }
            }
            Ok(best.map_or(Value::Undefined, |(_, item)| item))
        }
        "unique" => {
            let [sensitive, path] = args.bind(name, ["case_sensitive", "attribute"])?;
            let items = run.items(value)?;
            let keyed = keyed(run, &items, path.as_ref(), is_true(sensitive))?;
            let mut kept: Vec<(Value, Value)> = Vec::new();
            'items: for (key, item) in keyed {
                for (known, _) in &kept {
                    if known.equals(run.budget, &key)? {
                        continue 'items;
                    }
                }
                kept.push((key, item));
            }
            Value::list(run.budget, kept.into_iter().map(|(_, item)| item).collect())
        }
        _ => groupby(run, value, args),
    }
}

fn is_true(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}

/// Items with what they are compared by: texts in small letters unless case matters.
fn keyed(
    run: &mut Run,
    items: &[Value],
    path: Option<&Value>,
    sensitive: bool,
) -> Outcome<Vec<(Value, Value)>> {
    let keys = run.keys(items, path)?;
    drop(run.budget.hold(2 * size_of_val(items))?);
    let mut keyed = Vec::new();
    for (key, item) in keys.into_iter().zip(items) {
        let key = match key.as_str() {
            Some(text) if !sensitive => Value::text(run.budget, &text.to_lowercase())?,
            _ => key,
        };
        keyed.push((key, item.clone()));
    }
    Ok(keyed)
}

/// The items of `keyed` in the order of their keys. Charges every comparison, and fails at the
/// first pair that cannot be compared.
fn sorted(run: &Run, mut keyed: Vec<(Value, Value)>, reverse: bool) -> Outcome<Vec<Value>> {
    let mut fault: Option<Fault> = None;
    keyed.sort_by(|a, b| {
        if fault.is_some() {
            return Ordering::Equal;
        }
        let (a, b) = if reverse { (&b.0, &a.0) } else { (&a.0, &b.0) };
        a.compare(run.budget, b).unwrap_or_else(|found| {
            fault = Some(found);
            Ordering::Equal
        })
    });
    match fault {
        Some(fault) => Err(fault),
        None => Ok(keyed.into_iter().map(|(_, item)| item).collect()),
    }
}

fn dictsort(run: &mut Run, value: &Value, args: Args) -> Outcome<Value> {
    let [sensitive, by, reverse] = args.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
    let by = match by {
        Some(by) => args::text("dictsort", &by)?,
        None => "key".to_owned(),
    };
    let place = match by.as_str() {
        "key" => 0,
        "value" => 1,
        _ => return Err(Fault::new("dictsort: by must be key or value")),
    };
    let pairs = super::filters::items(run.budget, value)?;
    let pairs = run.items(&pairs)?;
    let keyed = keyed(run, &pairs, Some(&Value::Int(place)), is_true(sensitive))?;
    let sorted = sorted(run, keyed, is_true(reverse))?;
    Value::list(run.budget, sorted)
}

/// Pairs of a key and the items that have it, in the order of keys.
fn groupby(run: &mut Run, value: &Value, args: Args) -> Outcome<Value> {
    let names = ["attribute", "default", "case_sensitive"];
    let [path, default, sensitive] = args.bind("groupby", names)?;
    let sensitive = is_true(sensitive);
    let items = run.items(value)?;
    let keys = run.keys(&items, path.as_ref())?;
    let mut keyed = Vec::new();
    for (key, item) in keys.into_iter().zip(items.iter()) {
        let key = match (key, &default) {
            (Value::Undefined, Some(default)) => default.clone(),
            (key, _) => key,
        };
        let folded = match key.as_str() {
            Some(text) if !sensitive => Value::text(run.budget, &text.to_lowercase())?,
            _ => key.clone(),
        };
        let row = Value::tuple(run.budget, vec![folded.clone(), key, item.clone()])?;
        keyed.push((folded, row));
    }
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for row in sorted(run, keyed, false)? {
        let Some([folded, key, item]) = row.as_items().map(|row| &row[..]) else { continue };
        match groups.last_mut() {
            Some((known, _, items)) if known.equals(run.budget, folded)? => {
                items.push(item.clone())
            }
            _ => groups.push((folded.clone(), key.clone(), vec![item.clone()])),
        }
    }
    let mut made = Vec::new();
    for (_, key, items) in groups {
        let items = Value::list(run.budget, items)?;
        made.push(Value::tuple(run.budget, vec![key, items])?);
    }
    Value::list(run.budget, made)
}
