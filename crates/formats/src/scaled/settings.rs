//! The fields of `quantization_config`, read by type; every error names the field with its path.

use crate::{Error, Result, limits};
use serde_json::{Map, Value};
use std::fmt::Display;
use std::path::Path;

/// One object of `config.json`. A JSON null is the same as an absent field.
pub(super) struct Settings<'a> {
    file: &'a Path,
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Settings<'a> {
    /// The whole file.
    pub(super) fn new(file: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { file, path: String::new(), map }
    }

    pub(super) fn file(&self) -> &'a Path {
        self.file
    }

    /// The field's name with those of the objects around it.
    pub(super) fn field(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn invalid(&self, key: &str, value: &Value, allowed: impl Display) -> Error {
        Error::invalid(self.file, 0, self.field(key), value, allowed)
    }

    /// The refusal of the field as it stands there.
    pub(super) fn unsupported(&self, key: &str, allowed: impl Display) -> Error {
        let found = match self.get(key) {
            None => "nothing".to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
        };
        Error::unsupported(self.file, self.field(key), found, allowed)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.invalid(key, value, "text")),
        }
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(value) => Err(self.invalid(key, value, "true or false")),
        }
    }

    pub(super) fn int(&self, key: &str) -> Result<Option<i64>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_i64() {
                Some(number) => Ok(Some(number)),
                None => Err(self.invalid(key, value, "an integer")),
            },
        }
    }

    /// Checks an integer that has a single supported value.
    pub(super) fn expect_int(&self, key: &str, found: Option<i64>, only: i64) -> Result<()> {
        if found == Some(only) { Ok(()) } else { Err(self.unsupported(key, only)) }
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Settings<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Settings { file: self.file, path: self.field(key), map }))
            }
            Some(value) => Err(self.invalid(key, value, "an object")),
        }
    }

    /// The names of the fields, in the order of the file.
    pub(super) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    /// A list of names; an absent one is empty.
    pub(super) fn names(&self, key: &str) -> Result<Vec<&'a str>> {
        let names = match self.get(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(names)) => names,
            Some(value) => return Err(self.invalid(key, value, "a list of names")),
        };
        if names.len() > limits::MODULE_NAMES {
            let allowed = format!("at most {}", limits::MODULE_NAMES);
            let found = format!("{} names", names.len());
            return Err(Error::invalid(self.file, 0, self.field(key), found, allowed));
        }
        let text = |value: &'a Value| match value {
            Value::String(text) => Ok(text.as_str()),
            other => Err(self.invalid(key, other, "a list of names")),
        };
        names.iter().map(text).collect()
    }

    /// Two numbers, as of a block.
    pub(super) fn pair(&self, key: &str) -> Result<Option<[i64; 2]>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let numbers: Option<Vec<i64>> =
            value.as_array().and_then(|list| list.iter().map(Value::as_i64).collect());
        match numbers.as_deref() {
            Some(&[rows, cols]) => Ok(Some([rows, cols])),
            _ => Err(self.invalid(key, value, "two integers")),
        }
    }
}
