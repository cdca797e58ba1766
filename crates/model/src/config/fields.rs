//! A configuration field by its two names: in `config.json` and in GGUF metadata.

use formats::checkpoint::Checkpoint;
use formats::gguf::{self, Array, Gguf};
use formats::{Error, Result, limits};
use serde_json::{Map, Value};
use std::fmt::Display;
use std::path::Path;

/// The fields of a configuration, read by type. Every reader takes two names, the one in `config.json` and the one
/// in GGUF metadata without the architecture in front; an empty name means that the container has no such field.
/// A JSON null is the same as an absent field.
#[derive(Clone)]
pub struct Fields<'a> {
    file: &'a Path,
    source: Source<'a>,
    /// The checkpoint that a JSON file stands beside, if it is known.
    beside: Option<&'a Checkpoint>,
}

#[derive(Clone)]
enum Source<'a> {
    Json(Map<String, Value>),
    Gguf { checkpoint: &'a Checkpoint, gguf: &'a Gguf, architecture: &'a str },
}

impl<'a> Fields<'a> {
    /// The fields of a JSON file.
    pub(crate) fn json(file: &'a Path, bytes: &[u8]) -> Result<Fields<'a>> {
        let map = formats::config::object(file, bytes)?;
        Ok(Fields { file, source: Source::Json(map), beside: None })
    }

    /// The same fields, beside a checkpoint.
    pub(crate) fn beside(self, checkpoint: Option<&'a Checkpoint>) -> Fields<'a> {
        Fields { beside: checkpoint, ..self }
    }

    /// The metadata of a GGUF file.
    pub(crate) fn gguf(checkpoint: &'a Checkpoint, gguf: &'a Gguf) -> Result<Fields<'a>> {
        let architecture = gguf.str("general.architecture")?.unwrap_or("nothing");
        let source = Source::Gguf { checkpoint, gguf, architecture };
        Ok(Fields { file: gguf.file(), source, beside: None })
    }

    /// The file, for messages.
    pub fn file(&self) -> &'a Path {
        self.file
    }

    /// Whether this is GGUF metadata.
    pub(crate) fn is_gguf(&self) -> bool {
        self.metadata().is_some()
    }

    /// The name that selects the family, with the field it stands in.
    pub(crate) fn family(&self) -> Result<(&'static str, &str)> {
        match &self.source {
            Source::Gguf { architecture, .. } => Ok(("general.architecture", architecture)),
            Source::Json(_) => match self.text("model_type", "")? {
                Some(name) => Ok(("model_type", name)),
                None => Ok(("model_type", "nothing")),
            },
        }
    }

    /// The GGUF header, if this is one.
    pub(crate) fn metadata(&self) -> Option<&'a Gguf> {
        match &self.source {
            Source::Gguf { gguf, .. } => Some(gguf),
            Source::Json(_) => None,
        }
    }

    /// The checkpoint that a GGUF header came from.
    pub(crate) fn checkpoint(&self) -> Option<&'a Checkpoint> {
        match &self.source {
            Source::Gguf { checkpoint, .. } => Some(checkpoint),
            Source::Json(_) => None,
        }
    }

    /// Whether a GGUF file has a tensor; false for JSON, which lists none.
    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.checkpoint().is_some_and(|checkpoint| checkpoint.get(name).is_some())
    }

    /// Whether the name of a tensor of the checkpoint beside a JSON file ends like this; `None` if no checkpoint is known.
    pub(crate) fn has_ending(&self, end: &str) -> Option<bool> {
        let has = |checkpoint: &Checkpoint| checkpoint.tensors().any(|t| t.name.ends_with(end));
        self.beside.map(has)
    }

    /// Whether `config.json` has the field, null or not.
    pub(crate) fn mentions(&self, json: &str) -> bool {
        matches!(&self.source, Source::Json(map) if map.contains_key(json))
    }

    /// A whole number.
    pub fn size(&self, json: &str, gguf: &str) -> Result<Option<usize>> {
        match &self.source {
            Source::Json(_) => self.typed(json, "a whole number", |value| {
                value.as_u64().and_then(|n| usize::try_from(n).ok())
            }),
            Source::Gguf { gguf: header, .. } => match self.key(gguf) {
                Some(key) => {
                    Ok(header.uint(&key)?.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
                }
                None => Ok(None),
            },
        }
    }

    /// A whole number that must be there.
    pub(crate) fn required(&self, json: &str, gguf: &str) -> Result<usize> {
        let name = self.called(json, gguf);
        let missing = || Error::invalid(self.file, 0, name, "nothing", "a whole number");
        self.size(json, gguf)?.ok_or_else(missing)
    }

    /// A whole number, or that of all layers that are not 0 in a list that GGUF files may have in its place.
    pub(crate) fn size_in_layers(&self, json: &str, gguf: &str) -> Result<Option<usize>> {
        let Some(sizes) = self.sizes_of_layers(gguf)? else { return self.size(json, gguf) };
        let mut some = sizes.into_iter().filter(|&size| size > 0);
        let first = some.next();
        match some.find(|&size| Some(size) != first) {
            None => Ok(first.or(Some(0))),
            Some(other) => {
                let allowed = format!("{}, as in other layers, or 0", first.unwrap_or(0));
                Err(self.unsupported(&self.called(json, gguf), other, allowed))
            }
        }
    }

    /// A list of GGUF metadata with a whole number for each layer; `None` if there is no list.
    pub(crate) fn sizes_of_layers(&self, name: &str) -> Result<Option<Vec<usize>>> {
        let Some((header, key)) = self.metadata().zip(self.key(name)) else { return Ok(None) };
        let Some(gguf::Value::Array(list)) = header.get(&key) else { return Ok(None) };
        let size = |i: usize| list.int(i).and_then(|n| usize::try_from(n).ok());
        let sizes: Option<Vec<usize>> = match list.len() <= limits::LAYERS as usize {
            true => (0..list.len()).map(size).collect(),
            false => None,
        };
        let wrong = || self.invalid(&key, format!("a list of {}", list.len()), "whole numbers");
        sizes.map(Some).ok_or_else(wrong)
    }

    /// The name of a field in this container.
    pub(crate) fn called(&self, json: &str, gguf: &str) -> String {
        self.key(gguf).unwrap_or_else(|| json.to_owned())
    }

    /// A number.
    pub fn number(&self, json: &str, gguf: &str) -> Result<Option<f64>> {
        match &self.source {
            Source::Json(_) => self.typed(json, "a number", Value::as_f64),
            Source::Gguf { gguf: header, .. } => {
                self.key(gguf).map_or(Ok(None), |key| header.float(&key))
            }
        }
    }

    /// True or false.
    pub fn bool(&self, json: &str, gguf: &str) -> Result<Option<bool>> {
        match &self.source {
            Source::Json(_) => self.typed(json, "true or false", Value::as_bool),
            Source::Gguf { gguf: header, .. } => {
                self.key(gguf).map_or(Ok(None), |key| header.bool(&key))
            }
        }
    }

    /// A string.
    pub fn text(&self, json: &str, gguf: &str) -> Result<Option<&str>> {
        match &self.source {
            Source::Json(_) => self.typed(json, "a string", Value::as_str),
            Source::Gguf { gguf: header, .. } => {
                self.key(gguf).map_or(Ok(None), |key| header.str(&key))
            }
        }
    }

    /// An object of `config.json`; metadata has none.
    pub(crate) fn object(&self, json: &str) -> Result<Option<Fields<'a>>> {
        let Source::Json(_) = &self.source else { return Ok(None) };
        let map = self.typed(json, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields { source: Source::Json(map.clone()), ..*self }))
    }

    /// How many fields there are.
    pub(crate) fn count(&self) -> usize {
        match &self.source {
            Source::Json(map) => map.len(),
            Source::Gguf { .. } => 0,
        }
    }

    /// The same fields of a JSON file with another number.
    pub(crate) fn with(&self, json: &str, number: usize) -> Fields<'a> {
        let mut fields = self.clone();
        if let Source::Json(map) = &mut fields.source {
            map.insert(json.to_owned(), number.into());
        }
        fields
    }

    /// The same with fields of other names where those of the first are absent.
    pub(crate) fn aliased(&self, names: &[(&str, &str)]) -> Fields<'a> {
        let mut fields = self.clone();
        if let Source::Json(map) = &mut fields.source {
            for (name, other) in names {
                if let (None, Some(value)) = (map.get(*name), map.get(*other)) {
                    let value = value.clone();
                    map.insert((*name).to_owned(), value);
                }
            }
        }
        fields
    }

    /// The same with fields of a larger configuration where those of these names are absent or null.
    pub(crate) fn completed(&self, whole: &Fields<'_>, names: &[&str]) -> Fields<'a> {
        let mut fields = self.clone();
        if let (Source::Json(map), Source::Json(whole)) = (&mut fields.source, &whole.source) {
            for &name in names {
                if let Some(value) = whole.get(name)
                    && map.get(name).is_none_or(Value::is_null)
                {
                    map.insert(name.to_owned(), value.clone());
                }
            }
        }
        fields
    }

    /// A list of strings of `config.json`.
    pub fn texts(&self, json: &str) -> Result<Option<Vec<&str>>> {
        let Source::Json(_) = &self.source else { return Ok(None) };
        self.typed(json, "a list of strings", |value| {
            let list = value.as_array().filter(|list| list.len() <= limits::LAYERS as usize)?;
            list.iter().map(Value::as_str).collect()
        })
    }

    /// A list of numbers.
    pub fn numbers(&self, json: &str, gguf: &str) -> Result<Option<Vec<f64>>> {
        match &self.source {
            Source::Json(_) => self.typed(json, "a list of numbers", |value| {
                let list = value.as_array().filter(|list| list.len() <= limits::WIDTH as usize)?;
                list.iter().map(Value::as_f64).collect()
            }),
            Source::Gguf { gguf: header, .. } => {
                let array = self.key(gguf).map_or(Ok(None), |key| header.array(&key))?;
                let numbers = |array: &Array| {
                    (0..array.len()).map(|i| array.int(i).map(|n| n as f64)).collect::<Option<_>>()
                };
                Ok(array.and_then(numbers))
            }
        }
    }

    /// One token id or a list of them, in `config.json`; negative ids, which old configs use for "none", are left
    /// out.
    pub(crate) fn ids(&self, json: &str) -> Result<Vec<u32>> {
        let Source::Json(_) = &self.source else { return Ok(Vec::new()) };
        let one = |value: &Value| value.as_i64().map(|n| u32::try_from(n).ok());
        let ids = self.typed(json, "a token id or a list of them", |value| match value {
            Value::Array(list) if list.len() <= limits::EOS_IDS => {
                list.iter().map(one).collect::<Option<Vec<_>>>()
            }
            other => one(other).map(|id| vec![id]),
        })?;
        Ok(ids.into_iter().flatten().flatten().collect())
    }

    /// The window of each layer: `window` where `layer_types` says so, or, in configs without that list, `windowed`.
    pub fn windows(
        &self,
        window: Option<usize>,
        layers: usize,
        windowed: impl Fn(usize) -> bool,
    ) -> Result<Vec<Option<usize>>> {
        if let Some(window) = window {
            let cap = limits::POSITIONS as usize;
            if window == 0 || window > cap {
                return Err(self.invalid("sliding window", window, format!("1 to {cap}")));
            }
        }
        let Some(kinds) = self.texts("layer_types")? else {
            return Ok((0..layers).map(|layer| window.filter(|_| windowed(layer))).collect());
        };
        if kinds.len() != layers {
            return Err(self.invalid("layer_types", kinds.len(), format!("{layers} entries")));
        }
        let of = |(layer, kind): (usize, &&str)| match (*kind, window) {
            ("full_attention", _) => Ok(None),
            ("sliding_attention", Some(window)) => Ok(Some(window)),
            (other, _) => {
                let allowed = match window {
                    Some(_) => "full_attention, sliding_attention",
                    None => "full_attention",
                };
                Err(self.unsupported(&format!("layer_types[{layer}]"), other, allowed))
            }
        };
        kinds.iter().enumerate().map(of).collect()
    }

    /// Refuses a model with a field that is true.
    pub fn not(&self, json: &str, gguf: &str) -> Result<()> {
        match self.bool(json, gguf)? {
            Some(true) => Err(self.unsupported(json, true, "false")),
            _ => Ok(()),
        }
    }

    /// Refuses a decoder whose MLP is not gated by SiLU, or whose linears have a bias.
    pub(crate) fn silu_without_bias(&self) -> Result<()> {
        self.activation("hidden_act", &["silu"])?;
        self.not("attention_bias", "")?;
        self.not("mlp_bias", "")
    }

    /// Refuses any activation but the named ones; the first is the default.
    pub(crate) fn activation(&self, json: &str, allowed: &[&str]) -> Result<()> {
        match self.text(json, "")? {
            Some(found) if !allowed.contains(&found) => {
                Err(self.unsupported(json, found, allowed.join(", ")))
            }
            _ => Ok(()),
        }
    }

    /// The error for a well-formed value that this family does not support.
    pub(crate) fn unsupported(
        &self,
        field: &str,
        found: impl Display,
        allowed: impl Display,
    ) -> Error {
        Error::unsupported(self.file, field, found, allowed)
    }

    /// The error for an invalid value.
    pub(crate) fn invalid(&self, field: &str, found: impl Display, allowed: impl Display) -> Error {
        Error::invalid(self.file, 0, field, found, allowed)
    }

    /// The full name of a metadata field, if this is GGUF and has it.
    fn key(&self, gguf: &str) -> Option<String> {
        match &self.source {
            Source::Gguf { architecture, .. } if !gguf.is_empty() => {
                Some(format!("{architecture}.{gguf}"))
            }
            _ => None,
        }
    }

    fn typed<'v, T>(
        &'v self,
        key: &str,
        allowed: &str,
        read: impl Fn(&'v Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Source::Json(map) = &self.source else { return Ok(None) };
        let Some(value) = map.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.invalid(key, value, allowed))
    }
}
