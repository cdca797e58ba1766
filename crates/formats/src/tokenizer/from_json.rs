//! `tokenizer.json` as the `tokenizers` library writes it.
//!
//! Only what decoders need is read; normalisers and processors of other kinds of models are refused
//! by name.

use super::added::{self, AddedToken};
use super::bpe::{Bpe, Description, Merges as MergeList};
use super::expression::Expression;
use super::model::Model;
use super::normalise::{Normaliser, Step as Normalise};
use super::pipeline::Pipeline;
use super::precompiled::Precompiled;
use super::split::{Behaviour, PreTokenizer, Prepend, Step};
use super::template::Template;
use super::token_bytes::{Spelling, TokenBytes};
use super::unigram::Unigram;
use super::word_piece::WordPiece;
use crate::safetensors::json_error;
use crate::{Error, Result, limits};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
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
    unk_id: Option<usize>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    max_input_chars_per_word: Option<usize>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: Option<Vocab>,
    #[serde(default)]
    merges: Merges,
}

/// The vocabulary: ids by text, or texts with their scores in the order of their ids.
enum Vocab {
    Ids(Vec<(String, u32)>),
    Scores(Vec<(String, f64)>),
}

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Vocab;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Vocab, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    if pairs.len() as u64 == limits::VOCAB {
                        let cap = limits::VOCAB;
                        return Err(A::Error::custom(format!("more than {cap} tokens")));
                    }
                    pairs.push(pair);
                }
                Ok(Vocab::Ids(pairs))
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> std::result::Result<Vocab, A::Error> {
                let mut scores = Vec::new();
                while let Some(pair) = seq.next_element::<(String, f64)>()? {
                    if scores.len() as u64 == limits::VOCAB {
                        let cap = limits::VOCAB;
                        return Err(A::Error::custom(format!("more than {cap} tokens")));
                    }
                    scores.push(pair);
                }
                Ok(Vocab::Scores(scores))
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
    let mut model = file.model;
    let Some(vocab) = model.vocab.take() else {
        return Err(Error::invalid(path, 0, "model.vocab", "nothing", "a vocabulary"));
    };
    let added = file.added_tokens.0;
    added::check(path, &added)?;
    let part = |field, raw| part(path, field, raw);
    let decoder = part("decoder", file.decoder)?;
    let normaliser = normaliser(path, part("normalizer", file.normalizer)?)?;
    let pre_tokenizer = pre_tokenizer(path, part("pre_tokenizer", file.pre_tokenizer)?)?;
    let processor = part("post_processor", file.post_processor)?;
    let template = Template::read(path, processor.as_ref())?;

    let spelling = spelling(path, decoder.as_ref(), model.byte_fallback)?;
    let bytes = match &vocab {
        Vocab::Ids(ids) => TokenBytes::new(path, spelling, ids, &added)?,
        Vocab::Scores(scores) => {
            let ids = scores.iter().zip(0..).map(|((text, _), id)| (text.clone(), id));
            TokenBytes::new(path, spelling, &ids.collect::<Vec<_>>(), &added)?
        }
    };
    let model = model.build(path, vocab)?;
    let pipeline = Pipeline::new(path, model, added, normaliser, pre_tokenizer)?;
    Ok((pipeline.around(template), bytes))
}

impl ModelFields {
    /// The model of a vocabulary.
    fn build(self, path: &Path, vocab: Vocab) -> Result<Model> {
        let kind = self.r#type.as_deref();
        match (kind, vocab) {
            (None | Some("BPE"), Vocab::Ids(vocab)) => Ok(Model::Bpe(self.bpe(path, vocab)?)),
            (Some("WordPiece"), Vocab::Ids(vocab)) => {
                let unknown = self.unk_token.as_deref().unwrap_or("[UNK]");
                let mark = self.continuing_subword_prefix.as_deref().unwrap_or("##");
                let most = self.max_input_chars_per_word.unwrap_or(100);
                Ok(Model::WordPiece(WordPiece::new(path, vocab, unknown, mark, most)?))
            }
            (None | Some("Unigram"), Vocab::Scores(vocab)) => {
                let missing =
                    || Error::invalid(path, 0, "model.unk_id", "none", "the id of a token");
                let unknown = self.unk_id.ok_or_else(missing)?;
                Ok(Model::Unigram(Unigram::new(path, &vocab, unknown, self.byte_fallback)?))
            }
            (Some("BPE" | "WordPiece" | "Unigram"), _) => {
                let allowed = "a map of ids, or a list of scores for Unigram";
                Err(Error::invalid(path, 0, "model.vocab", "another form", allowed))
            }
            (Some(kind), _) => {
                Err(Error::unsupported(path, "model.type", kind, "BPE, WordPiece, Unigram"))
            }
        }
    }

    fn bpe(self, path: &Path, vocab: Vec<(String, u32)>) -> Result<Bpe> {
        let affixes = [
            ("model.continuing_subword_prefix", &self.continuing_subword_prefix),
            ("model.end_of_word_suffix", &self.end_of_word_suffix),
        ];
        for (field, affix) in affixes {
            if let Some(affix) = affix.as_ref().filter(|affix| !affix.is_empty()) {
                return Err(Error::unsupported(path, field, affix, "none"));
            }
        }
        if let Some(dropout) = self.dropout.filter(|&p| p != 0.0) {
            return Err(Error::unsupported(path, "model.dropout", dropout, "none"));
        }
        Description {
            vocab,
            merges: self.merges.0,
            known: Vec::new(),
            unknown: self.unk_token,
            fuse_unknown: self.fuse_unk,
            byte_fallback: self.byte_fallback,
            ignore_merges: self.ignore_merges,
        }
        .build(path)
    }
}

const DECODERS: &[&str] = &[
    "Sequence",
    "ByteLevel",
    "ByteFallback",
    "Fuse",
    "Replace",
    "Strip",
    "Metaspace",
    "WordPiece",
];

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
    BertNormalizer(BertNormaliser),
    StripAccents,
    Precompiled { precompiled_charsmap: String },
}

#[derive(Deserialize)]
struct BertNormaliser {
    clean_text: bool,
    handle_chinese_chars: bool,
    strip_accents: Option<bool>,
    lowercase: bool,
}

impl BertNormaliser {
    fn steps(&self) -> Vec<Normalise> {
        let accents = self.strip_accents.unwrap_or(self.lowercase);
        [
            (self.clean_text, Normalise::Clean),
            (self.handle_chinese_chars, Normalise::SpaceIdeographs),
            (accents, Normalise::Nfd),
            (accents, Normalise::StripAccents),
            (self.lowercase, Normalise::Lowercase),
        ]
        .into_iter()
        .filter_map(|(on, step)| on.then_some(step))
        .collect()
    }
}

const NORMALISERS: &[&str] = &[
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Prepend",
    "Replace",
    "Strip",
    "Lowercase",
    "StripAccents",
    "BertNormalizer",
    "Precompiled",
];

fn normaliser(path: &Path, value: Option<Value>) -> Result<Normaliser> {
    const FIELD: &str = "normalizer";
    let Some(value) = value else { return Ok(Normaliser::default()) };
    let steps = steps(path, (FIELD, "normalizers"), value, NORMALISERS)?;
    let mut all = Vec::new();
    for step in steps {
        let step = match read_step(path, FIELD, step)? {
            NormaliserStep::NFC => Normalise::Nfc,
            NormaliserStep::NFD => Normalise::Nfd,
            NormaliserStep::NFKC => Normalise::Nfkc,
            NormaliserStep::NFKD => Normalise::Nfkd,
            NormaliserStep::Lowercase => Normalise::Lowercase,
            NormaliserStep::StripAccents => Normalise::StripAccents,
            NormaliserStep::Precompiled { precompiled_charsmap: table } => {
                Normalise::Precompiled(Precompiled::read(path, &table)?)
            }
            NormaliserStep::BertNormalizer(bert) => {
                all.extend(bert.steps());
                continue;
            }
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
        };
        all.push(step);
    }
    Ok(Normaliser(all))
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
    WhitespaceSplit,
    BertPreTokenizer,
}

fn yes() -> bool {
    true
}

const PRE_TOKENIZERS: &[&str] = &[
    "Split",
    "ByteLevel",
    "Digits",
    "Metaspace",
    "Punctuation",
    "Whitespace",
    "WhitespaceSplit",
    "BertPreTokenizer",
];

fn pre_tokenizer(path: &Path, value: Option<Value>) -> Result<PreTokenizer> {
    const FIELD: &str = "pre_tokenizer";
    let Some(value) = value else { return Ok(PreTokenizer::default()) };
    let steps = steps(path, (FIELD, "pretokenizers"), value, PRE_TOKENIZERS)?;
    let mut all = Vec::new();
    for step in steps {
        let step = match read_step(path, FIELD, step)? {
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
            PreTokenizerStep::WhitespaceSplit => Step::spaces(),
            PreTokenizerStep::BertPreTokenizer => {
                all.push(Step::spaces());
                Step::punctuation(Behaviour::Isolated)
            }
        };
        all.push(step);
    }
    Ok(PreTokenizer(all))
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
    if kinds.contains(&"WordPiece") {
        return Ok(Spelling::WordPiece);
    }
    let keeps_space = decoder.get("prepend_scheme").and_then(Value::as_str) == Some("never");
    let strips_first_space =
        kinds.contains(&"Strip") || (kinds.contains(&"Metaspace") && !keeps_space);
    Ok(Spelling::SentencePiece { strips_first_space })
}
