//! `tokenizer.json` as the `tokenizers` library writes it.
//!
//! The file is taken apart here rather than by the library: its BPE builder indexes with lengths
//! from the file, and its normalisers and processors for other kinds of models are code that no
//! decoder needs to expose to a hostile file.

use super::pipeline::{Bpe, Pipeline};
use super::token_bytes::{Spelling, TokenBytes};
use crate::safetensors::json_error;
use crate::{Error, Result, limits};
use serde::Deserialize;
use serde::de::{
    DeserializeOwned, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::Value;
use std::fmt;
use std::path::Path;
use tokenizers::AddedToken;

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    decoder: Option<Value>,
    model: ModelFields,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

#[derive(Deserialize)]
struct ModelFields {
    r#type: Option<String>,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    // Other kinds of models have other kinds of vocabularies; they are refused by name first.
    vocab: Option<Pairs>,
    #[serde(default)]
    merges: Merges,
}

/// The vocabulary, or nothing when it is not a map of ids.
struct Pairs(Option<Vec<(String, u32)>>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    if pairs.len() as u64 == limits::VOCAB {
                        let cap = limits::VOCAB;
                        return Err(A::Error::custom(format!("more than {cap} tokens")));
                    }
                    pairs.push(pair);
                }
                Ok(Pairs(Some(pairs)))
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> std::result::Result<Pairs, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Pairs(None))
            }
        }
        deserializer.deserialize_any(Visit)
    }
}

/// `"a b"` in older files, `["a", "b"]` in newer ones.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Merge;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a merge, \"a b\" or [\"a\", \"b\"]")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<Merge, E> {
                let (left, right) = text.split_once(' ').ok_or_else(|| E::custom("no space"))?;
                Ok(Merge(left.to_owned(), right.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> std::result::Result<Merge, A::Error> {
                let missing = || serde::de::Error::invalid_length(1, &"two tokens");
                let left = seq.next_element()?.ok_or_else(missing)?;
                let right = seq.next_element()?.ok_or_else(missing)?;
                Ok(Merge(left, right))
            }
        }
        deserializer.deserialize_any(Visit)
    }
}

/// All merges, counted while they are read.
#[derive(Default)]
struct Merges(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Merges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Merges;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of merges")
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> std::result::Result<Merges, A::Error> {
                let mut merges = Vec::new();
                while let Some(Merge(left, right)) = seq.next_element()? {
                    if merges.len() == limits::MERGES {
                        let cap = limits::MERGES;
                        return Err(A::Error::custom(format!("more than {cap} merges")));
                    }
                    merges.push((left, right));
                }
                Ok(Merges(merges))
            }
        }
        deserializer.deserialize_seq(Visit)
    }
}

pub(super) fn read(path: &Path, json: &[u8]) -> Result<(Pipeline, TokenBytes)> {
    let file: File = serde_json::from_slice(json)
        .map_err(|error| json_error(path, 0, "tokenizer", json, &error))?;
    let model = file.model;
    if let Some(kind) = model.r#type.as_deref().filter(|&kind| kind != "BPE") {
        return Err(Error::unsupported(path, "model.type", kind, "BPE"));
    }
    let affixes = [
        ("model.continuing_subword_prefix", &model.continuing_subword_prefix),
        ("model.end_of_word_suffix", &model.end_of_word_suffix),
    ];
    for (field, affix) in affixes {
        if let Some(affix) = affix.as_ref().filter(|affix| !affix.is_empty()) {
            return Err(Error::unsupported(path, field, affix, "none"));
        }
    }
    if let Some(dropout) = model.dropout.filter(|&p| p != 0.0) {
        return Err(Error::unsupported(path, "model.dropout", dropout, "none"));
    }
    let Some(Pairs(Some(vocab))) = model.vocab else {
        return Err(Error::invalid(path, 0, "model.vocab", "another form", "a map of ids"));
    };
    let added: Vec<_> =
        file.added_tokens.into_iter().map(|added| (added.id, added.token)).collect();

    let spelling = spelling(path, file.decoder.as_ref(), model.byte_fallback)?;
    let bytes = TokenBytes::new(path, spelling, &vocab, &added)?;
    let bpe = Bpe {
        vocab,
        merges: model.merges.0,
        unknown: model.unk_token,
        fuse_unknown: model.fuse_unk,
        byte_fallback: model.byte_fallback,
        ignore_merges: model.ignore_merges,
    }
    .build(path)?;
    let normaliser = part(path, "normalizer", file.normalizer, NORMALISERS)?;
    let pre_tokenizer = part(path, "pre_tokenizer", file.pre_tokenizer, PRE_TOKENIZERS)?;
    let (prefix, suffix) = around(path, file.post_processor.as_ref())?;
    let pipeline = Pipeline::new(path, bpe, added, normaliser, pre_tokenizer)?;
    Ok((pipeline.around(prefix, suffix), bytes))
}

const NORMALISERS: &[&str] =
    &["Sequence", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Strip", "Lowercase"];
const PRE_TOKENIZERS: &[&str] =
    &["Sequence", "Split", "ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace"];
const DECODERS: &[&str] =
    &["Sequence", "ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace"];

/// One step of the pipeline, once every `type` in it is known to be harmless.
fn part<T: DeserializeOwned>(
    path: &Path,
    field: &str,
    value: Option<Value>,
    allowed: &[&str],
) -> Result<Option<T>> {
    let Some(value) = value else { return Ok(None) };
    for kind in kinds(&value) {
        if !allowed.contains(&kind) {
            return Err(Error::unsupported(path, field, kind, allowed.join(", ")));
        }
    }
    serde_json::from_value(value)
        .map(Some)
        .map_err(|error| Error::invalid(path, 0, field, error, "the documented form"))
}

/// Every `type` in a tree of steps.
fn kinds(value: &Value) -> Vec<&str> {
    let mut found = Vec::new();
    let mut open = vec![value];
    while let Some(value) = open.pop() {
        match value {
            Value::Array(items) => open.extend(items),
            Value::Object(fields) => {
                found.extend(fields.get("type").and_then(Value::as_str));
                open.extend(fields.values());
            }
            _ => {}
        }
    }
    found
}

/// How tokens spell bytes, by the decoder that would undo it.
fn spelling(path: &Path, decoder: Option<&Value>, byte_fallback: bool) -> Result<Spelling> {
    let Some(decoder) = decoder else {
        return Ok(if byte_fallback {
            Spelling::SentencePiece { strips_first_space: true }
        } else {
            Spelling::ByteLevel
        });
    };
    let kinds = kinds(decoder);
    if let Some(unknown) = kinds.iter().find(|kind| !DECODERS.contains(kind)) {
        return Err(Error::unsupported(path, "decoder", unknown, DECODERS.join(", ")));
    }
    if kinds.contains(&"ByteLevel") {
        return Ok(Spelling::ByteLevel);
    }
    let keeps_space = decoder.get("prepend_scheme").and_then(Value::as_str) == Some("never");
    let strips_first_space =
        kinds.contains(&"Strip") || (kinds.contains(&"Metaspace") && !keeps_space);
    Ok(Spelling::SentencePiece { strips_first_space })
}

/// The ids a post-processor puts before and after a text.
fn around(path: &Path, processor: Option<&Value>) -> Result<(Vec<u32>, Vec<u32>)> {
    let Some(processor) = processor else { return Ok((Vec::new(), Vec::new())) };
    let refuse = |found: &str| {
        let allowed = "ByteLevel, Sequence, and one TemplateProcessing of special tokens";
        Err(Error::unsupported(path, "post_processor", found, allowed))
    };
    match processor.get("type").and_then(Value::as_str) {
        // Adjusts offsets only, which nobody reads.
        Some("ByteLevel") => Ok((Vec::new(), Vec::new())),
        Some("Sequence") => {
            let steps = processor.get("processors").and_then(Value::as_array);
            let mut ids = (Vec::new(), Vec::new());
            for step in steps.into_iter().flatten() {
                if step.get("type").and_then(Value::as_str) == Some("Sequence") {
                    return refuse("Sequence in Sequence");
                }
                let step = around(path, Some(step))?;
                ids.0.splice(0..0, step.0);
                ids.1.extend(step.1);
            }
            Ok(ids)
        }
        Some("TemplateProcessing") => match template_ids(processor) {
            Some(ids) => Ok(ids),
            None => refuse("a TemplateProcessing of another form"),
        },
        other => refuse(other.unwrap_or("a processor without a type")),
    }
}

fn template_ids(processor: &Value) -> Option<(Vec<u32>, Vec<u32>)> {
    let mut ids = (Vec::new(), Vec::new());
    let mut after = false;
    for item in processor.get("single")?.as_array()? {
        if item.get("Sequence").is_some() {
            after = true;
            continue;
        }
        let name = item.get("SpecialToken")?.get("id")?.as_str()?;
        let token = processor.get("special_tokens")?.get(name)?.get("ids")?.as_array()?;
        let token = token.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
        let token = token.collect::<Option<Vec<u32>>>()?;
        if after { &mut ids.1 } else { &mut ids.0 }.extend(token);
    }
    Some(ids)
}
