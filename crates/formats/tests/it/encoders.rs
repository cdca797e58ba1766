//! WordPiece and Unigram ids against the `tokenizers` crate, over 10,000 strings of every kind: single texts, and pairs with
//! the kinds of their tokens, cut and whole. The tokenizers are made here, with the normalisers and words of published ones.

use crate::random;
use formats::tokenizer::Tokenizer;
use random::Random;
use serde_json::{Value, json};
use std::path::Path;
use tokenizers::PostProcessor;
use tokenizers::utils::truncation::{TruncationParams, TruncationStrategy};

const COUNT: usize = 10_000;

/// Strings of words, other scripts, marks, controls, spaces and special tokens.
fn strings(count: usize, seed: u64) -> Vec<String> {
    const PIECES: [&str; 40] = [
        "the",
        "The",
        "CAFÉ",
        "cafe\u{301}",
        "naïve",
        "北京",
        "日本語",
        "ß",
        "Σίσυφος",
        "ﬁne",
        "½",
        "①",
        "\t",
        "\n",
        "  ",
        "\u{a0}",
        "\u{3000}",
        "\u{200b}",
        "\u{200d}",
        "👩‍👩‍👧",
        "🇩🇪",
        "don't",
        "U.S.A.",
        "state-of-the-art",
        "...",
        "?!",
        "[CLS]",
        "[SEP]",
        "<s>",
        "</s>",
        "##ing",
        "unbelievably",
        "lighthouse",
        "12345",
        "3.14",
        "İstanbul",
        "\u{0}",
        "\u{fffd}",
        "𝔘𝔫𝔦",
        "क्षि",
    ];
    let mut random = Random(seed);
    let mut one = || {
        let mut out = String::new();
        for _ in 0..random.below(20) {
            match random.below(8) {
                0 => out.push(char::from_u32(random.below(0x11_0000) as u32).unwrap_or('x')),
                1 => (0..random.below(9))
                    .for_each(|_| out.push((0x20 + random.below(0x5f) as u8).into())),
                _ => out.push_str(PIECES[random.below(PIECES.len())]),
            }
            if random.below(3) > 0 {
                out.push(' ');
            }
        }
        out
    };
    (0..count).map(|_| one()).collect()
}

/// Every character of the pieces, and some words.
fn words() -> Vec<String> {
    let mut words: Vec<String> =
        ["the", "cafe", "naive", "light", "house", "un", "believ", "ably", "don", "state", "of"]
            .map(str::to_owned)
            .into();
    words.extend((0x21..0x7f_u8).map(|byte| char::from(byte).to_string()));
    words.extend(
        ["北", "京", "日", "本", "ß", "σ", "ι", "½", "¼", "é", "ï", "i", "क", "ष"]
            .map(str::to_owned),
    );
    words
}

fn special(id: usize, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": true})
}

fn template(first: (&str, usize), last: (&str, usize), kinds: bool, doubled: bool) -> Value {
    let token = |name: &str, kind: usize| json!({"SpecialToken": {"id": name, "type_id": kind}});
    let text = |name: &str, kind: usize| json!({"Sequence": {"id": name, "type_id": kind}});
    let two = usize::from(kinds);
    let mut pair = vec![token(first.0, 0), text("A", 0), token(last.0, 0)];
    pair.extend(doubled.then(|| token(last.0, 0)));
    pair.extend([text("B", two), token(last.0, two)]);
    let ids = |(name, id): (&str, usize)| json!({"id": name, "ids": [id], "tokens": [name]});
    json!({"type": "TemplateProcessing", "pair": pair,
           "single": [token(first.0, 0), text("A", 0), token(last.0, 0)],
           "special_tokens": {first.0: ids(first), last.0: ids(last)}})
}

/// BERT's, with or without case.
fn word_piece(lowercase: bool) -> Value {
    let mut vocab = vec!["[PAD]".to_owned(), "[UNK]".into(), "[CLS]".into(), "[SEP]".into()];
    for word in words() {
        vocab.push(format!("##{word}"));
        vocab.push(word);
    }
    let ids: serde_json::Map<String, Value> =
        vocab.iter().enumerate().map(|(id, word)| (word.clone(), id.into())).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "[PAD]"), special(1, "[UNK]"), special(2, "[CLS]"), special(3, "[SEP]")],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                       "strip_accents": null, "lowercase": lowercase},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": template(("[CLS]", 2), ("[SEP]", 3), true, false),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": ids},
    })
}

/// XLM-RoBERTa's, with NFKC instead of its table.
fn unigram(byte_fallback: bool) -> Value {
    let mut vocab = vec![
        ("<s>".to_owned(), 0.0),
        ("<pad>".into(), 0.0),
        ("</s>".into(), 0.0),
        ("<unk>".into(), 0.0),
    ];
    let mut random = Random(5);
    for word in words() {
        vocab.push((format!("▁{word}"), -1.0 - random.below(900) as f64 / 100.0));
        vocab.push((word, -1.0 - random.below(900) as f64 / 100.0));
    }
    vocab.push(("▁".into(), -3.25));
    if byte_fallback {
        vocab.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), -20.0)));
    }
    let vocab: Vec<Value> = vocab.iter().map(|(word, score)| json!([word, score])).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<s>"), special(1, "<pad>"), special(2, "</s>"), special(3, "<unk>")],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}]},
        "post_processor": template(("<s>", 0), ("</s>", 2), false, true),
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "model": {"type": "Unigram", "unk_id": 3, "vocab": vocab, "byte_fallback": byte_fallback},
    })
}

fn check(name: &str, file: &Value) {
    let bytes = serde_json::to_vec(file).unwrap();
    let ours = Tokenizer::from_json(Path::new(name), &bytes).unwrap();
    let mut theirs = tokenizers::Tokenizer::from_bytes(&bytes).unwrap();
    let texts = strings(COUNT, 11);
    for text in &texts {
        let reference = theirs.encode(text.as_str(), true).unwrap();
        assert_eq!(ours.encode(text, true).unwrap(), reference.get_ids(), "{name} {text:?}");
    }
    let mut random = Random(3);
    let added = theirs.get_post_processor().unwrap().added_tokens(true);
    for (first, second) in texts.iter().zip(&texts[1..]).take(COUNT / 4) {
        // Both halves are equal: the reference stops reading a text that is too long, and then no longer knows
        // which of two is longer and gets the odd token.
        let max_length = 8 + random.below(60);
        let max_length = max_length + (max_length - added) % 2;
        let strategy = TruncationStrategy::LongestFirst;
        let cut = TruncationParams { max_length, strategy, ..TruncationParams::default() };
        theirs.with_truncation(Some(cut)).unwrap();
        let reference = theirs.encode((first.as_str(), second.as_str()), true).unwrap();
        let pair = ours.encode_pair(first, second, max_length).unwrap();
        let (ids, kinds): (Vec<u32>, Vec<u32>) = pair.iter().map(|t| (t.id, t.kind)).unzip();
        assert_eq!(ids, reference.get_ids(), "{name} {max_length} {first:?} {second:?}");
        assert_eq!(kinds, reference.get_type_ids(), "{name}");
    }
}

#[test]
fn word_pieces_are_those_of_the_reference() {
    check("uncased", &word_piece(true));
    check("cased", &word_piece(false));
}

#[test]
fn unigrams_are_those_of_the_reference() {
    check("unigram", &unigram(false));
    check("unigram with bytes", &unigram(true));
}

#[test]
fn hostile_vocabularies_are_refused() {
    let refused = |file: &Value| {
        Tokenizer::from_json(Path::new("x"), &serde_json::to_vec(file).unwrap())
            .unwrap_err()
            .to_string()
    };
    let mut file = unigram(false);
    file["model"]["unk_id"] = json!(100_000);
    assert!(refused(&file).contains("unk_id"), "{}", refused(&file));
    let mut file = unigram(false);
    file["model"]["vocab"] = json!({"a": 1});
    assert!(refused(&file).contains("vocab"));
    let mut file = word_piece(true);
    file["model"]["unk_token"] = json!("[NONE]");
    assert!(refused(&file).contains("unknown token"));
    let mut file = unigram(false);
    file["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "////AAAA"});
    assert!(refused(&file).contains("precompiled_charsmap"));
}
