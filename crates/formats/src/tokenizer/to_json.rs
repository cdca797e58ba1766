//! The vocabulary of a GGUF file as the files of a folder, for programs that read no GGUF.

use super::added::AddedToken;
use super::from_gguf::{Cut, Pre, Tokens, around, merge_pairs, merges_from_scores};
use crate::chat::template_fields;
use crate::gguf::Gguf;
use crate::{Error, Result};
use ahash::AHashSet;
use serde_json::{Map, Value, json};

/// `tokenizer.json` and `tokenizer_config.json`: their names and contents.
pub(super) fn files(gguf: &Gguf) -> Result<[(&'static str, Value); 2]> {
    let tokenizer = match gguf.str("tokenizer.ggml.model")? {
        Some("llama") => sentence_piece(gguf)?,
        // Any other is refused when the tokenizer is made.
        _ => byte_level(gguf)?,
    };
    let mut config = template_fields(gguf)?;
    config.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
    config.insert("clean_up_tokenization_spaces".into(), false.into());
    Ok([("tokenizer.json", tokenizer), ("tokenizer_config.json", config.into())])
}

fn byte_level(gguf: &Gguf) -> Result<Value> {
    let pre = Pre::named(gguf)?;
    let tokens = Tokens::read(gguf)?;
    let merges = merge_pairs(gguf)?.into_iter().map(|(left, right)| json!([left, right]));
    let cut = |cut: Cut| match cut {
        Cut::Split(expression) => json!({
            "type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false,
        }),
        Cut::Digits => json!({"type": "Digits", "individual_digits": true}),
        Cut::ByteLevel { words } => bytes(false, words),
    };
    let cuts: Vec<Value> = pre.cuts().into_iter().map(cut).collect();
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added(&tokens.added),
        "normalizer": pre.composes().then(|| json!({"type": "NFC"})),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "post_processor": template(gguf, pre.adds_bos(), &tokens)?,
        "decoder": bytes(true, true),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": pre.ignore_merges(),
            "vocab": vocab(&tokens),
            "merges": merges.collect::<Vec<_>>(),
        },
    }))
}

fn bytes(add_prefix_space: bool, words: bool) -> Value {
    json!({
        "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": words,
    })
}

fn sentence_piece(gguf: &Gguf) -> Result<Value> {
    let tokens = Tokens::read(gguf)?;
    let add_space = gguf.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let text = |id: u32| tokens.vocab[id as usize].0.as_str();
    let merges = merges_from_scores(gguf, &tokens)?;
    let merges = merges.into_iter().map(|merge| json!([text(merge.left), text(merge.right)]));
    let replace = |what: &str, with: &str| json!({"type": "Replace", "pattern": {"String": what}, "content": with});
    let mut normalizers = vec![replace(" ", "▁")];
    let mut decoders =
        vec![replace("▁", " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
    if add_space {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added(&tokens.added),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": template(gguf, true, &tokens)?,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": &tokens.unknown,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": true,
            "ignore_merges": false,
            "vocab": vocab(&tokens),
            "merges": merges.collect::<Vec<_>>(),
        },
    }))
}

/// Ids by text; of two tokens with one text, the first encodes.
fn vocab(tokens: &Tokens) -> Map<String, Value> {
    let mut seen = AHashSet::with_capacity(tokens.vocab.len());
    let first = tokens.vocab.iter().filter(|(text, _)| seen.insert(text.as_str()));
    first.map(|(text, id)| (text.clone(), (*id).into())).collect()
}

fn added(tokens: &[AddedToken]) -> Vec<Value> {
    let one = |token: &AddedToken| {
        json!({
            "id": token.id,
            "content": token.content,
            "single_word": token.single_word,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": token.normalized,
            "special": token.special,
        })
    };
    tokens.iter().map(one).collect()
}

/// What is put around a whole text, or nothing.
fn template(gguf: &Gguf, adds_bos: bool, tokens: &Tokens) -> Result<Option<Value>> {
    let (prefix, suffix) = around(gguf, adds_bos)?;
    if prefix.is_empty() && suffix.is_empty() {
        return Ok(None);
    }
    let text = |id: &u32| {
        let known = tokens.vocab.get(*id as usize).map(|(text, _)| text.clone());
        known.ok_or_else(|| Error::unsupported(gguf.file(), "a special token id", id, "a token"))
    };
    let [before, after] =
        [prefix, suffix].map(|ids| ids.iter().map(text).collect::<Result<Vec<_>>>());
    let (before, after) = (before?, after?);
    let special = |text: &String| json!({"SpecialToken": {"id": text, "type_id": 0}});
    let around = |sequences: &[Value]| -> Vec<Value> {
        let inner = sequences.iter().cloned();
        before.iter().map(special).chain(inner).chain(after.iter().map(special)).collect()
    };
    let sequence = |id: &str, kind: u32| json!({"Sequence": {"id": id, "type_id": kind}});
    let ids = around_ids(tokens, before.iter().chain(&after));
    Ok(Some(json!({
        "type": "TemplateProcessing",
        "single": around(&[sequence("A", 0)]),
        "pair": around(&[sequence("A", 0), sequence("B", 1)]),
        "special_tokens": ids,
    })))
}

fn around_ids<'a>(tokens: &Tokens, texts: impl Iterator<Item = &'a String>) -> Map<String, Value> {
    let one = |text: &String| {
        let id = tokens.vocab.iter().find(|(other, _)| other == text).map(|(_, id)| *id);
        (text.clone(), json!({"id": text, "ids": [id], "tokens": [text]}))
    };
    texts.map(one).collect()
}
