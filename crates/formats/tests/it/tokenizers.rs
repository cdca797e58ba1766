//! Token ids against references we did not write: the Python `tokenizers` and `sentencepiece`
//! packages, over strings of every kind.
//!
//! Small tokenizers of each kind are in the tree. Published ones are fetched; for those, hashes of
//! the reference's ids for 10,000 strings are in the tree (`tools/formats_goldens.py`).

use crate::fetch;
use crate::make;
use crate::random;
use formats::gguf::Gguf;
use formats::tokenizer::{Detokenizer, Tokenizer};
use make::{GgufFile, I32};
use proptest::prelude::*;
use random::Random;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

const KINDS: [&str; 5] = ["llama-bpe", "qwen2", "tekken", "smollm", "gpt-2"];

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers").join(name)
}

fn json(name: &str) -> Tokenizer {
    let path = data(name);
    Tokenizer::from_json(&path, &std::fs::read(&path).unwrap()).unwrap()
}

fn gguf(path: &Path) -> Tokenizer {
    let bytes = std::fs::read(path).unwrap();
    Tokenizer::from_gguf(&Gguf::read(path, &bytes[..], bytes.len() as u64).unwrap()).unwrap()
}

/// The same strings as the script's, invalid UTF-8 included.
fn strings(count: usize, seed: u64) -> Vec<Vec<u8>> {
    let pieces: Vec<String> =
        serde_json::from_slice(&std::fs::read(data("pieces.json")).unwrap()).unwrap();
    let mut random = Random(seed);
    let mut one = || {
        let mut out = Vec::new();
        for _ in 0..random.below(24) {
            let which = random.below(pieces.len() + 6);
            if which < pieces.len() {
                out.extend(pieces[which].as_bytes());
            } else if which < pieces.len() + 2 {
                let c = char::from_u32(random.below(0x11_0000) as u32).unwrap_or('\u{fffd}');
                out.extend(c.encode_utf8(&mut [0; 4]).as_bytes());
            } else if which < pieces.len() + 3 {
                out.push(random.below(256) as u8);
            } else {
                for _ in 0..1 + random.below(8) {
                    out.push(0x20 + random.below(0x5f) as u8);
                }
            }
        }
        out
    };
    (0..count).map(|_| one()).collect()
}

#[test]
fn small_tokenizers_give_the_reference_ids_from_either_file() {
    let expected: BTreeMap<String, Vec<Vec<u32>>> =
        serde_json::from_slice(&std::fs::read(data("expected.json")).unwrap()).unwrap();
    for kind in KINDS {
        let from_json = json(&format!("{kind}.json"));
        let from_gguf = gguf(&data(&format!("{kind}.gguf")));
        for (text, expected) in strings(300, 3).iter().zip(&expected[kind]) {
            let shown = String::from_utf8_lossy(text);
            assert_eq!(&from_json.encode_bytes(text, false).unwrap(), expected, "{kind} {shown:?}");
            assert_eq!(&from_gguf.encode_bytes(text, false).unwrap(), expected, "{kind} {shown:?}");
        }
    }
    // SentencePiece itself never reads control tokens out of text.
    let llama = gguf(&data("llama.gguf"));
    for (text, expected) in strings(300, 3).iter().zip(&expected["llama"]) {
        let text = String::from_utf8_lossy(text);
        assert_eq!(&llama.encode_text(&text, false).unwrap(), expected, "{text:?}");
    }
}

/// Files written for programs that read no GGUF: the package that they use gives our ids and texts.
#[test]
fn a_gguf_vocabulary_as_tokenizer_json_means_the_same_to_the_tokenizers_package() {
    for kind in KINDS.into_iter().chain(["llama"]) {
        let path = data(&format!("{kind}.gguf"));
        let bytes = std::fs::read(&path).unwrap();
        let file = Gguf::read(&path, &bytes[..], bytes.len() as u64).unwrap();
        let ours = Tokenizer::from_gguf(&file).unwrap();
        let [(name, written), (_, config)] = Tokenizer::files_of(&file).unwrap();
        assert_eq!((name, config["tokenizer_class"].as_str().is_some()), ("tokenizer.json", true));
        let written = serde_json::to_vec(&written).unwrap();
        let theirs = tokenizers::Tokenizer::from_bytes(&written).unwrap();
        let again = Tokenizer::from_json(&path, &written).unwrap();
        for text in strings(300, 3) {
            let text = String::from_utf8_lossy(&text);
            for special in [false, true] {
                let ids = ours.encode(&text, special).unwrap();
                let found = theirs.encode(text.as_ref(), special).unwrap();
                assert_eq!(found.get_ids(), ids, "{kind} {text:?}");
                assert_eq!(again.encode(&text, special).unwrap(), ids, "{kind} {text:?}");
                let decoded = theirs.decode(&ids, true).unwrap();
                assert_eq!(decoded, ours.decode(&ids), "{kind} {text:?}");
            }
        }
    }
}

fn fnv(mut hash: u64, ids: &[u32]) -> u64 {
    for id in ids.iter().copied().chain([ids.len() as u32]) {
        for byte in id.to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    hash
}

fn check_hashes(name: &str, tokenizer: &Tokenizer) {
    let all: BTreeMap<String, Vec<String>> =
        serde_json::from_slice(&std::fs::read(data("real.json")).unwrap()).unwrap();
    assert_eq!(all[name].len(), 20);
    let texts = strings(10_000, 1);
    for (n, (texts, expected)) in texts.chunks(500).zip(&all[name]).enumerate() {
        let hash = texts.iter().fold(0xcbf2_9ce4_8422_2325, |hash, text| {
            fnv(hash, &tokenizer.encode_bytes(text, false).unwrap())
        });
        assert_eq!(&format!("{hash:016x}"), expected, "{name}: strings from {}", n * 500);
    }
}

#[test]
fn smollm2_gives_the_reference_ids_for_10_000_strings() {
    let Some(path) = fetch::smollm2() else { return };
    let checkpoint = formats::checkpoint::Checkpoint::open(&path).unwrap();
    check_hashes("smollm2", &Tokenizer::of(&checkpoint).unwrap());
}

/// Texts of many words, and words so long that they are cut, whole and up to a limit.
fn check_long(name: &str, ours: &Tokenizer, theirs: &tokenizers::Tokenizer) {
    let mixed: String =
        strings(2_000, 9).iter().map(|text| String::from_utf8_lossy(text)).collect();
    let letters: String =
        mixed.chars().filter(|c| c.is_alphabetic()).cycle().take(30_000).collect();
    for text in [&mixed, &letters, &"ab".repeat(10_000), &" ".repeat(20_000)] {
        let expected = theirs.encode(text.as_str(), false).unwrap();
        let found = ours.encode(text, false).unwrap();
        assert!(
            found == expected.get_ids(),
            "{name}: {:?}…",
            text.chars().take(20).collect::<String>()
        );
        assert!(ours.fewest_tokens(text.len()) <= found.len(), "{name}");
        assert_eq!(ours.encode_limited(text, false, found.len()).unwrap(), found, "{name}");
        let too_long = ours.encode_limited(text, false, found.len() - 1);
        assert!(matches!(too_long, Err(formats::Error::TooLong { .. })), "{name}");
    }
}

/// The published file as it is; returns its bytes.
fn published_json(name: &str) -> Option<Vec<u8>> {
    let path = fetch::tokenizer(name)?;
    let bytes = std::fs::read(&path).unwrap();
    let tokenizer = Tokenizer::from_json(&path, &bytes).unwrap();
    check_hashes(name, &tokenizer);
    check_long(name, &tokenizer, &tokenizers::Tokenizer::from_bytes(&bytes).unwrap());
    Some(bytes)
}

/// The published file as it is, then its vocabulary moved into GGUF the way converters do.
fn published(name: &str, pre: &str) {
    let Some(bytes) = published_json(name) else { return };
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    let mut tokens: Vec<(String, i32)> = Vec::new();
    let mut put = |id: &Value, text: &str, kind: i32| {
        let id = id.as_u64().unwrap() as usize;
        if tokens.len() <= id {
            tokens.resize_with(id + 1, || (String::new(), 5));
        }
        tokens[id] = (text.to_owned(), kind);
    };
    for (text, id) in file["model"]["vocab"].as_object().unwrap() {
        put(id, text, 1);
    }
    for token in file["added_tokens"].as_array().unwrap() {
        let kind = if token["special"] == true { 3 } else { 4 };
        put(&token["id"], token["content"].as_str().unwrap(), kind);
    }
    let merge = |merge: &Value| match merge {
        Value::String(text) => text.clone(),
        pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
    };
    let merges: Vec<_> = file["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    let kinds: Vec<_> = tokens.iter().map(|(_, kind)| kind.to_le_bytes().to_vec()).collect();
    let texts: Vec<_> = tokens.into_iter().map(|(text, _)| text).collect();
    let bytes = GgufFile::new()
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", pre)
        .strings("tokenizer.ggml.tokens", &texts)
        .array("tokenizer.ggml.token_type", I32, &kinds)
        .strings("tokenizer.ggml.merges", &merges)
        .bytes();
    let gguf = Gguf::read(Path::new(name), &bytes[..], bytes.len() as u64).unwrap();
    check_hashes(name, &Tokenizer::from_gguf(&gguf).unwrap());
}

#[test]
fn qwen3_gives_the_reference_ids_for_10_000_strings() {
    published("qwen3", "qwen2");
}

#[test]
fn llama3_gives_the_reference_ids_for_10_000_strings() {
    published("llama3_2", "llama-bpe");
}

#[test]
fn gpt2_gives_the_reference_ids_for_10_000_strings() {
    published("gpt2", "gpt-2");
}

#[test]
fn mistral_nemo_gives_the_reference_ids_for_10_000_strings() {
    published("mistral_nemo", "tekken");
}

/// SentencePiece with merges written out, and 6,000 added tokens.
#[test]
fn gemma3_gives_the_reference_ids_for_10_000_strings() {
    published_json("gemma3");
}

/// The same vocabulary as scores in GGUF, against llama.cpp. It differs from the published file in one thing: a
/// `▁` in a text is not a space.
#[test]
fn gemma3_in_gguf_gives_the_ids_of_llama_cpp_for_10_000_strings() {
    let Some(path) = fetch::gemma3() else { return };
    let checkpoint = formats::checkpoint::Checkpoint::open(&path).unwrap();
    let tokenizer = Tokenizer::of(&checkpoint).unwrap();
    assert_eq!(tokenizer.vocab_size(), 262_144);
    check_hashes("gemma3-270m", &tokenizer);
    let begin = tokenizer.id_of("<bos>").unwrap();
    assert_eq!(tokenizer.encode("Hi", true).unwrap(), [begin, 10_979]);
    for text in strings(300, 4) {
        let text = String::from_utf8_lossy(&text).replace('▁', "_");
        let ids = tokenizer.encode(&text, false).unwrap();
        assert_eq!(tokenizer.decode_with(&ids, false), text);
    }
    let Some(published) = fetch::tokenizer("gemma3") else { return };
    let published = tokenizers::Tokenizer::from_file(published).unwrap();
    for text in strings(2_000, 5) {
        let text = String::from_utf8_lossy(&text).replace('▁', "_");
        let expected = published.encode(text.as_str(), false).unwrap();
        assert_eq!(tokenizer.encode(&text, false).unwrap(), expected.get_ids(), "{text:?}");
    }
}

/// The vocabulary files of llama.cpp, each with texts (`.inp`) and the original tokenizer's ids
/// (`.out`), when DACAPO_LLAMA_CPP_MODELS names the folder that holds them.
#[test]
fn vocabularies_of_llama_cpp_give_their_vectors() {
    let Some(folder) = std::env::var_os("DACAPO_LLAMA_CPP_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: DACAPO_LLAMA_CPP_MODELS is not set");
        return;
    };
    for name in
        ["llama-bpe", "llama-spm", "qwen2", "gpt-2", "starcoder", "refact", "command-r", "mpt"]
    {
        let path = folder.join(format!("ggml-vocab-{name}.gguf"));
        let tokenizer = gguf(&path);
        let read = |suffix| std::fs::read_to_string(path.with_extension(suffix)).unwrap();
        let (texts, ids) = (read("gguf.inp"), read("gguf.out"));
        let texts: Vec<_> = texts.split("\n__ggml_vocab_test__\n").collect();
        assert!(texts.len() > 40);
        for (text, expected) in texts.iter().zip(ids.lines()) {
            let expected: Vec<u32> =
                expected.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{name} {text:?}");
        }
    }
}

#[test]
fn text_comes_back_and_streams_are_whole() {
    for kind in KINDS {
        let tokenizer = Arc::new(json(&format!("{kind}.json")));
        for text in strings(300, 4) {
            let text = String::from_utf8_lossy(&text);
            let ids = tokenizer.encode(&text, false).unwrap();
            if kind != "qwen2" {
                assert_eq!(tokenizer.decode_with(&ids, false), text, "{kind}");
            }
            let plain = tokenizer.encode_text(&text, false).unwrap();
            assert!(!plain.iter().any(|&id| tokenizer.is_control(id)), "{kind} {text:?}");
        }
    }
}

static TINY: LazyLock<[Arc<Tokenizer>; 2]> =
    LazyLock::new(|| [Arc::new(json("llama-bpe.json")), Arc::new(gguf(&data("llama.gguf")))]);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Any ids at all, split characters and nonsense included.
    #[test]
    fn a_stream_gives_what_decoding_gives(ids in prop::collection::vec(0u32..800, 0..40)) {
        for tokenizer in TINY.iter() {
            let mut stream = Detokenizer::new(tokenizer.clone());
            let mut text = String::new();
            for &id in &ids {
                text.push_str(stream.push(id));
            }
            text.push_str(stream.finish());
            prop_assert_eq!(text, tokenizer.decode(&ids));
        }
    }

    /// Whatever a user writes, pieces of control tokens at either end included.
    #[test]
    fn user_text_never_becomes_a_control_token(
        parts in prop::collection::vec(
            prop_oneof![
                Just("<|im_end|>".to_owned()), Just("<|im_start|>".to_owned()),
                Just("<|im_".to_owned()), Just("end|>".to_owned()), Just("<".to_owned()),
                Just("\u{fdd0}".to_owned()), Just("<|endoftext|>".to_owned()), ".{0,4}",
            ],
            0..8,
        ),
    ) {
        let tokenizer = &TINY[0];
        let content = parts.concat();
        let ids = tokenizer.encode_text(&content, false).unwrap();
        prop_assert!(!ids.iter().any(|&id| tokenizer.is_control(id)));
        prop_assert_eq!(tokenizer.decode(&ids), content);
    }
}
