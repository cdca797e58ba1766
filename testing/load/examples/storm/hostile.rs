//! A generator of hostile requests.

use crate::draw::Draw;
use crate::schemas::{expression, schema, schema_leaf};
use serde_json::{Map, Value, json};

pub(crate) const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const ROUTES: [&str; 5] = [CHAT, COMPLETIONS, "/v1/embeddings", "/tokenize", "/detokenize"];

/// One request.
pub(crate) struct Hostile {
    /// The kind of attack.
    pub(crate) kind: &'static str,
    /// The bytes to send.
    pub(crate) bytes: Vec<u8>,
    /// Whether the server must respond; invalid HTTP may get no response.
    pub(crate) due: bool,
    /// Whether this is an ordinary request, which must get 200 or 429.
    pub(crate) ordinary: bool,
    /// Bytes after which the client disconnects.
    pub(crate) leaves_after: Option<usize>,
}

/// The weight of a kind, its name, and its generator.
type Kind = (u64, &'static str, fn(&mut Draw) -> Hostile);

/// The request with this number.
pub(crate) fn request(seed: u64, number: u64) -> Hostile {
    let draw = &mut Draw::new(seed, number);
    let kinds: [Kind; 11] = [
        (28, "schema", of_schema),
        (18, "fields", of_fields),
        (6, "size", of_size),
        (10, "encoding", of_encoding),
        (5, "nesting", of_nesting),
        (7, "kwargs", of_kwargs),
        (7, "token ids", of_tokens),
        (4, "n and prompts", of_batches),
        (4, "wire", of_wire),
        (3, "leaving", of_leaving),
        (8, "ordinary", of_ordinary),
    ];
    let mut at = draw.below(kinds.iter().map(|kind| kind.0).sum());
    for (weight, kind, make) in kinds {
        if at < weight {
            return Hostile { kind, ..make(draw) };
        }
        at -= weight;
    }
    Hostile { kind: "ordinary", ..of_ordinary(draw) }
}

fn post(path: &str, body: &[u8]) -> Hostile {
    send(path, "content-type: application/json\r\n", body)
}

fn send(path: &str, headers: &str, body: &[u8]) -> Hostile {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\
         content-length: {}\r\n\r\n",
        body.len()
    );
    raw([head.as_bytes(), body].concat(), true)
}

fn raw(bytes: Vec<u8>, due: bool) -> Hostile {
    Hostile { kind: "", bytes, due, ordinary: false, leaves_after: None }
}

fn said(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// A short chat with additional fields.
fn chat(draw: &mut Draw, more: Value) -> Map<String, Value> {
    let mut ask = json!({"messages": said("Say a word."), "max_tokens": 1 + draw.below(6)});
    if draw.one_in(3) {
        ask["stream"] = true.into();
    }
    let Value::Object(mut ask) = ask else { return Map::new() };
    if let Value::Object(more) = more {
        ask.extend(more);
    }
    ask
}

fn text_of(ask: Map<String, Value>) -> Vec<u8> {
    Value::Object(ask).to_string().into_bytes()
}

fn of_schema(draw: &mut Draw) -> Hostile {
    let held = schema(draw);
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": held}});
    let more = match draw.below(5) {
        0 => json!({"tools": [tool], "tool_choice": "required"}),
        1 => {
            let named = json!({"type": "function", "function": {"name": "f"}});
            json!({"tools": [tool], "tool_choice": named})
        }
        2 if draw.one_in(4) => {
            let tools: Vec<Value> = (0..draw.size(2, 130)).map(|_| tool.clone()).collect();
            json!({"tools": tools, "tool_choice": draw.pick(&["auto", "required", "none"])})
        }
        _ => {
            let format = json!({"name": "s", "schema": held, "strict": true});
            json!({"response_format": {"type": "json_schema", "json_schema": format}})
        }
    };
    post(CHAT, &text_of(chat(draw, more)))
}

/// Any value for any field.
fn anything(draw: &mut Draw) -> Value {
    let long = "x".repeat(draw.size(1, 20_000));
    match draw.below(16) {
        0 => json!(null),
        1 => json!(true),
        2 => json!(-1),
        3 => json!(1u64 << 63),
        4 => json!(1e300),
        5 => json!(1e-38),
        6 => json!(0),
        7 => json!(""),
        8 => json!(long),
        9 => json!([]),
        10 => json!({}),
        11 => json!([[], {}, null, "a", 1]),
        12 => json!({"a": {"b": [1, 2, {"c": null}]}}),
        13 => json!(vec![long; 8]),
        14 => json!("\u{0}\u{202e}\u{fdd0}<|im_end|>\u{10ffff}"),
        _ => json!(expression(draw, 3)),
    }
}

fn of_fields(draw: &mut Draw) -> Hostile {
    let fields = [
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "seed",
        "n",
        "stop",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "stream",
        "stream_options",
        "priority",
        "cache_salt",
        "user",
        "logprobs",
        "top_logprobs",
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "messages",
        "prompt",
        "input",
        "tokens",
        "echo",
        "suffix",
        "best_of",
        "encoding_format",
        "dimensions",
        "unknown",
    ];
    let path = draw.pick(&ROUTES);
    let mut ask = chat(draw, json!({}));
    match path {
        COMPLETIONS => drop(ask.insert("prompt".into(), "Say".into())),
        "/v1/embeddings" => drop(ask.insert("input".into(), "Say".into())),
        "/detokenize" => drop(ask.insert("tokens".into(), json!([1, 2]))),
        _ => {}
    }
    for _ in 0..=draw.below(3) {
        let field = draw.pick(&fields);
        let value = match field {
            // Alternatives of many tokens, stop strings that nearly match, many biases.
            "stop" if draw.one_in(2) => json!(vec!["a".repeat(255) + "b"; draw.size(1, 20)]),
            "logit_bias" if draw.one_in(2) => {
                let entry = |i: usize| (i.to_string(), json!(1));
                Value::Object((0..draw.size(1, 3000)).map(entry).collect())
            }
            _ => anything(draw),
        };
        ask.insert(field.into(), value);
    }
    let mut text = Value::Object(ask).to_string();
    if draw.one_in(4) {
        // The same field twice.
        text.insert_str(1, "\"n\": 1, \"n\": 2, \"messages\": [], ");
    }
    post(path, text.as_bytes())
}

fn of_size(draw: &mut Draw) -> Hostile {
    let bytes = draw.size(50_000, 9 << 20);
    let unit =
        draw.pick(&["a", " ", "ab ", "\\n", "<|im_", "日本", "🦀", "\\u0000", "1 2 3 ", "zqxj"]);
    let text = unit.repeat(bytes / unit.len());
    let body = match draw.below(8) {
        0 => format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{text}\"}}], \"max_tokens\": 1}}"
        ),
        1 => format!("{{\"prompt\": \"{text}\", \"max_tokens\": 1}}"),
        2 => format!("{{\"prompt\": [\"{text}\", \"a\"], \"max_tokens\": 1}}"),
        3 => format!("{{\"input\": \"{text}\"}}"),
        4 => format!("{{\"messages\": [{{\"role\": \"{text}\", \"content\": \"a\"}}]}}"),
        5 => format!("{{\"model\": \"{text}\", \"prompt\": \"a\"}}"),
        6 => format!("{{\"prompt\": \"a\", \"{text}\": 1, \"max_tokens\": 1}}"),
        _ => format!("{{\"prompt\": \"a\", \"user\": \"{text}\", \"max_tokens\": 1}}"),
    };
    let path = if body.starts_with("{\"input") {
        "/v1/embeddings"
    } else {
        draw.pick(&[CHAT, COMPLETIONS, "/tokenize"])
    };
    post(path, body.as_bytes())
}

fn of_encoding(draw: &mut Draw) -> Hostile {
    let good = text_of(chat(draw, json!({})));
    let text = String::from_utf8_lossy(&good).into_owned();
    let path = draw.pick(&[CHAT, COMPLETIONS, "/tokenize"]);
    match draw.below(14) {
        0 => post(path, &[b"\xef\xbb\xbf", &good[..]].concat()),
        1 => post(path, &text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>()),
        2 => post(path, &text.encode_utf16().flat_map(u16::to_be_bytes).collect::<Vec<_>>()),
        3 => {
            let mut broken = good;
            let at = draw.below(broken.len() as u64) as usize;
            broken[at] = draw.pick(&[0xff, 0xc0, 0x80, 0x00, b'"', b'\\', b'}']);
            post(path, &broken)
        }
        4 => post(path, text.replace("Say", "\\ud800").as_bytes()),
        5 => post(path, text.replace("Say", "\\udc00\\ud800").as_bytes()),
        6 => post(path, &good[..draw.below(good.len() as u64) as usize]),
        7 => send(
            path,
            "content-type: application/json\r\ncontent-encoding: gzip\r\n",
            b"\x1f\x8b\x08\0\0",
        ),
        8 => send(
            path,
            draw.pick(&["", "content-type: text/plain\r\n", "content-type: \r\n"]),
            &good,
        ),
        9 => chunked(path, &good, draw),
        10 => {
            // Declares more bytes than it sends, then closes.
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
                 content-type: application/json\r\ncontent-length: {}\r\n\r\n",
                good.len() + 1 + draw.below(1 << 40) as usize
            );
            let mut cut = raw([head.as_bytes(), &good].concat(), false);
            cut.leaves_after = Some(cut.bytes.len());
            cut
        }
        11 => {
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
                 content-type: application/json\r\ncontent-length: {}\r\n\r\n",
                draw.pick(&["-1", "0x10", "99999999999999999999", "1,1", "", "12 12"])
            );
            raw([head.as_bytes(), &good].concat(), false)
        }
        12 => post(path, &vec![draw.next() as u8; draw.size(1, 5000)]),
        _ => post(path, &(0..draw.size(1, 5000)).map(|_| draw.next() as u8).collect::<Vec<_>>()),
    }
}

fn chunked(path: &str, body: &[u8], draw: &mut Draw) -> Hostile {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    let good = draw.one_in(2);
    let mut bytes = head.into_bytes();
    for piece in body.chunks(draw.size(1, 64)) {
        let size = match good {
            true => format!("{:x}", piece.len()),
            false => draw.pick(&["0", "-1", "zz", "ffffffffffffffffff", "1", "10", ";", ""]).into(),
        };
        bytes.extend_from_slice(format!("{size}\r\n").as_bytes());
        bytes.extend_from_slice(piece);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(b"0\r\n\r\n");
    raw(bytes, good)
}

fn of_nesting(draw: &mut Draw) -> Hostile {
    let depth = draw.size(100, 200_000);
    let (open, close) = draw.pick(&[("[", "]"), ("{\"a\":", "}"), ("[[", "]]"), ("{\"\":[", "]}")]);
    let closed = if draw.one_in(2) { close.repeat(depth) } else { String::new() };
    let deep = format!("{}1{closed}", open.repeat(depth));
    let path = draw.pick(&ROUTES);
    let body = match draw.below(7) {
        0 => deep,
        1 => format!("{{\"messages\": {deep}}}"),
        2 => format!("{{\"prompt\": {deep}}}"),
        3 => format!("{{\"tokens\": {deep}, \"input\": {deep}}}"),
        4 => format!("{{\"messages\": [{{\"role\": \"user\", \"content\": {deep}}}]}}"),
        5 => draw.pick(&["[]", "null", "3", "\"x\"", "true", "[{\"messages\": []}]", ""]).into(),
        _ => {
            let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}});
            let messages = json!([{"role": "assistant", "tool_calls": [call]}]);
            json!({"messages": messages, "max_tokens": 8}).to_string()
        }
    };
    post(path, body.as_bytes())
}

fn of_kwargs(draw: &mut Draw) -> Hostile {
    let mut deep = json!(1);
    for _ in 0..draw.size(1, 120) {
        deep = json!({"a": deep});
    }
    let kwargs = match draw.below(7) {
        0 => json!({"a": "x".repeat(draw.size(1000, 7_700_000))}),
        1 => json!({"a": vec![json!({"": 0}); draw.size(10, 200_000)]}),
        2 => json!({"a": deep}),
        3 => {
            json!({draw.pick(&["messages", "tools", "bos_token", "add_generation_prompt", "__marker"]): []})
        }
        4 => {
            Value::Object((0..draw.size(1, 100_000)).map(|i| (format!("v{i}"), json!(i))).collect())
        }
        5 => json!({"enable_thinking": draw.one_in(2), "documents": anything(draw)}),
        _ => anything(draw),
    };
    post(CHAT, &text_of(chat(draw, json!({"chat_template_kwargs": kwargs}))))
}

fn of_tokens(draw: &mut Draw) -> Hostile {
    let id =
        draw.pick(&["1", "0", "2147483648", "4294967295", "4294967296", "-1", "1.5", "300", "1e3"]);
    let count = draw.size(1, 1_000_000);
    let list = format!("[{}{id}]", format!("{id},").repeat(count));
    let lists = || format!("[{}[1]]", format!("{},", &list).repeat(2));
    match draw.below(6) {
        0 => post(COMPLETIONS, format!("{{\"prompt\": {list}, \"max_tokens\": 1}}").as_bytes()),
        1 => post("/v1/embeddings", format!("{{\"input\": {list}}}").as_bytes()),
        2 => post("/detokenize", format!("{{\"tokens\": {list}}}").as_bytes()),
        3 => {
            post(COMPLETIONS, format!("{{\"prompt\": {}, \"max_tokens\": 1}}", lists()).as_bytes())
        }
        4 => post("/v1/embeddings", format!("{{\"input\": {}}}", lists()).as_bytes()),
        _ => {
            let ids = vec![draw.below(60_000); draw.size(1, 2000)];
            post("/detokenize", json!({"tokens": ids}).to_string().as_bytes())
        }
    }
}

fn of_batches(draw: &mut Draw) -> Hostile {
    let prompts = vec!["Say"; draw.size(1, 300)];
    let n = 1 + draw.below(40);
    let mut ask = json!({"prompt": prompts, "n": n, "max_tokens": 1, "echo": draw.one_in(2)});
    if draw.one_in(2) {
        ask["logprobs"] = json!(draw.below(22));
    }
    if draw.one_in(2) {
        ask["stop"] = json!(["zzz"]);
    }
    if draw.one_in(3) {
        ask["stream"] = json!(true);
    }
    if draw.one_in(4) {
        ask["prompt"] = json!([vec![1; draw.size(1, 4000)], [1]]);
    }
    post(COMPLETIONS, ask.to_string().as_bytes())
}

fn of_wire(draw: &mut Draw) -> Hostile {
    let get = |path: &str, headers: &str| {
        let text =
            format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n");
        raw(text.into_bytes(), true)
    };
    match draw.below(12) {
        0 => get(&format!("/{}", "%2e%2e%2f".repeat(draw.size(1, 2000))), ""),
        1 => get("/v1/models/%ff%fe", ""),
        2 => get(&format!("/v1/models/{}", "x".repeat(draw.size(1, 20_000))), ""),
        3 => get("/health/live", &format!("x-long: {}\r\n", "x".repeat(draw.size(1, 60_000)))),
        4 => get("/metrics", &"x-many: 1\r\n".repeat(draw.size(1, 400))),
        5 => get(
            draw.pick(&[
                "/openapi.json",
                "/",
                "/live/graph",
                "/live/plan?bucket=%00",
                "/live/plan",
            ]),
            "",
        ),
        6 => {
            let method = draw.pick(&["PUT", "DELETE", "OPTIONS", "PATCH", "BREW"]);
            let text =
                format!("{method} {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
            raw(text.into_bytes(), true)
        }
        7 => {
            let host =
                draw.pick(&["evil.example", "", "localhost:99999999", "[::1", "a b", "127.0.0.1"]);
            let text =
                format!("GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
            raw(text.into_bytes(), true)
        }
        8 => raw(b"GET /health/live HTTP/1.1\r\nconnection: close\r\n\r\n".to_vec(), true),
        9 => raw((0..draw.size(1, 2000)).map(|_| draw.next() as u8).collect(), false),
        10 => raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), false),
        _ => get(
            "/health/ready",
            &format!(
                "x-request-id: {}\r\nauthorization: Basic {}\r\n",
                "\u{e9}".repeat(40),
                "A".repeat(2000)
            ),
        ),
    }
}

fn of_leaving(draw: &mut Draw) -> Hostile {
    let more =
        json!({"stream": true, "max_tokens": 64, "ignore_eos": true, "n": 1 + draw.below(4)});
    let mut left = post(CHAT, &text_of(chat(draw, more)));
    left.due = false;
    left.leaves_after = Some(1 + draw.below(left.bytes.len() as u64) as usize);
    if draw.one_in(2) {
        left.leaves_after = Some(left.bytes.len());
    }
    left
}

fn of_ordinary(draw: &mut Draw) -> Hostile {
    let held = json!({"type": "object", "properties": {"a": schema_leaf(draw)}, "required": ["a"]});
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": held}});
    let mut fine = match draw.below(5) {
        0 => post(CHAT, &text_of(chat(draw, json!({"response_format": format})))),
        1 => post(
            COMPLETIONS,
            json!({"prompt": "Once upon", "max_tokens": 4}).to_string().as_bytes(),
        ),
        2 => post("/tokenize", json!({"prompt": "Once upon a time"}).to_string().as_bytes()),
        3 => post("/detokenize", json!({"tokens": [1, 2, 3]}).to_string().as_bytes()),
        _ => post(CHAT, &text_of(chat(draw, json!({})))),
    };
    fine.ordinary = true;
    fine
}
