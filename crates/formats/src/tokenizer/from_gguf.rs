//! Vocabularies embedded in GGUF, rebuilt so that they give the ids of the tokenizer they were
//! converted from.
//!
//! GGUF keeps tokens, merges and scores but not the pre-tokenizer: only a name for it
//! (`tokenizer.ggml.pre`). The names known here are those of the families Dacapo runs, with the
//! expressions of their original `tokenizer.json`.

use super::added::AddedToken;
use super::bpe::{Description, Known, Merges};
use super::expression::Expression;
use super::model::Model;
use super::normalise::{Normaliser, Step as Normalise};
use super::pipeline::Pipeline;
use super::split::{Behaviour, PreTokenizer, Step};
use super::template::Template;
use super::token_bytes::{Spelling, TokenBytes};
use crate::gguf::Gguf;
use crate::{Error, Result, limits};
use ahash::{AHashMap, AHashSet};

/// `tokenizer.ggml.token_type`.
mod kind {
    pub(super) const NORMAL: i64 = 1;
    pub(super) const UNKNOWN: i64 = 2;
    pub(super) const CONTROL: i64 = 3;
    pub(super) const USER_DEFINED: i64 = 4;
}

pub(super) fn read(gguf: &Gguf) -> Result<(Pipeline, TokenBytes)> {
    match gguf.str("tokenizer.ggml.model")? {
        Some("gpt2") => read_byte_level(gguf),
        Some("llama") => read_sentence_piece(gguf),
        other => {
            let found = other.unwrap_or("nothing");
            Err(Error::unsupported(gguf.file(), "tokenizer.ggml.model", found, "gpt2, llama"))
        }
    }
}

fn read_byte_level(gguf: &Gguf) -> Result<(Pipeline, TokenBytes)> {
    let pre = Pre::named(gguf)?;
    let tokens = Tokens::read(gguf)?;
    let bytes = TokenBytes::new(gguf.file(), Spelling::ByteLevel, &tokens.vocab, &tokens.added)?;
    let mut merges = Merges::default();
    merge_pairs(gguf)?.into_iter().for_each(|(left, right)| merges.push(left, right));
    let ignore_merges = pre.ignore_merges();
    let bpe = Description { vocab: tokens.vocab, merges, ignore_merges, ..Description::default() };
    let bpe = bpe.build(gguf.file())?;
    let normaliser = Normaliser(pre.composes().then_some(Normalise::Nfc).into_iter().collect());
    let pipeline =
        Pipeline::new(gguf.file(), Model::Bpe(bpe), tokens.added, normaliser, pre.steps(gguf)?)?;
    let (prefix, suffix) = around(gguf, pre.adds_bos())?;
    Ok((pipeline.around(Template { prefix, suffix, ..Template::default() }), bytes))
}

/// The two texts of every merge of a byte-level vocabulary, in order.
pub(super) fn merge_pairs(gguf: &Gguf) -> Result<Vec<(&str, &str)>> {
    let stored = gguf.strings("tokenizer.ggml.merges")?.unwrap_or_default();
    if stored.len() > limits::MERGES {
        let allowed = format!("at most {}", limits::MERGES);
        return Err(gguf.refuse("tokenizer.ggml.merges", stored.len(), allowed));
    }
    let mut pairs = Vec::with_capacity(stored.len());
    for (number, merge) in stored.iter().enumerate() {
        // The space that separates is not the first character: that one belongs to a token.
        let first = merge.chars().next().map_or(0, char::len_utf8);
        let Some(space) = merge[first..].find(' ').map(|at| at + first) else {
            let field = format!("tokenizer.ggml.merges[{number}]");
            return Err(gguf.refuse(&field, merge, "two tokens with a space between"));
        };
        pairs.push((&merge[..space], &merge[space + 1..]));
    }
    Ok(pairs)
}

/// SentencePiece BPE: no merges are stored, a token's score decides how early it is merged.
fn read_sentence_piece(gguf: &Gguf) -> Result<(Pipeline, TokenBytes)> {
    let tokens = Tokens::read(gguf)?;
    let add_space = gguf.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let spelling = Spelling::SentencePiece { strips_first_space: add_space };
    let bytes = TokenBytes::new(gguf.file(), spelling, &tokens.vocab, &tokens.added)?;
    let known = merges_from_scores(gguf, &tokens)?;
    let bpe = Description {
        vocab: tokens.vocab,
        merges: Merges::default(),
        known,
        unknown: tokens.unknown,
        fuse_unknown: true,
        byte_fallback: true,
        ignore_merges: false,
    }
    .build(gguf.file())?;
    let what = Expression::literal(gguf.file(), "normaliser", " ")?;
    let mut steps = vec![Normalise::Replace { what, fixed: Some(1), with: "▁".to_owned() }];
    if add_space {
        steps.insert(0, Normalise::Prepend("▁".to_owned()));
    }
    let (normaliser, whole) = (Normaliser(steps), PreTokenizer::default());
    let pipeline = Pipeline::new(gguf.file(), Model::Bpe(bpe), tokens.added, normaliser, whole)?;
    let (prefix, suffix) = around(gguf, true)?;
    Ok((pipeline.around(Template { prefix, suffix, ..Template::default() }), bytes))
}

/// Every way to put a token together from two others, best score first: the rule by which the
/// original tokenizers were converted.
pub(super) fn merges_from_scores(gguf: &Gguf, tokens: &Tokens) -> Result<Vec<Known>> {
    let scores = gguf.array("tokenizer.ggml.scores")?;
    let Some(scores) = scores.filter(|scores| scores.len() == tokens.vocab.len()) else {
        let found = scores.map_or(0, crate::gguf::Array::len);
        let allowed = format!("{}, one for each token", tokens.vocab.len());
        return Err(gguf.refuse("tokenizer.ggml.scores", found, allowed));
    };
    let mut ids: AHashMap<&str, u32> = AHashMap::with_capacity(tokens.vocab.len());
    for (text, id) in &tokens.vocab {
        // The first of two equal texts is the one that encodes.
        ids.entry(text).or_insert(*id);
    }
    // By score, then by the characters on the left and on the right.
    let mut merges: Vec<((f64, usize, usize), Known)> = Vec::new();
    for (text, id) in &tokens.vocab {
        if text.len() > limits::PIECE_BYTES {
            let found = format!("{} bytes", text.len());
            let allowed = format!("at most {} bytes", limits::PIECE_BYTES);
            return Err(gguf.refuse(&format!("tokenizer.ggml.tokens[{id}]"), found, allowed));
        }
        let score = scores.float(*id as usize).unwrap_or(f64::NEG_INFINITY);
        let (chars, whole) = (text.chars().count(), ids[text.as_str()]);
        let mut last = None;
        for (count, (at, first)) in text.char_indices().enumerate() {
            let before = last.replace(first);
            let Some(before) = before else { continue };
            let (left, right) = text.split_at(at);
            if let (Some(&left), Some(&right)) = (ids.get(left), ids.get(right)) {
                let joint = (before, first);
                merges.push(((score, count, chars - count), Known { left, right, whole, joint }));
            }
        }
        if merges.len() > limits::MERGES {
            let found = format!("more than {} ways to merge", limits::MERGES);
            return Err(gguf.refuse("tokenizer.ggml.tokens", found, "fewer"));
        }
    }
    merges.sort_by(|((a, a_left, a_right), _), ((b, b_left, b_right), _)| {
        b.total_cmp(a).then_with(|| (b_left, b_right).cmp(&(a_left, a_right)))
    });
    Ok(merges.into_iter().map(|(_, known)| known).collect())
}

/// The ids that the file puts before and after a whole text.
pub(super) fn around(gguf: &Gguf, adds_bos: bool) -> Result<(Vec<u32>, Vec<u32>)> {
    let adds_bos = gguf.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
    let adds_eos = gguf.bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let id = |adds: bool, which: &str| {
        let id = gguf.uint(&format!("tokenizer.ggml.{which}_token_id"))?;
        let id = id.and_then(|id| u32::try_from(id).ok()).filter(|_| adds);
        Ok::<_, Error>(id.into_iter().collect::<Vec<_>>())
    };
    Ok((id(adds_bos, "bos")?, id(adds_eos, "eos")?))
}

/// The vocabulary with its kinds.
pub(super) struct Tokens {
    pub(super) vocab: Vec<(String, u32)>,
    pub(super) added: Vec<AddedToken>,
    pub(super) unknown: Option<String>,
}

impl Tokens {
    pub(super) fn read(gguf: &Gguf) -> Result<Self> {
        let Some(texts) = gguf.strings("tokenizer.ggml.tokens")?.filter(|texts| !texts.is_empty())
        else {
            return Err(gguf.refuse("tokenizer.ggml.tokens", "nothing", "an array of strings"));
        };
        if texts.len() as u64 > limits::VOCAB {
            let allowed = format!("at most {} tokens", limits::VOCAB);
            return Err(gguf.refuse("tokenizer.ggml.tokens", texts.len(), allowed));
        }
        let kinds = gguf.array("tokenizer.ggml.token_type")?;
        if let Some(kinds) = kinds.filter(|kinds| kinds.len() != texts.len()) {
            let allowed = format!("{}, one for each token", texts.len());
            return Err(gguf.refuse("tokenizer.ggml.token_type", kinds.len(), allowed));
        }
        let mut tokens = Self { vocab: Vec::new(), added: Vec::new(), unknown: None };
        let mut seen = AHashSet::new();
        for (id, text) in texts.iter().enumerate() {
            let kind = kinds.and_then(|kinds| kinds.int(id)).unwrap_or(kind::NORMAL);
            let special = matches!(kind, kind::CONTROL | kind::UNKNOWN);
            let id = id as u32;
            tokens.vocab.push((text.clone(), id));
            if kind == kind::UNKNOWN && tokens.unknown.is_none() {
                tokens.unknown = Some(text.clone());
            }
            // Of two tokens with one text, only the first can be recognised.
            if (special || kind == kind::USER_DEFINED) && !text.is_empty() && seen.insert(text) {
                let content = text.clone();
                tokens.added.push(AddedToken { id, content, special, ..AddedToken::default() });
            }
        }
        // An ordinary token of the same text comes first in the vocabulary and would take the id.
        let mut first: AHashMap<&str, u32> = AHashMap::new();
        for (text, id) in &tokens.vocab {
            first.entry(text).or_insert(*id);
        }
        tokens.added.retain(|token| first.get(token.content.as_str()) == Some(&token.id));
        Ok(tokens)
    }
}

/// The pre-tokenizers that files name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pre {
    Llama3,
    /// Llama 3's words, with merges and without a first token.
    Dbrx,
    Qwen2,
    Qwen35,
    DeepSeek3,
    SmolLm,
    Gpt2,
    Tekken,
    Default,
}

impl Pre {
    pub(super) fn named(gguf: &Gguf) -> Result<Self> {
        Ok(match gguf.str("tokenizer.ggml.pre")?.unwrap_or("default") {
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "pixtral" => Pre::Llama3,
            "dbrx" => Pre::Dbrx,
            "qwen2" | "deepseek-r1-qwen" => Pre::Qwen2,
            "qwen35" => Pre::Qwen35,
            "deepseek-v3" => Pre::DeepSeek3,
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" => Pre::SmolLm,
            "gpt-2" | "phi-2" | "mpt" | "olmo" => Pre::Gpt2,
            "tekken" => Pre::Tekken,
            "default" => Pre::Default,
            other => {
                let allowed =
                    "llama-bpe, dbrx, qwen2, qwen35, deepseek-v3, smollm, gpt-2, tekken, default";
                return Err(Error::unsupported(gguf.file(), "tokenizer.ggml.pre", other, allowed));
            }
        })
    }

    /// Whether texts are brought into one form before.
    pub(super) fn composes(self) -> bool {
        matches!(self, Pre::Qwen2 | Pre::Qwen35)
    }

    pub(super) fn ignore_merges(self) -> bool {
        matches!(self, Pre::Llama3 | Pre::Tekken)
    }

    pub(super) fn adds_bos(self) -> bool {
        matches!(self, Pre::Llama3 | Pre::Tekken)
    }

    /// How a text is cut into words.
    pub(super) fn cuts(self) -> Vec<Cut> {
        let bytes = |words| Cut::ByteLevel { words };
        match self {
            Pre::Llama3 | Pre::Dbrx => vec![Cut::Split(LLAMA3), bytes(false)],
            Pre::Qwen2 => vec![Cut::Split(QWEN2), bytes(false)],
            Pre::Qwen35 => vec![Cut::Split(QWEN35), bytes(false)],
            Pre::DeepSeek3 => {
                let words = [r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK3];
                words.map(Cut::Split).into_iter().chain([bytes(false)]).collect()
            }
            Pre::SmolLm => vec![Cut::Digits, bytes(true)],
            Pre::Gpt2 => vec![bytes(true)],
            Pre::Tekken => vec![Cut::Split(TEKKEN), bytes(false)],
            Pre::Default => {
                let signs = [r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", "[0-9][0-9][0-9]"];
                signs.map(Cut::Split).into_iter().chain([bytes(false)]).collect()
            }
        }
    }

    fn steps(self, gguf: &Gguf) -> Result<PreTokenizer> {
        let step = |cut: Cut| {
            Ok::<_, Error>(match cut {
                Cut::Split(expression) => {
                    let at = Expression::new(gguf.file(), "tokenizer.ggml.pre", expression)?;
                    Step::Split { at, behaviour: Behaviour::Isolated, invert: false }
                }
                Cut::Digits => Step::digits(true),
                Cut::ByteLevel { words } => Step::ByteLevel { add_prefix_space: false, words },
            })
        };
        Ok(PreTokenizer(self.cuts().into_iter().map(step).collect::<Result<_>>()?))
    }
}

/// A step of a pre-tokenizer.
pub(super) enum Cut {
    /// At what an expression matches.
    Split(&'static str),
    /// Around every digit.
    Digits,
    /// Into bytes, after GPT-2's words if so.
    ByteLevel { words: bool },
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2's with marks as parts of words.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// GPT-2's words without its last alternative, as the default chain uses it.
const WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
