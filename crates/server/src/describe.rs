//! JSON schemas of the API types. The OpenAPI document is built from the same definitions that
//! serde uses, so the two cannot diverge.

use crate::config::Limits;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// Named schemas, collected while types are described.
#[derive(Default)]
pub(crate) struct Schemas(pub Map<String, Value>);

/// A type with a JSON schema.
pub(crate) trait Describe {
    /// Whether a field of this type is optional.
    const OPTIONAL: bool = false;
    /// The schema, or a reference to one put into `all`.
    fn describe(all: &mut Schemas) -> Value;
}

/// A struct whose fields are known by name.
pub(crate) trait Fields {
    /// Whether JSON of this type may have a field with this name.
    fn has(name: &str) -> bool;
}

macro_rules! plain {
    ($($ty:ty => $schema:expr;)*) => {
        $(impl Describe for $ty {
            fn describe(_: &mut Schemas) -> Value {
                $schema
            }
        })*
    };
}

plain! {
    String => json!({"type": "string"});
    &'static str => json!({"type": "string"});
    bool => json!({"type": "boolean"});
    f32 => json!({"type": "number"});
    f64 => json!({"type": "number"});
    u32 => json!({"type": "integer", "minimum": 0, "maximum": u32::MAX});
    u64 => json!({"type": "integer", "minimum": 0});
    i64 => json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX});
    Value => json!({});
    Map<String, Value> => json!({"type": "object"});
}

impl<T: Describe> Describe for Option<T> {
    const OPTIONAL: bool = true;
    fn describe(all: &mut Schemas) -> Value {
        json!({"anyOf": [T::describe(all), {"type": "null"}]})
    }
}

impl<T: Describe> Describe for Vec<T> {
    fn describe(all: &mut Schemas) -> Value {
        json!({"type": "array", "items": T::describe(all)})
    }
}

impl<T: Describe> Describe for BTreeMap<String, T> {
    fn describe(all: &mut Schemas) -> Value {
        json!({"type": "object", "additionalProperties": T::describe(all)})
    }
}

/// A placeholder for a value of the loaded model: as a `maximum` its last token id, as a `pattern`
/// its token ids in decimal, as an `enum` the width of its embeddings. [`fill`] replaces it.
pub(crate) const VOCAB: &str = "of the model";

/// A token id of the loaded model.
pub(crate) fn token_id() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": VOCAB})
}

/// A placeholder for the current value of a limit: `"maxItems": "limit tools"`.
const LIMIT: &str = "limit ";

/// Replaces the placeholders with the values of the model and the limits in force.
pub(crate) fn fill(schema: &mut Value, vocab: u32, width: Option<u32>, limits: &Limits) {
    match schema {
        Value::Object(fields) => {
            for (key, value) in fields {
                let name = value.as_str().and_then(|text| text.strip_prefix(LIMIT));
                match key.as_str() {
                    "maximum" | "maxItems" | "maxLength" | "maxProperties" if name.is_some() => {
                        *value = name.and_then(|name| limits.get(name)).into();
                    }
                    "maximum" if value == VOCAB => *value = vocab.saturating_sub(1).into(),
                    "pattern" if value == VOCAB => *value = below(vocab).into(),
                    "enum" if value == VOCAB => *value = width.into_iter().collect(),
                    _ => fill(value, vocab, width, limits),
                }
            }
        }
        Value::Array(list) => {
            list.iter_mut().for_each(|value| fill(value, vocab, width, limits));
        }
        _ => {}
    }
}

/// A regular expression for the decimal numbers below `end`.
fn below(end: u32) -> String {
    let digits = end.saturating_sub(1).to_string();
    let mut any = Vec::new();
    let free = |count: usize| "[0-9]".repeat(count);
    for length in 1..digits.len() {
        any.push(if length == 1 { free(1) } else { format!("[1-9]{}", free(length - 1)) });
    }
    // Numbers with as many digits as the last one: equal up to a digit, smaller there, then any.
    for (at, digit) in digits.bytes().enumerate() {
        let least = if at == 0 && digits.len() > 1 { b'1' } else { b'0' };
        let (same, rest) = (&digits[..at], digits.len() - at - 1);
        if digit > least {
            let (from, to) = (char::from(least), char::from(digit - 1));
            any.push(format!("{same}[{from}-{to}]{}", free(rest)));
        }
    }
    any.push(digits);
    format!("^({})$", any.join("|"))
}

/// Adds bounds and allowed values to a schema; for an optional field, inside its non-null part.
pub(crate) fn refine(mut schema: Value, more: Value, doc: &str) -> Value {
    let inner = match schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        Some(any) if any.last() == Some(&json!({"type": "null"})) => &mut any[0],
        _ => &mut schema,
    };
    if let (Some(into), Value::Object(more)) = (inner.as_object_mut(), more) {
        into.extend(more);
    }
    if let Some(into) = schema.as_object_mut() {
        into.insert("description".into(), doc.trim().into());
    }
    schema
}

/// Reads a structure from a JSON object. What `serde` derives reads it from an array of its fields, too.
pub(crate) fn object<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    from: D,
) -> Result<T, D::Error> {
    struct Object<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Object<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
            T::deserialize(MapAccessDeserializer::new(map))
        }
    }

    from.deserialize_map(Object(PhantomData))
}

/// Defines a struct for serde and its [`Describe`] from the same lines. A field may end with
/// `= {JSON}`: bounds and allowed values for the document, checked by the route's `validate`.
macro_rules! api_type {
    (
        $(#[doc = $doc:literal])+
        pub struct $name:ident {
            $(
                $(#[doc = $fdoc:literal])+
                $(#[serde($($serde:tt)*)])?
                pub $field:ident : $ty:ty $(= $more:tt)?,
            )*
        }
    ) => {
        $(#[doc = $doc])+
        #[allow(unreachable_pub)]
        #[derive(Clone, Debug, serde::Serialize)]
        pub struct $name {
            $($(#[doc = $fdoc])+ $(#[serde($($serde)*)])? pub $field: $ty,)*
        }

        const _: () = {
            #[derive(serde::Deserialize)]
            struct Parsed {
                $($(#[serde($($serde)*)])? $field: $ty,)*
            }

            impl<'de> serde::Deserialize<'de> for $name {
                fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                    let Parsed { $($field,)* } = $crate::describe::object(from)?;
                    Ok(Self { $($field,)* })
                }
            }
        };

        impl $crate::describe::Fields for $name {
            fn has(name: &str) -> bool {
                let fields = [$($crate::describe::json_name(
                    stringify!($field),
                    concat!($(stringify!($($serde)*))?),
                ),)*];
                fields.contains(&name)
            }
        }

        impl $crate::describe::Describe for $name {
            fn describe(all: &mut $crate::describe::Schemas) -> serde_json::Value {
                if !all.0.contains_key(stringify!($name)) {
                    all.0.insert(stringify!($name).into(), serde_json::Value::Null);
                    let mut fields = serde_json::Map::new();
                    let mut required: Vec<&str> = Vec::new();
                    $({
                        let name = $crate::describe::json_name(
                            stringify!($field),
                            concat!($(stringify!($($serde)*))?),
                        );
                        let schema = <$ty as $crate::describe::Describe>::describe(all);
                        #[allow(unused_mut, unused_assignments)]
                        let mut more = serde_json::Value::Null;
                        $(more = serde_json::json!($more);)?
                        let doc = concat!($($fdoc),+);
                        fields.insert(name.into(), $crate::describe::refine(schema, more, doc));
                        if !<$ty as $crate::describe::Describe>::OPTIONAL {
                            required.push(name);
                        }
                    })*
                    let doc = concat!($($doc),+).trim();
                    let mut schema = serde_json::json!({
                        "type": "object", "description": doc, "properties": fields,
                    });
                    if !required.is_empty() {
                        schema["required"] = serde_json::json!(required);
                    }
                    all.0.insert(stringify!($name).into(), schema);
                }
                serde_json::json!({
                    "$ref": concat!("#/components/schemas/", stringify!($name))
                })
            }
        }
    };
}
pub(crate) use api_type;

/// The name of a field in JSON: its own, or the one its serde attribute sets.
pub(crate) fn json_name(field: &'static str, serde: &'static str) -> &'static str {
    match serde.split_once("rename = \"").and_then(|(_, rest)| rest.split_once('"')) {
        Some((name, _)) => name,
        None => field,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    api_type! {
        /// A sample.
        pub struct Sample {
            /// The temperature.
            pub temperature: Option<f32> = {"minimum": 0, "maximum": 2},
            /// The kind.
            #[serde(rename = "type")]
            pub kind: String = {"enum": ["a", "b"]},
        }
    }

    #[test]
    fn pattern_for_numbers_below_a_bound() {
        let expected = "^([0-9]|[1-9][0-9]|[1-1][0-9][0-9]|2[0-4][0-9]|25[0-7]|258)$";
        assert_eq!(below(259), expected);
        assert_eq!(below(10), "^([0-8]|9)$");
        assert_eq!(below(1), "^(0)$");
    }

    #[test]
    fn a_struct_describes_itself() {
        let mut all = Schemas::default();
        assert_eq!(Sample::describe(&mut all), json!({"$ref": "#/components/schemas/Sample"}));
        assert_eq!(
            all.0["Sample"],
            json!({
                "type": "object",
                "description": "A sample.",
                "properties": {
                    "temperature": {
                        "anyOf": [{"type": "number", "minimum": 0, "maximum": 2}, {"type": "null"}],
                        "description": "The temperature.",
                    },
                    "type": {"type": "string", "enum": ["a", "b"], "description": "The kind."},
                },
                "required": ["type"],
            })
        );
    }

    api_type! {
        /// Something with optional fields only.
        pub struct Loose {
            /// One.
            pub one: Option<u32>,
            /// Two.
            pub two: Option<u32>,
        }
    }

    #[test]
    fn a_structure_is_read_from_an_object_only() {
        let read = |text| serde_json::from_str::<Loose>(text).map(|loose| (loose.one, loose.two));
        assert_eq!(read(r#"{"two": 2, "three": 3}"#).unwrap(), (None, Some(2)));
        for text in ["[null, null]", "[]", "1", "null"] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains("expected an object"), "{text}: {error}");
        }
    }
}
