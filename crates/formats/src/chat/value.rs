//! The values of templates. All of them but namespaces are immutable, none is nested deeper than
//! [`limits::VALUE_DEPTH`], and each holds the memory it takes from the budget of its rendering.

use super::budget::{Budget, Held};
use super::fault::{Fault, Outcome};
use super::tree::Macro;
use crate::limits;
use ahash::AHashMap;
use std::cmp::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Clone, Debug)]
pub(super) enum Value {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<Text>),
    List(Arc<Items>),
    Tuple(Arc<Items>),
    Map(Arc<Fields>),
    Namespace(Arc<Namespace>),
    Macro(Arc<Closure>),
    Loop(Arc<Loop>),
    /// A function of ours, by its name.
    Function(&'static str),
    /// A method that is named and not called.
    Method(Arc<Method>),
}

#[derive(Debug)]
pub(super) struct Text {
    text: Box<str>,
    _held: Option<Held>,
}

#[derive(Debug)]
pub(super) struct Items {
    items: Vec<Value>,
    depth: usize,
    _held: Option<Held>,
}

/// A map in the order of its keys' first insertion.
#[derive(Debug)]
pub(super) struct Fields {
    entries: Vec<(Value, Value)>,
    /// Where each key is; only for maps that are not small.
    places: Option<AHashMap<Key, usize>>,
    depth: usize,
    _held: Option<Held>,
}

/// A key by which a map is looked up: numbers that are equal are the same key, as in Python.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    None,
    Number(i128),
    Float(u64),
    Str(Box<str>),
}

/// Maps with fewer keys than this are searched from the front.
const SMALL: usize = 16;

/// A macro with the variables around its definition.
#[derive(Debug)]
pub(super) struct Closure {
    pub(super) declared: Arc<Macro>,
    pub(super) around: Vec<(Arc<str>, Value)>,
}

/// A method with the value it is of.
#[derive(Debug)]
pub(super) struct Method {
    pub(super) of: Value,
    pub(super) name: &'static str,
}

/// Where a loop is.
#[derive(Debug)]
pub(super) struct Loop {
    pub(super) index: usize,
    pub(super) items: Arc<Items>,
    pub(super) depth: usize,
    /// Which recursive loop this is, as a number of the template; none when it is not recursive.
    pub(super) recursive: Option<usize>,
    /// What `changed` was called with last.
    pub(super) changed: Arc<Mutex<Option<Value>>>,
}

impl Loop {
    /// The same loop at another item.
    pub(super) fn at(&self, index: usize) -> Self {
        let (items, changed) = (Arc::clone(&self.items), Arc::clone(&self.changed));
        Self { index, items, depth: self.depth, recursive: self.recursive, changed }
    }
}

/// Variables that inner scopes may set.
#[derive(Debug)]
pub(super) struct Namespace(Mutex<(AHashMap<Arc<str>, Value>, Held)>);

impl Namespace {
    /// What one field takes beside its value.
    const FIELD: usize = 128;

    pub(super) fn new(budget: &Budget) -> Outcome<Self> {
        Ok(Self(Mutex::new((AHashMap::new(), budget.hold(Self::FIELD)?))))
    }

    fn lock(&self) -> MutexGuard<'_, (AHashMap<Arc<str>, Value>, Held)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, name: &str) -> Value {
        self.lock().0.get(name).cloned().unwrap_or(Value::Undefined)
    }

    /// Refuses what could lead back to the namespace itself.
    pub(super) fn set(&self, budget: &Budget, name: Arc<str>, value: Value) -> Outcome<()> {
        value.storable()?;
        let mut inner = self.lock();
        let (fields, held) = &mut *inner;
        if !fields.contains_key(&name) {
            budget.grow(held, Self::FIELD + name.len())?;
        }
        fields.insert(name, value);
        Ok(())
    }
}

impl std::ops::Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl std::ops::Deref for Items {
    type Target = [Value];

    fn deref(&self) -> &[Value] {
        &self.items
    }
}

impl From<&str> for Value {
    /// A text of the template itself, which is not charged to the budget.
    fn from(text: &str) -> Self {
        Value::Str(Arc::new(Text { text: text.into(), _held: None }))
    }
}

impl From<usize> for Value {
    fn from(n: usize) -> Self {
        Value::Int(n as i128)
    }
}

impl Value {
    pub(super) fn text(budget: &Budget, text: &str) -> Outcome<Self> {
        let mut builder = Builder::new(budget)?;
        builder.push(text)?;
        Ok(builder.finish())
    }

    pub(super) fn list(budget: &Budget, items: Vec<Value>) -> Outcome<Self> {
        Ok(Value::List(Arc::new(Items::new(budget, items)?)))
    }

    pub(super) fn tuple(budget: &Budget, items: Vec<Value>) -> Outcome<Self> {
        Ok(Value::Tuple(Arc::new(Items::new(budget, items)?)))
    }

    /// A map of `entries`; the last of equal keys wins, at the place of the first.
    pub(super) fn map(budget: &Budget, entries: Vec<(Value, Value)>) -> Outcome<Self> {
        Ok(Value::Map(Arc::new(Fields::new(budget, entries)?)))
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn as_items(&self) -> Option<&Arc<Items>> {
        match self {
            Value::List(items) | Value::Tuple(items) => Some(items),
            _ => None,
        }
    }

    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Value::Int(n) => Some(*n),
            Value::Bool(b) => Some(i128::from(*b)),
            _ => None,
        }
    }

    pub(super) fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(x) => Some(*x),
            other => other.as_int().map(|n| n as f64),
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined)
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Value::Undefined | Value::None => false,
            Value::Bool(b) => *b,
            Value::Int(n) => *n != 0,
            Value::Float(x) => *x != 0.0,
            Value::Str(text) => !text.is_empty(),
            Value::List(items) | Value::Tuple(items) => !items.is_empty(),
            Value::Map(fields) => !fields.entries.is_empty(),
            Value::Namespace(_) | Value::Macro(_) | Value::Loop(_) => true,
            Value::Function(_) | Value::Method(_) => true,
        }
    }

    /// The name of its type, as in Python.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Value::Undefined => "undefined",
            Value::None => "None",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(_) => "str",
            Value::List(_) => "list",
            Value::Tuple(_) => "tuple",
            Value::Map(_) => "dict",
            Value::Namespace(_) => "namespace",
            Value::Macro(_) => "macro",
            Value::Loop(_) => "loop",
            Value::Function(_) => "function",
            Value::Method(_) => "method",
        }
    }

    fn depth(&self) -> usize {
        match self {
            Value::List(items) | Value::Tuple(items) => items.depth,
            Value::Map(fields) => fields.depth,
            _ => 0,
        }
    }

    /// Whether it may be part of another value.
    fn storable(&self) -> Outcome<()> {
        match self {
            Value::Namespace(_) | Value::Loop(_) | Value::Macro(_) | Value::Method(_) => {
                Err(Fault::new(format!("a {} cannot be put into another value", self.kind())))
            }
            _ => Ok(()),
        }
    }

    /// Equality as in Python. Charges the bytes compared.
    pub(super) fn equals(&self, budget: &Budget, other: &Value) -> Outcome<bool> {
        budget.step()?;
        Ok(match (self, other) {
            (Value::Undefined, Value::Undefined) | (Value::None, Value::None) => true,
            (Value::Str(a), Value::Str(b)) => {
                budget.work(a.len().min(b.len()))?;
                a.text == b.text
            }
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                if a.len() != b.len() {
                    return Ok(false);
                }
                for (a, b) in a.iter().zip(b.iter()) {
                    if !a.equals(budget, b)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Value::Map(a), Value::Map(b)) => {
                if a.entries.len() != b.entries.len() {
                    return Ok(false);
                }
                for (key, value) in &a.entries {
                    match b.get(budget, key)? {
                        Some(other) if value.equals(budget, other)? => {}
                        _ => return Ok(false),
                    }
                }
                true
            }
            (Value::Namespace(a), Value::Namespace(b)) => Arc::ptr_eq(a, b),
            (Value::Macro(a), Value::Macro(b)) => Arc::ptr_eq(a, b),
            (Value::Function(a), Value::Function(b)) => a == b,
            (a, b) => match (a.as_int(), b.as_int()) {
                (Some(a), Some(b)) => a == b,
                _ => a.as_float().zip(b.as_float()).is_some_and(|(a, b)| a == b),
            },
        })
    }

    /// Order as Python has it: of numbers, of texts, of lists.
    pub(super) fn compare(&self, budget: &Budget, other: &Value) -> Outcome<Ordering> {
        budget.step()?;
        let refuse = || {
            let (a, b) = (self.kind(), other.kind());
            Fault::new(format!("{a} and {b} have no order"))
        };
        match (self, other) {
            (Value::Str(a), Value::Str(b)) => {
                budget.work(a.len().min(b.len()))?;
                Ok(a.text.cmp(&b.text))
            }
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                for (a, b) in a.iter().zip(b.iter()) {
                    if !a.equals(budget, b)? {
                        return a.compare(budget, b);
                    }
                }
                Ok(a.len().cmp(&b.len()))
            }
            (a, b) => match (a.as_int(), b.as_int()) {
                (Some(a), Some(b)) => Ok(a.cmp(&b)),
                _ => {
                    let numbers = a.as_float().zip(b.as_float());
                    numbers.and_then(|(a, b)| a.partial_cmp(&b)).ok_or_else(refuse)
                }
            },
        }
    }
}

impl Items {
    pub(super) fn new(budget: &Budget, items: Vec<Value>) -> Outcome<Self> {
        let held = budget.hold(items.capacity() * size_of::<Value>() + size_of::<Self>() + 32)?;
        let depth = deepest(items.iter())?;
        Ok(Self { items, depth, _held: Some(held) })
    }
}

/// The depth of a value made of `parts`.
fn deepest<'v>(parts: impl Iterator<Item = &'v Value>) -> Outcome<usize> {
    let mut depth = 0;
    for part in parts {
        part.storable()?;
        depth = depth.max(part.depth());
    }
    if depth >= limits::VALUE_DEPTH {
        let cap = limits::VALUE_DEPTH;
        return Err(Fault::new(format!("found a value nested deeper than {cap} levels")));
    }
    Ok(depth + 1)
}

impl Fields {
    pub(super) fn new(budget: &Budget, entries: Vec<(Value, Value)>) -> Outcome<Self> {
        let each = size_of::<(Value, Value)>();
        let mut held = budget.hold(entries.capacity() * each + size_of::<Self>() + 32)?;
        let depth = deepest(entries.iter().flat_map(|(key, value)| [key, value]))?;
        let mut fields = Self { entries: Vec::new(), places: None, depth, _held: None };
        if entries.len() >= SMALL {
            let keys: usize = entries.iter().map(|(key, _)| key.as_str().map_or(0, str::len)).sum();
            budget.grow(&mut held, keys + entries.len() * 2 * size_of::<(Key, usize)>())?;
            let mut places = AHashMap::with_capacity(entries.len());
            for (key, value) in entries {
                match places.entry(Key::of(&key)?) {
                    std::collections::hash_map::Entry::Occupied(place) => {
                        let place: usize = *place.get();
                        fields.entries[place].1 = value;
                    }
                    std::collections::hash_map::Entry::Vacant(place) => {
                        place.insert(fields.entries.len());
                        fields.entries.push((key, value));
                    }
                }
            }
            fields.places = Some(places);
        } else {
            for (key, value) in entries {
                Key::of(&key)?;
                let mut place = None;
                for (at, (known, _)) in fields.entries.iter().enumerate() {
                    if known.equals(budget, &key)? {
                        place = Some(at);
                    }
                }
                match place {
                    Some(at) => fields.entries[at].1 = value,
                    None => fields.entries.push((key, value)),
                }
            }
        }
        fields._held = Some(held);
        Ok(fields)
    }

    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }

    pub(super) fn get(&self, budget: &Budget, key: &Value) -> Outcome<Option<&Value>> {
        if let Some(places) = &self.places {
            budget.work(key.as_str().map_or(0, str::len))?;
            let Ok(key) = Key::of(key) else { return Ok(None) };
            return Ok(places.get(&key).map(|&place| &self.entries[place].1));
        }
        for (known, value) in &self.entries {
            if known.equals(budget, key)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    /// As [`Fields::get`], by a name.
    pub(super) fn named(&self, name: &str) -> Option<&Value> {
        if let Some(places) = &self.places {
            return places.get(&Key::Str(name.into())).map(|&place| &self.entries[place].1);
        }
        let mut entries = self.entries.iter();
        entries.find(|(known, _)| known.as_str() == Some(name)).map(|(_, value)| value)
    }
}

impl Key {
    fn of(value: &Value) -> Outcome<Self> {
        Ok(match value {
            Value::None => Key::None,
            Value::Str(text) => Key::Str(text.text.clone()),
            Value::Float(x) if x.fract() == 0.0 && x.abs() < 1e30 => Key::Number(*x as i128),
            Value::Float(x) => Key::Float(x.to_bits()),
            other => match other.as_int() {
                Some(n) => Key::Number(n),
                None => return Err(Fault::new(format!("a {} is no key of a dict", other.kind()))),
            },
        })
    }
}

/// A text that is being made.
pub(super) struct Builder<'b> {
    budget: &'b Budget,
    text: String,
    held: Held,
    /// The length up to which the text is charged already.
    paid: usize,
}

impl<'b> Builder<'b> {
    pub(super) fn new(budget: &'b Budget) -> Outcome<Self> {
        let held = budget.hold(size_of::<Text>() + 48)?;
        Ok(Self { budget, text: String::new(), held, paid: 0 })
    }

    /// Refuses a text longer than any that may come out of a template.
    pub(super) fn push(&mut self, more: &str) -> Outcome<()> {
        let length = self.text.len() + more.len();
        if length > self.paid.min(limits::RENDERED_BYTES) {
            self.pay(length)?;
        }
        self.text.push_str(more);
        Ok(())
    }

    /// Charges `length` bytes and some in advance: texts are made in small parts.
    fn pay(&mut self, length: usize) -> Outcome<()> {
        if length > limits::RENDERED_BYTES {
            let cap = limits::RENDERED_BYTES;
            let words = format!("found a text of more than {cap} bytes, allowed: at most {cap}");
            return Err(Fault::new(words));
        }
        let paid = length + length / 2;
        self.budget.grow(&mut self.held, paid - self.paid)?;
        self.paid = paid;
        Ok(())
    }

    pub(super) fn push_char(&mut self, c: char) -> Outcome<()> {
        self.push(c.encode_utf8(&mut [0; 4]))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    pub(super) fn finish(self) -> Value {
        Value::Str(Arc::new(Text { text: self.text.into_boxed_str(), _held: Some(self.held) }))
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }
}
