//! Every kind of step that a `tokenizer.json` may have, in random chains, against the `tokenizers`
//! crate, which defines what they do.

use crate::random;
use formats::tokenizer::Tokenizer;
use random::Random;
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

const BEHAVIOURS: [&str; 5] =
    ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"];
const EXPRESSIONS: [&str; 9] = [
    r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\s+(?!\S)",
    r"\s+",
    "[ab]+",
    "x*",
    "b|ab|a",
    r"\p{N}",
    r"^a|b$",
];

fn normaliser(random: &mut Random) -> Value {
    let step = |random: &mut Random| match random.below(12) {
        0 => json!({"type": "NFC"}),
        1 => json!({"type": "NFD"}),
        2 => json!({"type": "NFKC"}),
        3 => json!({"type": "NFKD"}),
        4 => json!({"type": "Lowercase"}),
        5 => json!({"type": "Strip", "strip_left": random.coin(), "strip_right": random.coin()}),
        6 => json!({"type": "Prepend", "prepend": "▁"}),
        7 => json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
        8 => json!({"type": "Replace", "pattern": {"String": "ab"}, "content": "xyz "}),
        9 => json!({"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}),
        10 => json!({"type": "Replace", "pattern": {"String": "a"}, "content": ""}),
        _ => {
            // The crate loses the origin of text that replaces an empty match, and then emits it
            // twice.
            let pattern = Some(random.one(&EXPRESSIONS)).filter(|&&e| e != "x*").unwrap_or(&"x+");
            json!({"type": "Replace", "pattern": {"Regex": pattern}, "content": "b "})
        }
    };
    match random.below(4) {
        0 => Value::Null,
        1 => step(random),
        _ => {
            let steps: Vec<Value> = (0..random.below(4)).map(|_| step(random)).collect();
            json!({"type": "Sequence", "normalizers": steps})
        }
    }
}

fn pre_tokenizer(random: &mut Random, first: bool) -> Value {
    let step = |random: &mut Random, first: bool| {
        let behaviour = random.one(&BEHAVIOURS);
        match random.below(9) {
            0 | 1 => json!({
                "type": "Split", "pattern": {"Regex": random.one(&EXPRESSIONS)},
                "behavior": behaviour, "invert": random.coin(),
            }),
            2 => json!({
                "type": "Split", "pattern": {"String": random.one(&[" ", "a", "ab", "\n"])},
                "behavior": behaviour, "invert": random.coin(),
            }),
            3 | 4 => json!({
                "type": "ByteLevel", "add_prefix_space": random.coin(), "trim_offsets": true,
                "use_regex": random.coin(),
            }),
            5 => json!({"type": "Digits", "individual_digits": random.coin()}),
            6 => {
                // The crate uses a piece's position in the original text, which is only approximate for
                // nested pieces and for normalised text.
                let schemes: &[&str] =
                    if first { &["first", "never", "always"] } else { &["never", "always"] };
                json!({
                    "type": "Metaspace", "replacement": "▁", "prepend_scheme": random.one(schemes),
                    "split": random.coin(),
                })
            }
            7 => json!({"type": "Punctuation", "behavior": behaviour}),
            _ => json!({"type": "Whitespace"}),
        }
    };
    match random.below(5) {
        0 => Value::Null,
        1 | 2 => step(random, first),
        _ => {
            let steps: Vec<Value> =
                (0..random.below(4)).map(|at| step(random, first && at == 0)).collect();
            json!({"type": "Sequence", "pretokenizers": steps})
        }
    }
}

fn added(random: &mut Random, vocab: usize) -> Value {
    let texts = ["<|im_end|>", "<|im", "ab", "abab", " ", "b c", "ä", "Z", "\n\n", "a"];
    let mut tokens = Vec::new();
    for text in texts {
        if random.below(3) == 0 {
            tokens.push(json!({
                "id": vocab + tokens.len(), "content": format!("{text}+"),
                "single_word": random.below(4) == 0, "lstrip": random.below(4) == 0,
                "rstrip": random.below(4) == 0, "normalized": random.coin(), "special": random.coin(),
            }));
        }
    }
    Value::Array(tokens)
}

/// A small vocabulary of either kind: characters, GPT-2's alphabet, marks, bytes, and merges.
fn model(random: &mut Random) -> Value {
    let mut texts: Vec<String> = "abcxyz ▁ĠĊ123'.,<|+>_imend"
        .chars()
        .map(String::from)
        .chain(["<unk>".to_owned()])
        .collect();
    if random.coin() {
        texts.extend(('\u{a1}'..='\u{17f}').map(String::from));
    }
    let byte_fallback = random.coin();
    if byte_fallback {
        texts.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    }
    texts.sort();
    texts.dedup();
    let mut merges: Vec<[String; 2]> = Vec::new();
    for _ in 0..random.below(40) {
        let (left, right) = (random.one(&texts).clone(), random.one(&texts).clone());
        let whole = format!("{left}{right}");
        if left.len() + right.len() < 12 && !whole.contains(['<', '+']) {
            if !texts.contains(&whole) {
                texts.push(whole);
            }
            if !merges.iter().any(|[l, r]| *l == left && *r == right) {
                merges.push([left, right]);
            }
        }
    }
    let vocab: serde_json::Map<String, Value> =
        texts.iter().enumerate().map(|(id, text)| (text.clone(), id.into())).collect();
    json!({
        "type": "BPE", "dropout": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "byte_fallback": byte_fallback,
        "unk_token": if random.below(3) > 0 { json!("<unk>") } else { Value::Null },
        "fuse_unk": random.coin(), "ignore_merges": random.coin(),
        "vocab": vocab, "merges": merges,
    })
}

fn text(random: &mut Random) -> String {
    let parts = [
        "a",
        "b",
        "ab",
        "abab",
        " ",
        "  ",
        "\n",
        "\r\n",
        "1",
        "123",
        "x",
        "z'",
        "'s",
        "don't",
        ".",
        ",,",
        "ä",
        "a\u{308}",
        "é",
        "ﬁ",
        "日本",
        "😀",
        "▁",
        "Z",
        "İ",
        "K",
        "<|im_end|>+",
        "<|im+",
        "ab+",
        " +",
        "b c+",
        "ä+",
        "Z+",
        "\n\n+",
        "a+",
        "+",
        "\u{0}",
        "\u{fdd0}",
        "ﷺ",
        "\t",
    ];
    (0..random.below(30)).map(|_| *random.one(&parts)).collect()
}

#[test]
fn random_pipelines_give_the_ids_of_the_crate() {
    let mut random = Random(7);
    let mut compared = 0;
    for case in 0..1_000 {
        let model = model(&mut random);
        let vocab = model["vocab"].as_object().unwrap().len();
        let normaliser = normaliser(&mut random);
        let pre_tokenizer = pre_tokenizer(&mut random, normaliser.is_null());
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": added(&mut random, vocab), "normalizer": normaliser,
            "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null,
            "model": model,
        });
        let bytes = serde_json::to_vec(&file).unwrap();
        let ours = match Tokenizer::from_json(Path::new("tokenizer.json"), &bytes) {
            Ok(ours) => ours,
            // Two tokens that become one when normalised.
            Err(error) if error.to_string().contains("distinct texts") => continue,
            Err(error) => panic!("case {case}: {error}"),
        };
        // Some chains make the crate index out of its own buffers.
        let theirs = || tokenizers::Tokenizer::from_bytes(&bytes).unwrap();
        let Ok(theirs) = catch_unwind(theirs) else { continue };
        let shown = || {
            let mut file = file.clone();
            file["model"]["vocab"] = Value::Null;
            file
        };
        for turn in 0..12 {
            let mut text = text(&mut random);
            // Long enough to be cut in the middle of words, now and then.
            if turn == 0 && case % 5 == 0 {
                while text.len() < 12_000 {
                    text.push_str(&self::text(&mut random));
                    text.push('a');
                }
            }
            let found = ours.encode(&text, false).unwrap();
            let theirs = AssertUnwindSafe(|| theirs.encode(text.as_str(), false).unwrap());
            let Ok(expected) = catch_unwind(theirs) else { continue };
            assert_eq!(found, expected.get_ids(), "case {case}: {text:?}\n{}", shown());
            compared += 1;
            // Up to a limit: all of it, or nothing.
            let limited = ours.encode_limited(&text, false, found.len());
            assert_eq!(limited.unwrap(), found, "case {case}: {text:?}\n{}", shown());
            if let Some(fewer) = found.len().checked_sub(1) {
                assert!(ours.encode_limited(&text, false, fewer).is_err());
            }
            let fewest = ours.fewest_tokens(text.len());
            assert!(fewest <= found.len(), "case {case}: {text:?} {fewest}\n{}", shown());
        }
    }
    assert!(compared > 8_000, "{compared}");
}
