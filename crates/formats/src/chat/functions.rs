//! Functions that templates may call.

use super::args::{self, Args};
use super::budget::Budget;
use super::fault::{Fault, Outcome};
use super::run::Run;
use super::value::{Builder, Namespace, Value};
use super::{python, time};
use crate::limits;
use std::sync::Arc;

/// What [`Run::function`] knows.
pub(super) const NAMES: [&str; 5] =
    ["range", "dict", "namespace", "raise_exception", "strftime_now"];

impl Run<'_> {
    /// What `name(args)` is.
    pub(super) fn function(&mut self, name: &str, args: Args) -> Outcome<Value> {
        match name {
            "range" => {
                let [start, stop, step] = args.bind(name, ["start", "stop", "step"])?;
                range(self.budget, start, stop, step)
            }
            "dict" => {
                let mut entries = match args.plain.first() {
                    Some(Value::Map(fields)) => {
                        drop(self.budget.hold(fields.entries().len() * size_of::<Value>() * 2)?);
                        fields.entries().to_vec()
                    }
                    _ => Vec::new(),
                };
                for (name, value) in args.named {
                    entries.push((Value::text(self.budget, &name)?, value));
                }
                Value::map(self.budget, entries)
            }
            "namespace" => {
                let namespace = Namespace::new(self.budget)?;
                if let Some(Value::Map(fields)) = args.plain.first() {
                    for (key, value) in fields.entries() {
                        if let Some(key) = key.as_str() {
                            namespace.set(self.budget, key.into(), value.clone())?;
                        }
                    }
                }
                for (name, value) in args.named {
                    namespace.set(self.budget, name, value)?;
                }
                Ok(Value::Namespace(Arc::new(namespace)))
            }
            "raise_exception" => {
                let mut words = Builder::new(self.budget)?;
                args.plain.iter().try_for_each(|value| python::write_str(&mut words, value))?;
                Err(Fault::raised(words.as_str()))
            }
            _ => {
                let [format] = args.bind(name, ["format"])?;
                let format = format.as_ref().and_then(Value::as_str).unwrap_or("%Y-%m-%d");
                self.budget.work(format.len())?;
                Value::text(self.budget, &time::strftime(format, (self.clock)())?)
            }
        }
    }
}

fn range(
    budget: &Budget,
    start: Option<Value>,
    stop: Option<Value>,
    step: Option<Value>,
) -> Outcome<Value> {
    let int = |value: Option<Value>, missing: i128| match value {
        None => Ok(missing),
        Some(value) => args::int("range", &value),
    };
    let (start, stop) = match stop {
        Some(stop) => (int(start, 0)?, int(Some(stop), 0)?),
        None => (0, int(start, 0)?),
    };
    let step = int(step, 1)?;
    if step == 0 {
        return Err(Fault::new("range has a step of 0"));
    }
    let mut items = Vec::new();
    let mut at = start;
    while if step > 0 { at < stop } else { at > stop } {
        if items.len() == limits::TEMPLATE_RANGE {
            let cap = limits::TEMPLATE_RANGE;
            return Err(Fault::new(format!(
                "found a range of more than {cap}, allowed: at most {cap}"
            )));
        }
        items.push(Value::Int(at));
        at = at.saturating_add(step);
    }
    Value::list(budget, items)
}
