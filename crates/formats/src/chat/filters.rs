//! The filters of templates.

use super::args::{self, Args};
use super::budget::Budget;
use super::fault::{Fault, Outcome};
use super::methods::text_of;
use super::run::{Run, attribute};
use super::tree::Math;
use super::value::{Builder, Value};
use super::{format, json, operators, sorting, texts};
use crate::limits;

/// What [`Run::filter`] knows.
pub(super) const NAMES: &[&str] = &[
    "abs",
    "attr",
    "batch",
    "bool",
    "capitalize",
    "chain",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "lines",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "split",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "unique",
    "upper",
    "zip",
];

impl Run<'_> {
    /// What `value | name(args)` is.
    pub(super) fn filter(&mut self, name: &str, value: &Value, args: Args) -> Outcome<Value> {
        let budget = self.budget;
        budget.step()?;
        match name {
            "default" | "d" => {
                let [other, falsy] = args.bind(name, ["default_value", "boolean"])?;
                let falsy = falsy.is_some_and(|falsy| falsy.is_true()) && !value.is_true();
                let other = other.unwrap_or_else(|| Value::from(""));
                Ok(if value.is_undefined() || falsy { other } else { value.clone() })
            }
            "tojson" => json::tojson(budget, self.marker, value, args),
            "length" | "count" => length(budget, value),
            "string" | "safe" => text_of(self, value),
            "bool" => Ok(Value::Bool(value.is_true())),
            "items" => items(budget, value),
            "attr" => {
                let [name] = args.bind(name, ["name"])?;
                self.item(value, &name.unwrap_or(Value::Undefined))
            }
            "abs" | "int" | "float" | "round" => number(name, value, args),
            "lower" | "upper" | "title" | "capitalize" | "trim" | "replace" | "indent"
            | "split" | "lines" | "format" | "escape" | "e" => {
                let text = text_of(self, value)?;
                on_text(budget, name, text.as_str().unwrap_or_default(), args)
            }
            "join" => {
                let [between, path] = args.bind(name, ["d", "attribute"])?;
                let between = text_of(self, &between.unwrap_or(Value::Undefined))?;
                let items = self.items(value)?;
                let items = self.keys(&items, path.as_ref())?;
                texts::join(budget, between.as_str().unwrap_or_default(), &items)
            }
            "first" | "last" | "reverse" => self.ends(name, value),
            "list" => {
                let items = self.items(value)?;
                Value::list(budget, items.to_vec())
            }
            "sort" | "min" | "max" | "unique" | "groupby" | "dictsort" => {
                sorting::filter(self, name, value, args)
            }
            "sum" => {
                let [path, start] = args.bind(name, ["attribute", "start"])?;
                let items = self.items(value)?;
                let mut sum = start.unwrap_or(Value::Int(0));
                for item in self.keys(&items, path.as_ref())? {
                    if !item.is_undefined() {
                        budget.step()?;
                        sum = operators::math(budget, Math::Add, &sum, &item)?;
                    }
                }
                Ok(sum)
            }
            "map" => self.map(value, args),
            "select" | "reject" | "selectattr" | "rejectattr" => self.select(name, value, args),
            "batch" | "slice" => {
                let [count, fill] = args.bind(name, ["count", "fill_with"])?;
                let count = args::int(name, &count.unwrap_or(Value::None))?;
                let items = self.items(value)?;
                let fill = fill.filter(|fill| !matches!(fill, Value::None | Value::Undefined));
                rows(budget, name, &items, count, fill.as_ref())
            }
            "chain" | "zip" => {
                let mut lists = vec![self.items(value)?];
                for other in &args.plain {
                    lists.push(self.items(other)?);
                }
                let mut all = Vec::new();
                if name == "chain" {
                    let count: usize = lists.iter().map(|list| list.len()).sum();
                    drop(budget.hold(count * size_of::<Value>())?);
                    lists.iter().for_each(|list| all.extend(list.iter().cloned()));
                } else {
                    let count = lists.iter().map(|list| list.len()).min().unwrap_or(0);
                    for at in 0..count {
                        let row = lists.iter().map(|list| list[at].clone()).collect();
                        all.push(Value::tuple(budget, row)?);
                    }
                }
                Value::list(budget, all)
            }
            _ => Err(Fault::new(format!("there is no filter called {name}"))),
        }
    }

    fn ends(&mut self, name: &str, value: &Value) -> Outcome<Value> {
        if let ("reverse", Some(text)) = (name, value.as_str()) {
            let mut out = Builder::new(self.budget)?;
            text.chars().rev().try_for_each(|c| out.push_char(c))?;
            return Ok(out.finish());
        }
        if let Some(text) = value.as_str() {
            let c = if name == "first" { text.chars().next() } else { text.chars().next_back() };
            return match c {
                Some(c) => Value::text(self.budget, c.encode_utf8(&mut [0; 4])),
                None => Ok(Value::Undefined),
            };
        }
        let items = self.items(value)?;
        let found = match name {
            "first" => items.first(),
            "last" => items.last(),
            _ => {
                drop(self.budget.hold(items.len() * size_of::<Value>())?);
                return Value::list(self.budget, items.iter().rev().cloned().collect());
            }
        };
        Ok(found.cloned().unwrap_or(Value::Undefined))
    }

    /// `value.a.b` for the path `a.b`; numbers are places in lists.
    pub(super) fn path(&mut self, value: &Value, path: &Value) -> Outcome<Value> {
        let Some(path) = path.as_str() else { return self.item(value, path) };
        let mut found = value.clone();
        for name in path.split('.') {
            self.budget.step()?;
            found = match name.parse::<i128>() {
                Ok(at) if found.as_items().is_some() => self.item(&found, &Value::Int(at))?,
                _ => attribute(&found, name),
            };
        }
        Ok(found)
    }

    /// What `path` leads to in every item; the items themselves without one.
    pub(super) fn keys(&mut self, items: &[Value], path: Option<&Value>) -> Outcome<Vec<Value>> {
        match path {
            None | Some(Value::None | Value::Undefined) => {
                drop(self.budget.hold(size_of_val(items))?);
                Ok(items.to_vec())
            }
            Some(path) => items.iter().map(|item| self.path(item, path)).collect(),
        }
    }

    fn map(&mut self, value: &Value, mut args: Args) -> Outcome<Value> {
        let items = self.items(value)?;
        let mut made = Vec::new();
        let named = args.named.iter().position(|(name, _)| &**name == "attribute");
        if let Some(at) = named {
            let (_, path) = args.named.swap_remove(at);
            let default = args.named.into_iter().find(|(name, _)| &**name == "default");
            for item in items.iter() {
                let found = self.path(item, &path)?;
                made.push(match (&found, &default) {
                    (Value::Undefined, Some((_, default))) => default.clone(),
                    _ => found,
                });
            }
            return Value::list(self.budget, made);
        }
        if args.plain.is_empty() {
            return Err(Fault::new("map: found no filter to apply"));
        }
        let name = args::text("map", &args.plain.remove(0))?;
        for item in items.iter() {
            let (plain, named) = (args.plain.clone(), args.named.clone());
            made.push(self.filter(&name, item, Args { plain, named })?);
        }
        Value::list(self.budget, made)
    }

    fn select(&mut self, name: &str, value: &Value, args: Args) -> Outcome<Value> {
        let items = self.items(value)?;
        let keeps = name.starts_with("select");
        let mut plain = args.plain.into_iter();
        let path = if name.ends_with("attr") { plain.next() } else { None };
        let test = plain.next().map(|test| args::text(name, &test)).transpose()?;
        let rest: Vec<Value> = plain.collect();
        let mut kept = Vec::new();
        for item in items.iter() {
            self.budget.step()?;
            let tested = match &path {
                Some(path) => self.path(item, path)?,
                None => item.clone(),
            };
            let holds = match &test {
                Some(test) => {
                    let args = Args { plain: rest.clone(), named: Vec::new() };
                    self.test(test, &tested, args)?
                }
                None => tested.is_true(),
            };
            if holds == keeps {
                kept.push(item.clone());
            }
        }
        Value::list(self.budget, kept)
    }
}

/// Pairs of key and value.
pub(super) fn items(budget: &Budget, value: &Value) -> Outcome<Value> {
    let pairs = match value {
        Value::Map(fields) => {
            let pair = |(key, value): &(Value, Value)| {
                Value::tuple(budget, vec![key.clone(), value.clone()])
            };
            fields.entries().iter().map(pair).collect::<Outcome<_>>()?
        }
        Value::Undefined => Vec::new(),
        other => return Err(Fault::new(format!("a {} has no items", other.kind()))),
    };
    Value::list(budget, pairs)
}

fn length(budget: &Budget, value: &Value) -> Outcome<Value> {
    Ok(match value {
        Value::Str(text) => {
            budget.work(text.len())?;
            text.chars().count()
        }
        Value::List(items) | Value::Tuple(items) => items.len(),
        Value::Map(fields) => fields.entries().len(),
        Value::Undefined => 0,
        other => return Err(Fault::new(format!("a {} has no length", other.kind()))),
    }
    .into())
}

fn on_text(budget: &Budget, name: &str, text: &str, args: Args) -> Outcome<Value> {
    budget.work(text.len())?;
    match name {
        "replace" => return texts::replace(budget, text, args),
        "indent" => return texts::indent(budget, text, args),
        "split" => return texts::split(budget, text, false, args),
        "lines" => return texts::lines(budget, text, args),
        "format" => return format::printf(budget, text, &args.plain),
        "trim" => {
            let [chars] = args.bind(name, ["chars"])?;
            return texts::strip(budget, text, chars.as_ref(), (true, true));
        }
        _ => {}
    }
    let [] = args.bind(name, [])?;
    match name {
        // Whole texts, not characters: a sigma at the end of a word is another one.
        "lower" => Value::text(budget, &text.to_lowercase()),
        "upper" => Value::text(budget, &text.to_uppercase()),
        "capitalize" | "title" => {
            let mut inside = false;
            let mut out = Builder::new(budget)?;
            for c in text.chars() {
                if inside {
                    c.to_lowercase().try_for_each(|c| out.push_char(c))?;
                } else {
                    c.to_uppercase().try_for_each(|c| out.push_char(c))?;
                }
                inside = name == "capitalize" || !(c.is_whitespace() || "-([{<".contains(c));
            }
            Ok(out.finish())
        }
        _ => {
            let mut out = Builder::new(budget)?;
            for c in text.chars() {
                match c {
                    '&' => out.push("&amp;")?,
                    '<' => out.push("&lt;")?,
                    '>' => out.push("&gt;")?,
                    '"' => out.push("&#34;")?,
                    '\'' => out.push("&#39;")?,
                    c => out.push_char(c)?,
                }
            }
            Ok(out.finish())
        }
    }
}

fn number(name: &str, value: &Value, args: Args) -> Outcome<Value> {
    let refuse = || Fault::new(format!("{name}: found a {}, allowed: a number", value.kind()));
    match name {
        "abs" => match (value, value.as_int().map(i128::checked_abs)) {
            (Value::Float(x), _) => Ok(Value::Float(x.abs())),
            (_, Some(Some(n))) => Ok(Value::Int(n)),
            _ => Err(refuse()),
        },
        "int" => {
            let [default, base] = args.bind(name, ["default", "base"])?;
            let base = base.map_or(Ok(10), |base| args::int(name, &base))?;
            let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base));
            let base = base.ok_or_else(|| Fault::new("int: found a base not from 2 to 36"))?;
            let found = match value {
                Value::Float(x) if x.is_finite() => Some(*x as i128),
                Value::Str(text) => whole(text.trim(), base),
                other => other.as_int(),
            };
            Ok(found.map_or_else(|| default.unwrap_or(Value::Int(0)), Value::Int))
        }
        "float" => {
            let [default] = args.bind(name, ["default"])?;
            let found = match value {
                Value::Str(text) => text.trim().parse().ok(),
                other => other.as_float(),
            };
            Ok(found.map_or_else(|| default.unwrap_or(Value::Float(0.0)), Value::Float))
        }
        _ => {
            let [precision, method] = args.bind(name, ["precision", "method"])?;
            let precision = precision.map_or(Ok(0), |n| args::int(name, &n))?;
            let precision = precision.clamp(-300, 300) as i32;
            let x = value.as_float().ok_or_else(refuse)?;
            let scale = 10f64.powi(precision);
            let rounded = match method.as_ref().and_then(Value::as_str).unwrap_or("common") {
                "common" if precision >= 0 => {
                    format!("{x:.*}", precision as usize).parse().unwrap_or(x)
                }
                "common" => (x * scale).round_ties_even() / scale,
                "ceil" => (x * scale).ceil() / scale,
                "floor" => (x * scale).floor() / scale,
                _ => return Err(Fault::new("round: method must be common, ceil or floor")),
            };
            Ok(match value {
                Value::Float(_) => Value::Float(rounded),
                _ if precision >= 0 => value.clone(),
                _ => Value::Int(rounded as i128),
            })
        }
    }
}

/// A whole number as Python reads it, or the whole part of another.
fn whole(text: &str, base: u32) -> Option<i128> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let digits = digits.strip_prefix(prefix).unwrap_or(digits);
    if digits.starts_with(['+', '-']) {
        return None;
    }
    match i128::from_str_radix(digits, base) {
        Ok(n) => n.checked_mul(sign),
        Err(_) => text.parse::<f64>().ok().filter(|x| x.is_finite()).map(|x| x as i128),
    }
}

/// Items in rows of `count` (batch), or in `count` rows (slice).
fn rows(
    budget: &Budget,
    name: &str,
    items: &[Value],
    count: i128,
    fill: Option<&Value>,
) -> Outcome<Value> {
    let cap = limits::TEMPLATE_RANGE;
    let Some(count) = usize::try_from(count).ok().filter(|n| (1..=cap).contains(n)) else {
        return Err(Fault::new(format!("{name}: found {count} rows, allowed: 1 to {cap}")));
    };
    let mut rows = Vec::new();
    if name == "batch" {
        for row in items.chunks(count) {
            let mut row = row.to_vec();
            if let Some(fill) = fill {
                row.resize(count, fill.clone());
            }
            rows.push(Value::list(budget, row)?);
        }
        return Value::list(budget, rows);
    }
    let (each, longer) = (items.len() / count, items.len() % count);
    let mut rest = items;
    for at in 0..count {
        let (row, after) = rest.split_at(each + usize::from(at < longer));
        let mut row = row.to_vec();
        if at >= longer {
            row.extend(fill.cloned());
        }
        rows.push(Value::list(budget, row)?);
        rest = after;
    }
    Value::list(budget, rows)
}
