//! The arguments of a call, by place and by name.

use super::fault::{Fault, Outcome};
use super::tree::Name;
use super::value::Value;

#[derive(Debug, Default)]
pub(super) struct Args {
    pub(super) plain: Vec<Value>,
    pub(super) named: Vec<(Name, Value)>,
}

impl Args {
    /// The arguments of `what` in the order of its parameters `names`.
    pub(super) fn bind<const N: usize>(
        self,
        what: &str,
        names: [&str; N],
    ) -> Outcome<[Option<Value>; N]> {
        let mut bound = [const { None }; N];
        if self.plain.len() > N {
            let found = self.plain.len();
            return Err(Fault::new(format!(
                "{what}: found {found} arguments, allowed: at most {N}"
            )));
        }
        for (slot, value) in bound.iter_mut().zip(self.plain) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|&known| known == &*name) {
                Some(at) if bound[at].is_none() => bound[at] = Some(value),
                _ => return Err(Fault::new(format!("{what}: found an argument {name} too many"))),
            }
        }
        Ok(bound)
    }
}

/// The text of an argument that must be one.
pub(super) fn text(what: &str, value: &Value) -> Outcome<String> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(Fault::new(format!("{what}: found a {}, allowed: a str", value.kind()))),
    }
}

/// The number of an argument that must be one.
pub(super) fn int(what: &str, value: &Value) -> Outcome<i128> {
    match value.as_int() {
        Some(n) => Ok(n),
        None => Err(Fault::new(format!("{what}: found a {}, allowed: an int", value.kind()))),
    }
}
