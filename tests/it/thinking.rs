//! `dacapo serve` with a small random model whose template opens the reasoning: a budget ends it, and
//! the answer follows.

#![cfg(unix)]

use crate::smollm2;
use serde_json::{Map, Value, json};
use smollm2::dacapo;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::OnceLock;

const OPEN: usize = 128;
const CLOSE: usize = 129;
const END: usize = 130;
const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}\n{% endfor %}\
    {% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n\
    {% else %}<think>\n{% endif %}";
const CHAT: &str = "/v1/chat/completions";

/// The tokens of ASCII, as byte-level tokenizers write them, and three more.
fn tokenizer() -> Value {
    let letters = ('!'..='~').chain('\u{100}'..='\u{121}').map(String::from);
    let vocab: Map<String, Value> =
        letters.enumerate().map(|(id, text)| (text, id.into())).collect();
    assert_eq!(vocab.len(), OPEN);
    let added = [(OPEN, "<think>"), (CLOSE, "</think>"), (END, "<|end|>")].map(|(id, content)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": id == END})
    });
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                       "use_regex": false});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
                  "continuing_subword_prefix": null, "end_of_word_suffix": null,
                  "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    })
}

/// The weights of a golden, with logits of 0 for the added tokens: greedily the model never writes them.
fn weights(file: &Path) -> Vec<u8> {
    let mut bytes = fs::read(file).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize + 8;
    let tensors: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let head = &tensors["lm_head.weight"];
    let at = |index: usize| header + head["data_offsets"][index].as_u64().unwrap() as usize;
    assert_eq!(head["shape"][0], END + 1);
    let (first, last) = (at(0), at(1));
    let row = (last - first) / (END + 1);
    bytes[first + OPEN * row..last].fill(0);
    bytes
}

/// The model's folder, written once: both tests use it at the same time.
fn model() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(write_model)
}

fn write_model() -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/model/tests/goldens/qwen3");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("thinker");
    fs::create_dir_all(&folder).unwrap();
    let config = fs::read(golden.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["eos_token_id"] = END.into();
    config["max_position_embeddings"] = 2048.into();
    let tokenizer_config = json!({"chat_template": TEMPLATE, "eos_token": "<|end|>"});
    for (name, value) in [
        ("config.json", config),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", tokenizer_config),
    ] {
        fs::write(folder.join(name), value.to_string()).unwrap();
    }
    fs::write(folder.join("model.safetensors"), weights(&golden.join("model.safetensors")))
        .unwrap();
    folder
}

/// A server, ended when dropped.
struct Server {
    child: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(model: &Path, extra: &[&str]) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = dacapo(&["serve", model.to_str().unwrap(), "--port", &port.to_string()]);
        command.args(extra).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stderr.take().unwrap());
        let server = Self { child, port };
        let mut lines = said.lines().map(Result::unwrap);
        let mut before = Vec::new();
        let serving = lines.find(|line| {
            before.push(line.clone());
            line.starts_with("serving ")
        });
        assert!(serving.is_some(), "{before:?}");
        std::thread::spawn(move || lines.for_each(drop));
        server
    }

    fn ask(&self, route: &str, body: &Value) -> String {
        let body = body.to_string();
        let head = format!(
            "POST {route} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(" 200 OK"), "{head}\n{body}");
        body.to_string()
    }

    fn json(&self, route: &str, body: &Value) -> Value {
        serde_json::from_str(&self.ask(route, body)).unwrap()
    }
}

fn chat(extra: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Why?"}],
        "temperature": 0, "max_tokens": 40, "thinking_token_budget": 12,
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn reasoning_tokens(answer: &Value) -> u64 {
    answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap()
}

/// Reasoning and content of a stream.
fn streamed(events: &str) -> (String, String) {
    let (mut thought, mut said) = (String::new(), String::new());
    for event in events.lines().filter_map(|line| line.strip_prefix("data: {")) {
        let event: Value = serde_json::from_str(&format!("{{{event}")).unwrap();
        let delta = &event["choices"][0]["delta"];
        thought += delta["reasoning_content"].as_str().unwrap_or_default();
        said += delta["content"].as_str().unwrap_or_default();
    }
    (thought, said)
}

/// Standard output has the answer alone, so nothing of a model that never ends its reasoning.
#[test]
fn run_prints_reasoning_as_a_message() {
    let folder = model().to_str().unwrap();
    let run = |flags: &[&str]| {
        let args =
            [&["run", folder, "-p", "Why?", "-n", "8", "--temperature", "0"], flags].concat();
        let output = dacapo(&args).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap())
    };
    let report: Value = serde_json::from_str(&run(&["--json"])[0]).unwrap();
    let thought = report["reasoning"].as_str().unwrap();
    assert!(report["text"] == "" && !thought.is_empty(), "{report}");
    let [said, messages] = run(&[]);
    assert!(said.is_empty() && messages.contains(thought), "{said:?}, {messages:?}");
    // A prompt that is no chat has no reasoning.
    let report: Value = serde_json::from_str(&run(&["--json", "--raw"])[0]).unwrap();
    assert!(report["text"] != "" && report["reasoning"].is_null(), "{report}");

    let file = tempfile::tempdir().unwrap();
    let [input, output] = ["in", "out"].map(|name| file.path().join(name));
    fs::write(&input, "\"Why?\"\n").unwrap();
    let [input, output] = [&input, &output].map(|path| path.to_str().unwrap());
    let args = ["run", folder, "--batch", input, "-o", output, "-n", "8", "--temperature", "0"];
    assert!(dacapo(&args).output().unwrap().status.success());
    let line: Value = serde_json::from_str(&fs::read_to_string(output).unwrap()).unwrap();
    assert_eq!((&line["text"], line["reasoning"].as_str()), (&"".into(), Some(thought)));
}

#[test]
fn a_budget_ends_the_reasoning_and_the_answer_follows() {
    let folder = model();
    let mut before = None;
    // One step per launch, and several.
    for steps in ["1", "4"] {
        let server = Server::start(folder, &["--graph-steps", steps]);
        let free = server.json(CHAT, &chat(json!({"thinking_token_budget": null})));
        assert_eq!(reasoning_tokens(&free), 40, "without a budget it never ends: {free}");

        let whole = server.json(CHAT, &chat(json!({})));
        assert_eq!(reasoning_tokens(&whole), 12, "{whole}");
        assert_eq!(whole["usage"]["completion_tokens"], 40);
        let message = &whole["choices"][0]["message"];
        let thought = message["reasoning_content"].as_str().unwrap();
        let said = message["content"].as_str().unwrap();
        let all = free["choices"][0]["message"]["reasoning_content"].as_str().unwrap();
        assert!(
            all.starts_with(thought) && !said.is_empty() && !said.contains("think>"),
            "{whole}"
        );
        let events = server.ask(CHAT, &chat(json!({"stream": true})));
        assert_eq!(streamed(&events), (thought.to_string(), said.to_string()));
        let now = (thought.to_string(), said.to_string());
        assert_eq!(*before.get_or_insert(now.clone()), now);

        // Choices that differ, of a model that would rather not end its reasoning.
        let bias = json!({"129": -100, "130": -100});
        let several = chat(json!({"n": 3, "temperature": 1, "seed": 5, "logit_bias": bias}));
        let several = server.json(CHAT, &several);
        assert_eq!(reasoning_tokens(&several), 36, "{several}");
        let thoughts: Vec<&str> = (0..3)
            .map(|i| several["choices"][i]["message"]["reasoning_content"].as_str().unwrap())
            .collect();
        assert!(thoughts[0] != thoughts[1] && thoughts[1] != thoughts[2], "{several}");
        assert!((0..3).all(|i| several["choices"][i]["message"]["content"] != ""), "{several}");

        let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}},
                            "required": ["ok"], "additionalProperties": false});
        let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
        let restricted =
            server.json(CHAT, &chat(json!({"response_format": format, "max_tokens": 400})));
        assert_eq!(reasoning_tokens(&restricted), 12, "{restricted}");
        let said = restricted["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(serde_json::from_str::<Value>(said).unwrap()["ok"].is_boolean(), "{said}");
        assert_eq!(restricted["choices"][0]["finish_reason"], "stop");
    }
}

#[test]
fn anthropics_budget() {
    let server = Server::start(model(), &[]);
    let body = json!({
        "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 1040, "temperature": 0,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    });
    let answer = server.json("/v1/messages", &body);
    let thought = answer["content"][0]["thinking"].as_str().unwrap();
    let said = answer["content"][1]["text"].as_str().unwrap();
    // A token is a character; white space at the beginning is dropped.
    assert!((1000..=1024).contains(&thought.len()), "{} characters", thought.len());
    assert!((1..=15).contains(&said.len()), "{said:?}");
    assert_eq!(answer["stop_reason"], "max_tokens");
    assert_eq!(answer["usage"]["output_tokens"], 1040);
}
