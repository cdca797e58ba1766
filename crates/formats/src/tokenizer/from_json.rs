//! `tokenizer.json` as the `tokenizers` library writes it.
//!
//! Only what decoders need is read; normalisers and processors of other kinds of models are refused
//! by name.

use super::added::{self, AddedToken};
use super::bpe::{Description, Merges as MergeList};
use super::expression::Expression;
use super::normalise::{Normaliser, Step as Normalise};
use super::pipeline::Pipeline;
use super::split::{Behaviour, PreTokenizer, Prepend, Step};
use super::token_bytes::{Spelling, TokenBytes};
use crate::safetensors::json_error;
use crate::{Error, Result, limits};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::fmt;
use std::path::Path;

#[derive(Deserialize)]
struct File<'a> {
    #[serde(default)]
    added_tokens: AddedTokens,
    // As text: parsed, one byte of it may take up 30 bytes of memory.
    #[serde(borrow)]
    normalizer: Option<&'a RawValue>,
    #[serde(borrow)]
    pre_tokenizer: Option<&'a RawValue>,
    #[serde(borrow)]
    post_processor: Option<&'a RawValue>,
    #[serde(borrow)]
    decoder: Option<&'a RawValue>,
    model: ModelFields,
}

/// All added tokens, counted while they are read.
#[derive(Default)]
struct AddedTokens(Vec<AddedToken>);

impl<'de> Deserialize<'de> for AddedTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = AddedTokens;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of added tokens")
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> std::result::Result<AddedTokens, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = seq.next_element()? {
                    if tokens.len() == limits::ADDED_TOKENS {
                        let cap = limits::ADDED_TOKENS;
                        return Err(A::Error::custom(format!("more than {cap} added tokens")));
                    }
                    tokens.push(token);
                }
                Ok(AddedTokens(tokens))
            }
        }
        deserializer.deserialize_seq(Visit)
    }
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
struct Merges(MergeList);

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
                let mut merges = MergeList::default();
                while let Some(Merge(left, right)) = seq.next_element()? {
                    if merges.len() == limits::MERGES {
                        let cap = limits::MERGES;
                        return Err(A::Error::custom(format!("more than {cap} merges")));
                    }
                    merges.push(&left, &right);
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
    let added = file.added_tokens.0;
    added::check(path, &added)?;
    let part = |field, raw| part(path, field, raw);
    let decoder = part("decoder", file.decoder)?;
    let normaliser = normaliser(path, part("normalizer", file.normalizer)?)?;
    let pre_tokenizer = pre_tokenizer(path, part("pre_tokenizer", file.pre_tokenizer)?)?;
    let processor = part("post_processor", file.post_processor)?;
    let (prefix, suffix) = around(path, processor.as_ref())?;

    let spelling = spelling(path, decoder.as_ref(), model.byte_fallback)?;
    let bytes = TokenBytes::new(path, spelling, &vocab, &added)?;
    let bpe = Description {
        vocab,
        merges: model.merges.0,
        known: Vec::new(),
        unknown: model.unk_token,
        fuse_unknown: model.fuse_unk,
        byte_fallback: model.byte_fallback,
        ignore_merges: model.ignore_merges,
    }
    .build(path)?;
    let pipeline = Pipeline::new(path, bpe, added, normaliser, pre_tokenizer)?;
    Ok((pipeline.around(prefix, suffix), bytes))
}

const DECODERS: &[&str] =
    &["Sequence", "ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace"];

/// One part of the pipeline, once it is known to be small.
fn part(path: &Path, field: &str, raw: Option<&RawValue>) -> Result<Option<Value>> {
    let Some(raw) = raw else { return Ok(None) };
    if raw.get().len() > limits::PIPELINE_BYTES {
        let found = format!("{} bytes", raw.get().len());
        let allowed = format!("at most {} bytes", limits::PIPELINE_BYTES);
        return Err(Error::invalid(path, 0, field, found, allowed));
    }
    let value = serde_json::from_str(raw.get());
    value.map_err(|error| Error::invalid(path, 0, field, error, "JSON")).map(Some)
}

/// The steps of a part: `value` itself, or what its sequences are made of. Every step has a type,
/// one of `allowed`.
fn steps(
    path: &Path,
    (field, list): (&str, &str),
    value: Value,
    allowed: &[&str],
) -> Result<Vec<Value>> {
    let mut open = vec![value];
    let mut steps = Vec::new();
    while let Some(mut value) = open.pop() {
        match value.get("type").and_then(Value::as_str) {
            Some("Sequence") => match value.get_mut(list).map(Value::take) {
                Some(Value::Array(items)) => open.extend(items.into_iter().rev()),
                _ => {
                    let allowed = format!("a list of {list}");
                    return Err(Error::invalid(path, 0, field, "a Sequence without one", allowed));
                }
            },
            Some(kind) if allowed.contains(&kind) => steps.push(value),
            kind => {
                let found = kind.unwrap_or("a step without a type");
                let allowed = format!("Sequence, {}", allowed.join(", "));
                return Err(Error::unsupported(path, field, found, allowed));
            }
        }
    }
    Ok(steps)
}

fn read_step<T: for<'de> Deserialize<'de>>(path: &Path, field: &str, step: Value) -> Result<T> {
    serde_json::from_value(step)
        .map_err(|error| Error::invalid(path, 0, field, error, "the documented form"))
}

#[derive(Deserialize)]
enum Pattern {
    String(String),
    Regex(String),
}

impl Pattern {
    fn compile(&self, path: &Path, field: &str) -> Result<Expression> {
        match self {
            Pattern::String(text) => Expression::literal(path, field, text),
            Pattern::Regex(source) => Expression::new(path, field, source),
        }
    }
}

#[derive(Deserialize)]
#[serde(tag = "type")]
#[expect(clippy::upper_case_acronyms, reason = "the file's spelling")]
enum NormaliserStep {
    NFC,
    NFD,
    NFKC,
    NFKD,
    Lowercase,
    Prepend { prepend: String },
    Replace { pattern: Pattern, content: String },
    Strip { strip_left: bool, strip_right: bool },
}

const NORMALISERS: &[&str] =
    &["NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Strip", "Lowercase"];

fn normaliser(path: &Path, value: Option<Value>) -> Result<Normaliser> {
    const FIELD: &str = "normalizer";
    let Some(value) = value else { return Ok(Normaliser::default()) };
    let steps = steps(path, (FIELD, "normalizers"), value, NORMALISERS)?;
    let steps = steps.into_iter().map(|step| {
        Ok(match read_step(path, FIELD, step)? {
            NormaliserStep::NFC => Normalise::Nfc,
            NormaliserStep::NFD => Normalise::Nfd,
            NormaliserStep::NFKC => Normalise::Nfkc,
            NormaliserStep::NFKD => Normalise::Nfkd,
            NormaliserStep::Lowercase => Normalise::Lowercase,
            NormaliserStep::Prepend { prepend } => Normalise::Prepend(prepend),
            NormaliserStep::Strip { strip_left: left, strip_right: right } => {
                Normalise::Strip { left, right }
            }
            NormaliserStep::Replace { pattern, content: with } => {
                let fixed = match &pattern {
                    Pattern::String(text) => Some(text.len()),
                    Pattern::Regex(_) => None,
                };
                Normalise::Replace { what: pattern.compile(path, FIELD)?, fixed, with }
            }
        })
    });
    Ok(Normaliser(steps.collect::<Result<_>>()?))
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum PreTokenizerStep {
    Split {
        pattern: Pattern,
        behavior: Behaviour,
        invert: bool,
    },
    ByteLevel {
        add_prefix_space: bool,
        #[serde(default = "yes")]
        use_regex: bool,
    },
    Digits {
        individual_digits: bool,
    },
    Metaspace {
        replacement: char,
        add_prefix_space: Option<bool>,
        prepend_scheme: Option<Prepend>,
        split: Option<bool>,
    },
    Punctuation {
        behavior: Option<Behaviour>,
    },
    Whitespace,
}

fn yes() -> bool {
    true
}

const PRE_TOKENIZERS: &[&str] =
    &["Split", "ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace"];

fn pre_tokenizer(path: &Path, value: Option<Value>) -> Result<PreTokenizer> {
    const FIELD: &str = "pre_tokenizer";
    let Some(value) = value else { return Ok(PreTokenizer::default()) };
    let steps = steps(path, (FIELD, "pretokenizers"), value, PRE_TOKENIZERS)?;
    let steps = steps.into_iter().map(|step| {
        Ok(match read_step(path, FIELD, step)? {
            PreTokenizerStep::Split { pattern, behavior: behaviour, invert } => {
                Step::Split { at: pattern.compile(path, FIELD)?, behaviour, invert }
            }
            PreTokenizerStep::ByteLevel { add_prefix_space, use_regex: words } => {
                Step::ByteLevel { add_prefix_space, words }
            }
            PreTokenizerStep::Digits { individual_digits } => Step::digits(individual_digits),
            PreTokenizerStep::Metaspace {
                replacement: mark,
                add_prefix_space,
                prepend_scheme,
                split,
            } => {
                let prepend = prepend_scheme.unwrap_or(Prepend::Always);
                if add_prefix_space == Some(false) && prepend != Prepend::Never {
                    let found = "add_prefix_space false with another prepend_scheme";
                    return Err(Error::invalid(path, 0, FIELD, found, "never"));
                }
                Step::Metaspace { mark, prepend, split: split.unwrap_or(true) }
            }
            PreTokenizerStep::Punctuation { behavior } => {
                Step::punctuation(behavior.unwrap_or(Behaviour::Isolated))
            }
            PreTokenizerStep::Whitespace => Step::whitespace()?,
        })
    });
    Ok(PreTokenizer(steps.collect::<Result<_>>()?))
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
        // Adjusts only offsets, which are not used here.
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
