//! Malicious tokenizer files and texts are handled in little time and bounded memory. Alone in its
//! process, so that memory can be measured.

mod make;
mod measure;

use formats::Error;
use formats::gguf::Gguf;
use formats::tokenizer::Tokenizer;
use make::{ARRAY, F32, GgufFile, I32};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The slowest takes a few seconds; the machine may be busy.
const TIME: Duration = Duration::from_secs(60);

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers").join(name)
}

fn small(name: &str) -> Tokenizer {
    let bytes = std::fs::read(data(name)).unwrap();
    match name.ends_with(".gguf") {
        true => {
            Tokenizer::from_gguf(&Gguf::read(&data(name), &bytes[..], bytes.len() as u64).unwrap())
        }
        false => Tokenizer::from_json(&data(name), &bytes),
    }
    .unwrap()
}

/// A file that encodes letters, changed at the top and in its model.
fn file(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let letters = ('a'..='z').chain("ĠĊ▁ ".chars()).enumerate();
    let vocab: serde_json::Map<String, Value> =
        letters.map(|(id, c)| (c.to_string(), id.into())).collect();
    let mut file =
        json!({"added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    change(&mut file);
    serde_json::to_vec(&file).unwrap()
}

fn added(id: usize, content: &str) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    })
}

fn replace(pattern: Value, content: &str) -> Value {
    json!({"type": "Replace", "pattern": pattern, "content": content})
}

/// Runs `act`, checks its time and memory, and returns its result.
#[track_caller]
fn bounded<T>(name: &str, megabytes: u64, act: impl FnOnce() -> T) -> T {
    let before = measure::now();
    let start = Instant::now();
    let made = act();
    let took = start.elapsed();
    let more = measure::peak().saturating_sub(before);
    println!("{:>6.0} ms {more:>4} MB  {name}", took.as_secs_f64() * 1e3);
    assert!(took < TIME, "{name}: {took:?}");
    assert!(more < megabytes, "{name}: {more} MB");
    made
}

#[track_caller]
fn refused(name: &str, bytes: &[u8], text: &str, about: &str) {
    let made = bounded(name, 400, || {
        let tokenizer = Tokenizer::from_json(Path::new("tokenizer.json"), bytes)?;
        tokenizer.encode(text, true)?;
        tokenizer.encode_text(text, true)
    });
    let line = made.map(|ids| ids.len()).expect_err(name).to_string();
    assert!(line.contains(about), "{name}: {line} does not mention {about}");
    assert!(!line.contains('\n') && line.len() < 1_000, "{name}: not one line: {line}");
}

fn texts() -> Vec<(&'static str, String)> {
    const BYTES: usize = 8 << 20;
    let fill = |part: &str| part.repeat(BYTES / part.len());
    let mut state = 1u64;
    let mut random = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let mut any = String::new();
    while any.len() < BYTES - 4 {
        any.extend(char::from_u32(random() % 0x11_0000));
    }
    vec![
        ("words", fill("The quick brown fox jumps over 12 lazy dogs. ")),
        ("letters", fill("a")),
        ("digits", fill("7")),
        ("one long mark", "a".to_owned() + &fill("\u{301}")[..BYTES - 2]),
        ("control beginnings", fill("<|im_<|<")),
        ("any characters", any),
    ]
}

#[test]
fn files_and_texts_are_held_to_time_and_memory() {
    // Long texts first, while the process is small.
    for name in ["qwen2.json", "smollm.gguf", "llama.gguf"] {
        let tokenizer = small(name);
        for (kind, text) in texts() {
            let all = bounded(&format!("{name}: 8 MB of {kind}"), 256, || {
                tokenizer.encode_text(&text, true)
            });
            if let Err(error) = &all {
                let line = error.to_string();
                assert!(line.contains("cannot be tokenized in pieces"), "{name} {kind}: {line}");
            }
            let some = bounded(&format!("{name}: the same, up to 8191"), 256, || {
                tokenizer.encode_limited(&text, true, 8_191)
            });
            assert!(
                matches!(some, Err(Error::TooLong { max_tokens: 8_191 })),
                "{name} {kind}: {some:?}"
            );
        }
    }

    // Added tokens.
    let one = file(|file| file["added_tokens"] = json!([added(30, &"x".repeat(60_000_000))]));
    refused("an added token of 60 MB", &one, "hi", "content of added token 30");
    drop(one);
    let many = |count: usize, bytes: usize| {
        let token = |at: usize| added(30 + at, &format!("{at:08}{}", "x".repeat(bytes - 8)));
        file(|file| file["added_tokens"] = (0..count).map(token).collect())
    };
    refused(
        "60 k added tokens of 900 bytes",
        &many(60_000, 900),
        "hi",
        "content of added token 30",
    );
    refused("60 k added tokens of 200 bytes", &many(60_000, 200), "hi", "added tokens");
    refused("more added tokens than any", &many(140_000, 8), "hi", "added tokens");
    let most = many(120_000, 16);
    let made = bounded("120 k added tokens", 400, || {
        let tokenizer = Tokenizer::from_json(Path::new("tokenizer.json"), &most)?;
        tokenizer.encode_text(&"00000000xxx".repeat(700_000), true)
    });
    assert!(made.is_ok());

    // Normalisers that make much of little.
    let long = "a".repeat(100_000);
    let each = |content: &str| replace(json!({"Regex": "."}), content);
    let normaliser = |steps: &[Value]| {
        file(|file| file["normalizer"] = json!({"type": "Sequence", "normalizers": steps}))
    };
    let much = "makes too much";
    refused("two replacements", &normaliser(&[each(&long), each(&long)]), "hi", much);
    refused("twenty replacements", &normaliser(&vec![each("aaaaaaaa"); 20]), "hi", much);
    refused("forty replacements", &normaliser(&vec![each("aa"); 40]), "hi", "40 steps");
    let prepend = json!({"type": "Prepend", "prepend": "a".repeat(8_000)});
    refused("prefixes", &normaliser(&vec![prepend; 20]), "hi", much);
    refused(
        "a replacement of nothing",
        &normaliser(&[replace(json!({"String": ""}), &long)]),
        "hi",
        much,
    );
    let content = "x".repeat(600_000);
    refused("a long step", &normaliser(&[each(&content)]), "hi", "at most 524288 bytes");

    // Expressions.
    let split = |pattern: &str| {
        let step = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        file(|file| file["pre_tokenizer"] = step)
    };
    let text = "a".repeat(100_000);
    refused("look-ahead", &split("(?:(?=.*x)a)*b"), &text, "not supported");
    refused("look-behind", &split("(?<=a)b"), &text, "not supported");
    refused("back-references", &split(r"(a+)\1"), &text, "not supported");
    refused("each match reads on", &split(".*x|a"), &text, "too long");
    refused(
        "counted repetitions",
        &split(&format!(".*{}", "a{900}".repeat(600))),
        &text,
        "not supported",
    );
    refused("many states", &split("(?:[ab]*a[ab]{13}c)|a|b"), &random_ab(), "too");
    refused("nested repetitions", &split("(a+)+$"), &(text.clone() + "!"), "too long");

    // Files that are large in fields that are not used.
    let zeros = format!("[{}0]", "0,".repeat(20_000_000));
    let raw = |field: &str| {
        format!("{{\"{field}\":{zeros},\"model\":{{\"vocab\":{{\"a\":0}}}}}}").into_bytes()
    };
    for field in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
        refused(&format!("a long {field}"), &raw(field), "hi", "at most 524288 bytes");
    }
    refused("long added tokens", &raw("added_tokens"), "hi", "tokenizer");
    let deep = format!("{{\"normalizer\":{}", "[".repeat(1_000_000));
    refused("a deep normaliser", deep.as_bytes(), "hi", "tokenizer");
    let merges = format!(
        "{{\"model\":{{\"vocab\":{{\"a\":0}},\"merges\":[{}\"a a\"]}}}}",
        "\"a a\",".repeat(6_000_000)
    );
    refused("many merges", merges.as_bytes(), "hi", "merges");
    let vocab: String = (0..1_200_000).map(|id| format!("\"t{id}\":{id},")).collect();
    let vocab = format!("{{\"model\":{{\"vocab\":{{{vocab}\"a\":1}}}}}}");
    refused("many tokens", vocab.as_bytes(), "hi", "tokens");
}

/// Letters in no order: every one makes a new state of an expression that counts back.
fn random_ab() -> String {
    let mut state = 7u64;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if state >> 63 == 0 { 'a' } else { 'b' }
    };
    (0..200_000).map(|_| next()).collect()
}

#[test]
fn vocabularies_in_gguf_are_held_to_the_same() {
    let read = |file: GgufFile| {
        let bytes = file.bytes();
        Tokenizer::from_gguf(&Gguf::read(Path::new("x.gguf"), &bytes[..], bytes.len() as u64)?)
    };
    let line = |made: formats::Result<Tokenizer>| made.map(|_| ()).unwrap_err().to_string();
    let kinds = |count: usize| vec![vec![3, 0, 0, 0]; count];
    let control = |texts: &[String]| {
        GgufFile::new()
            .str("tokenizer.ggml.model", "gpt2")
            .strings("tokenizer.ggml.tokens", texts)
            .array("tokenizer.ggml.token_type", I32, &kinds(texts.len()))
    };
    assert!(line(read(control(&["x".repeat(4_000)]))).contains("content of added token"));
    let many: Vec<String> = (0..140_000).map(|at| format!("t{at}")).collect();
    assert!(line(read(control(&many))).contains("added tokens"));
    let long: Vec<String> = (0..20_000).map(|at| format!("{at:08}{}", "x".repeat(200))).collect();
    assert!(line(read(control(&long))).contains("added tokens"));

    // SentencePiece: every way to put a token together is looked for.
    let pieces: Vec<String> = (0..60_000).map(|at| format!("{at:06}{}", "x".repeat(240))).collect();
    let scores = [&F32.to_le_bytes()[..], &60_000u64.to_le_bytes(), &vec![0; 240_000]].concat();
    let file = GgufFile::new()
        .str("tokenizer.ggml.model", "llama")
        .strings("tokenizer.ggml.tokens", &pieces)
        .raw("tokenizer.ggml.scores", ARRAY, &scores);
    let start = Instant::now();
    let _ = read(file);
    assert!(start.elapsed() < TIME, "{:?}", start.elapsed());
}
