//! The names in a request body: those that its type does not read are refused or reported.

use super::body::RequestBody;
use crate::error::ApiError;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Mutex;

/// A known field that the server does not support.
pub(crate) struct Refused {
    /// Its name.
    pub(crate) name: &'static str,
    /// A value, as JSON, with which it has no effect. So have null, false and anything empty.
    pub(crate) neutral: &'static str,
    /// What to use instead, or why there is nothing.
    pub(crate) instead: &'static str,
}

impl Refused {
    fn check(&self, value: &Value) -> Result<(), ApiError> {
        let empty = match value {
            Value::Null => true,
            Value::Bool(false) => self.neutral != "true",
            Value::String(text) => text.is_empty(),
            Value::Array(list) => list.is_empty(),
            Value::Object(fields) => fields.is_empty(),
            Value::Bool(true) | Value::Number(_) => false,
        };
        let neutral = serde_json::from_str::<Value>(self.neutral).is_ok_and(|neutral| {
            neutral == *value || value.is_number() && neutral.as_f64() == value.as_f64()
        });
        if empty || neutral {
            return Ok(());
        }
        let Self { name, instead, .. } = self;
        Err(ApiError::invalid(*name, format!("{name} is not supported: {instead}")))
    }
}

/// The most names that are reported.
const NAMES: usize = 16;
/// The longest name that is reported, in bytes.
const NAME_BYTES: usize = 64;

/// The fields of a request that were ignored; the middleware puts them into a response header.
#[derive(Default)]
pub(crate) struct Ignored(Mutex<Vec<String>>);

impl Ignored {
    /// Sets the names.
    pub(crate) fn set(&self, names: Vec<String>) {
        *self.0.lock().unwrap_or_else(|e| e.into_inner()) = names;
    }

    /// The names, separated by commas; `None` if there are none.
    pub(crate) fn list(&self) -> Option<(usize, String)> {
        let names = self.0.lock().unwrap_or_else(|e| e.into_inner());
        (!names.is_empty()).then(|| (names.len(), names.join(", ")))
    }
}

/// Refuses fields that `T` does not support and returns the names of those it does not know, as
/// far as they can be put into a header.
pub(crate) fn unknown<T: RequestBody>(bytes: &[u8]) -> Result<Vec<String>, ApiError> {
    let mut found = Found { names: Vec::new(), error: None };
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    // The body was parsed before: this pass cannot fail.
    let _ = reader.deserialize_map(Names::<T>(&mut found, PhantomData));
    match found.error {
        Some(error) => Err(error),
        None => Ok(found.names),
    }
}

struct Found {
    names: Vec<String>,
    error: Option<ApiError>,
}

struct Names<'a, T>(&'a mut Found, PhantomData<T>);

impl<'de, T: RequestBody> Visitor<'de> for Names<'_, T> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let found = self.0;
        while let Some(name) = map.next_key_seed(Name)? {
            let name: &str = &name;
            if let Some(refused) = T::REFUSED.iter().find(|refused| refused.name == name) {
                if let Err(error) = refused.check(&map.next_value()?) {
                    found.error.get_or_insert(error);
                }
                continue;
            }
            map.next_value::<IgnoredAny>()?;
            let plain = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
            if !T::has(name)
                && !T::NO_EFFECT.contains(&name)
                && found.names.len() < NAMES
                && (1..=NAME_BYTES).contains(&name.len())
                && name.bytes().all(plain)
            {
                found.names.push(name.into());
            }
        }
        Ok(())
    }
}

/// Reads a name without a copy where it has no escapes.
struct Name;

impl<'de> DeserializeSeed<'de> for Name {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Cow<'de, str>, D::Error> {
        #[derive(serde::Deserialize)]
        struct Borrowed<'a>(#[serde(borrow)] Cow<'a, str>);
        Borrowed::deserialize(from).map(|name| name.0)
    }
}
