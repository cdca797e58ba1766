//! 500 malicious model folders: templates, tokenizers and configurations. `dacapo run` must refuse
//! each with one line on standard error and exit code 2, within 10 seconds of CPU time and 1 GB. A
//! mutation that turns out to be harmless may run; those are counted.

#![cfg(unix)]

use crate::random;
use crate::sources;
use random::Random;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const FOLDERS: usize = 500;
/// Limit of the address space, in KiB.
const MEMORY: u32 = 1 << 20;
/// Limit of the CPU time in seconds, because wall-clock time depends on the load of the machine.
const SECONDS: u32 = 10;
/// Limit of the wall-clock time, for a process that hangs without using CPU time.
const HANG_LIMIT: Duration = Duration::from_secs(120);

/// The text files of a tiny model; its weights are the engine's goldens.
#[derive(Clone)]
struct Folder {
    name: String,
    config: String,
    tokenizer: String,
    tokenizer_config: String,
    /// `chat_template.jinja`, which overrides the one in the tokenizer's configuration.
    template: Option<String>,
}

fn golden(file: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/model/tests/goldens/llama").join(file)
}

fn config() -> Map<String, Value> {
    serde_json::from_str(&fs::read_to_string(golden("config.json")).unwrap()).unwrap()
}

/// A special token, as `tokenizer.json` lists it.
fn added_token(id: usize, content: &str) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    })
}

fn tokenizer() -> Value {
    let letters = ('!'..='~').chain("ĠĊ▁".chars()).map(String::from);
    let texts =
        ["<|im_start|>", "<|im_end|>", "<unk>"].map(String::from).into_iter().chain(letters);
    let vocab: Map<String, Value> = texts.enumerate().map(|(id, text)| (text, id.into())).collect();
    json!({
        "added_tokens": [added_token(0, "<|im_start|>"), added_token(1, "<|im_end|>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
        "post_processor": null, "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": []},
    })
}

fn good() -> Folder {
    let chatml =
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
    Folder {
        name: "valid".to_owned(),
        config: Value::Object(config()).to_string(),
        tokenizer: tokenizer().to_string(),
        tokenizer_config: json!({"chat_template": chatml, "eos_token": "<|im_end|>"}).to_string(),
        template: None,
    }
}

fn templates(random: &mut Random) -> Vec<Folder> {
    let mut folders = Vec::new();
    for (name, source) in sources::templates() {
        let mut folder = good();
        folder.name = format!("template: {name}");
        match random.below(3) {
            0 => folder.template = Some(source),
            1 => folder.tokenizer_config = json!({"chat_template": source}).to_string(),
            _ => {
                let named = json!([{"name": "default", "template": source}]);
                folder.tokenizer_config = json!({"chat_template": named}).to_string();
            }
        }
        folders.push(folder);
    }
    // Templates truncated in the middle, followed by tokens of the template language.
    let whole = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim }}{% endif %}{% endfor %}";
    for _ in 0..40 {
        let (cut, word) = (
            1 + random.below(whole.len() - 1),
            random.one(&["{%", "}}", "|", "(", "{{ x.y.z }}", "{{ 1/0 }}"]),
        );
        let mut folder = good();
        folder.name = format!("template cut at {cut}, then {word}");
        folder.template = Some(format!("{}{word}{{% endfor %}}", &whole[..cut]));
        folders.push(folder);
    }
    folders
}

fn tokenizers(random: &mut Random) -> Vec<Folder> {
    let mut folders = Vec::new();
    let mut add = |name: String, text: String| {
        folders.push(Folder { name: format!("tokenizer: {name}"), tokenizer: text, ..good() });
    };
    let with = |field: &str, value: Value| {
        let mut file = tokenizer();
        file[field] = value;
        file.to_string()
    };
    let model = |field: &str, value: Value| {
        let mut file = tokenizer();
        file["model"][field] = value;
        file.to_string()
    };

    let sequence = |list: &str, steps: Vec<Value>| json!({"type": "Sequence", list: steps});
    let each =
        |content: &str| json!({"type": "Replace", "pattern": {"Regex": "."}, "content": content});

    for megabytes in [1, 20] {
        let one = vec![added_token(100, &"x".repeat(megabytes << 20))];
        add(format!("an added token of {megabytes} MB"), with("added_tokens", one.into()));
    }
    for (count, bytes) in [(20_000, 300), (20_000, 200), (140_000, 8), (2, 0)] {
        let many: Vec<Value> = (0..count)
            .map(|at| added_token(100 + at, &format!("{at}{}", "x".repeat(bytes))))
            .collect();
        let many = if bytes == 0 {
            vec![added_token(100, "twice"), added_token(101, "twice")]
        } else {
            many
        };
        add(format!("{count} added tokens of {bytes} bytes"), with("added_tokens", many.into()));
    }
    for (steps, bytes) in [(2, 50_000), (8, 20_000), (20, 8), (64, 2), (1, 300_000)] {
        let steps: Vec<Value> = (0..steps).map(|_| each(&"a".repeat(bytes))).collect();
        add(
            format!("{} replacements of {bytes} bytes", steps.len()),
            with("normalizer", sequence("normalizers", steps)),
        );
        let steps = (0..bytes.min(40))
            .map(|_| json!({"type": "Prepend", "prepend": "a".repeat(6_000)}))
            .collect();
        add(format!("prefixes, {bytes}"), with("normalizer", sequence("normalizers", steps)));
    }
    let expressions = [
        "(?=a)b",
        "(?<!a)b",
        r"(a)\1",
        "(?>a*)b",
        "a++",
        "(?(1)a|b)",
        r"\Ga",
        "(",
        "[",
        "(?P<n>a",
        r"\p{Nonsense}",
        r"\bword\b",
        "a{99999}",
        "((a{99}){99}){99}",
        r"(?i)x|\s+(?!\S)",
    ];
    for expression in expressions {
        let split = json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false});
        add(format!("expression {expression}"), with("pre_tokenizer", split));
        add(
            format!("replacement of {expression}"),
            with(
                "normalizer",
                json!({"type": "Replace", "pattern": {"Regex": expression}, "content": ""}),
            ),
        );
    }
    add(
        "a long expression".into(),
        with(
            "pre_tokenizer",
            json!({
                "type": "Split", "pattern": {"Regex": "a|".repeat(9_000)}, "behavior": "Isolated", "invert": false,
            }),
        ),
    );
    for kind in ["Precompiled", "BertNormalizer", "Nmt", "StripAccents", "ByteLevel", "Unknown", ""]
    {
        add(
            format!("normaliser {kind}"),
            with("normalizer", json!({"type": kind, "precompiled_charsmap": "AAAA"})),
        );
    }
    for kind in
        ["BertPreTokenizer", "UnicodeScripts", "FixedLength", "CharDelimiterSplit", "Unknown", ""]
    {
        add(
            format!("pre-tokenizer {kind}"),
            with("pre_tokenizer", json!({"type": kind, "length": 0})),
        );
    }
    for kind in ["WordPiece", "CTC", "BPEDecoder", "Unknown"] {
        add(format!("decoder {kind}"), with("decoder", json!({"type": kind})));
    }
    for kind in ["Unigram", "WordPiece", "WordLevel", "Unknown"] {
        add(format!("model {kind}"), model("type", kind.into()));
    }
    let bad = [
        json!(vec![0; 100_000]),
        json!({"type": "Sequence"}),
        json!(7),
        json!("x"),
        json!([[[[]]]]),
    ];
    for field in
        ["normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens", "model"]
    {
        for value in &bad {
            add(
                format!("{field} {}", &value.to_string()[..9.min(value.to_string().len())]),
                with(field, value.clone()),
            );
        }
    }
    for (field, value) in [
        ("vocab", json!([["a", 0.0]])),
        ("vocab", json!({"a": -1})),
        ("vocab", json!({"a": 4_294_967_295u32})),
        ("vocab", json!({"a": 1.5})),
        ("vocab", json!({"x".repeat(5_000): 3})),
        ("merges", json!(["a"])),
        ("merges", json!([["a", "b"]])),
        ("merges", json!([["a"]])),
        ("merges", json!(7)),
        ("unk_token", json!("nowhere")),
        ("continuing_subword_prefix", json!("##")),
        ("end_of_word_suffix", json!("</w>")),
        ("dropout", json!(0.5)),
        ("dropout", json!("x")),
        ("byte_fallback", json!("x")),
        ("fuse_unk", json!(7)),
        ("vocab", json!({})),
    ] {
        add(
            format!("model.{field} {}", value.to_string().chars().take(20).collect::<String>()),
            model(field, value),
        );
    }
    let whole = tokenizer().to_string();
    for _ in 0..30 {
        let cut = random.below(whole.len());
        let at = (0..=cut).rev().find(|&at| whole.is_char_boundary(at)).unwrap();
        add(format!("cut at {at}"), whole[..at].to_owned());
    }
    add("deep".into(), "[".repeat(1_000_000));
    add("deep fields".into(), "{\"model\":".repeat(100_000));
    folders
}

fn configs(random: &mut Random, count: usize) -> Vec<Folder> {
    let base = config();
    let fields = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "model_type",
        "hidden_act",
        "eos_token_id",
        "bos_token_id",
        "tie_word_embeddings",
        "quantization_config",
        "rope_scaling",
    ];
    let values: Vec<String> = [
        "0",
        "-1",
        "-9223372036854775809",
        "1e308",
        "1e999",
        "NaN",
        "0.5",
        "18446744073709551615",
        "99999999999999999999",
        "1000000",
        "3",
        "7",
        "\"64\"",
        "\"\"",
        "null",
        "true",
        "[]",
        "{}",
        "[[]]",
        "{\"rope_type\":\"yarn\",\"factor\":1e30}",
    ]
    .map(String::from)
    .into_iter()
    .chain([
        format!("\"{}\"", "x".repeat(100_000)),
        "[".repeat(200) + &"]".repeat(200),
        "[0,".repeat(50_000),
    ])
    .collect();
    let written = |fields: &[(String, String)]| {
        let fields: Vec<String> =
            fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    };
    let all: Vec<(String, String)> =
        base.iter().map(|(name, value)| (name.clone(), value.to_string())).collect();
    let one = |_| {
        let field = *random.one(&fields);
        let mut changed = all.clone();
        changed.retain(|(name, _)| name != field);
        let value = random.one(&values).clone();
        let shown: String = value.chars().take(24).collect();
        let (name, config) = match random.below(12) {
            0 => (format!("without {field}"), written(&changed)),
            1 => {
                changed.extend([(field.to_owned(), value.clone()), (field.to_owned(), value)]);
                (format!("{field} is {shown}, twice"), written(&changed))
            }
            2 => {
                let whole = written(&all);
                let cut = random.below(whole.len());
                (format!("cut at {cut}"), whole[..cut].to_owned())
            }
            _ => {
                changed.push((field.to_owned(), value));
                (format!("{field} is {shown}"), written(&changed))
            }
        };
        Folder { name: format!("config: {name}"), config, ..good() }
    };
    (0..count).map(one).collect()
}

/// Runs a folder: returns the error line, or `None` if it ran.
fn run(folder: &Folder) -> Result<Option<String>, String> {
    let place = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(place.path().join(name), text).unwrap();
    write("config.json", &folder.config);
    write("tokenizer.json", &folder.tokenizer);
    write("tokenizer_config.json", &folder.tokenizer_config);
    if let Some(template) = &folder.template {
        write("chat_template.jinja", template);
    }
    std::os::unix::fs::symlink(golden("model.safetensors"), place.path().join("model.safetensors"))
        .unwrap();
    let mut child = Command::new("sh")
        .arg("-c")
        .arg(format!("ulimit -c 0; ulimit -v {MEMORY} && ulimit -t {SECONDS} && exec \"$@\""))
        .args(["sh", env!("CARGO_BIN_EXE_dacapo"), "run"])
        .arg(place.path())
        .args(["-p", "hi", "--device", "cpu", "--threads", "1", "--max-tokens", "2"])
        .args(["--max-context", "64", "--memory-share", "0.01"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(place.path().join("stderr")).unwrap())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if start.elapsed() > HANG_LIMIT => {
                let _ = child.kill();
                let _ = child.wait();
                return Err("it hangs".to_owned());
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let said = fs::read_to_string(place.path().join("stderr")).unwrap();
    let said = said.replace(&*place.path().to_string_lossy(), "");
    match status.code() {
        Some(0) => Ok(None),
        Some(2)
            if said.lines().count() == 1 && said.starts_with("error: ") && said.len() < 5_000 =>
        {
            Ok(Some(said.trim_end().to_owned()))
        }
        _ => Err(format!("{status}: {said}")),
    }
}

#[test]
fn every_hostile_folder_gets_one_line() {
    assert_eq!(run(&good()), Ok(None), "the unchanged folder must run");
    let mut random = Random(20);
    let mut folders = templates(&mut random);
    folders.extend(tokenizers(&mut random));
    let rest = FOLDERS.saturating_sub(folders.len());
    folders.extend(configs(&mut random, rest));
    assert_eq!(folders.len(), FOLDERS);

    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::new());
    let workers = std::thread::available_parallelism().map_or(2, usize::from).min(8);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(folder) = folders.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let start = Instant::now();
                    let outcome = run(folder);
                    outcomes.lock().unwrap().push((&folder.name, start.elapsed(), outcome));
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().unwrap();
    outcomes.sort_by_key(|(_, took, _)| *took);
    let (mut harmless, mut wrong) = (Vec::new(), Vec::new());
    for (name, took, outcome) in outcomes {
        let milliseconds = took.as_millis();
        match outcome {
            Ok(Some(line)) => println!("{milliseconds:>6} ms  {name}: {line}"),
            Ok(None) => {
                println!("{milliseconds:>6} ms  {name}: runs");
                harmless.push(name);
            }
            Err(how) => wrong.push(format!("{name}: {how}")),
        }
    }
    println!("{} of {FOLDERS} were harmless", harmless.len());
    assert!(wrong.is_empty(), "{} went wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(harmless.len() * 10 < FOLDERS, "{} were harmless: {harmless:?}", harmless.len());
}
