//! Large, many or malformed bodies: refused early, and processed on worker threads.

use crate::bed::{Bed, config, model, soon};
use engine::request::Token;
use load::client::Connection;
use mock::MockConfig;
use serde_json::{Value, json};
use server::{Model, ServerConfig};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use text::bytes::ByteText;
use text::{Chat, Detokenize, Rendered, TextError, TextModel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// A tokenizer that blocks on long prompts until it is released.
#[derive(Clone, Default)]
struct BlockingText {
    state: Arc<(Mutex<(u32, bool)>, Condvar)>,
}

impl BlockingText {
    fn waiting(&self) -> u32 {
        self.state.0.lock().unwrap().0
    }

    fn release(&self) {
        self.state.0.lock().unwrap().1 = true;
        self.state.1.notify_all();
    }

    fn block(&self, bytes: usize) {
        if bytes < 4096 {
            return;
        }
        let mut state = self.state.0.lock().unwrap();
        state.0 += 1;
        while !state.1 {
            state = self.state.1.wait(state).unwrap();
        }
    }
}

impl TextModel for BlockingText {
    fn encode(&self, text: &str, add_special: bool, most: usize) -> Result<Vec<Token>, TextError> {
        self.block(text.len());
        ByteText.encode(text, add_special, most)
    }
    fn render(&self, chat: &Chat, most: usize) -> Result<Rendered, TextError> {
        let rendered = ByteText.render(chat, most);
        self.block(rendered.as_ref().map_or(0, |rendered| rendered.text.len()));
        rendered
    }
    fn longest_token(&self) -> Option<usize> {
        None
    }
    fn token_bytes(&self, token: Token) -> Option<Vec<u8>> {
        ByteText.token_bytes(token)
    }
    fn is_special(&self, token: Token) -> bool {
        ByteText.is_special(token)
    }
    fn detokenizer(&self) -> Box<dyn Detokenize> {
        ByteText.detokenizer()
    }
    fn stop_tokens(&self) -> &[Token] {
        &[257, 258]
    }
    fn vocab(&self) -> u32 {
        259
    }
}

async fn blocking_bed(config: ServerConfig) -> (Bed, BlockingText) {
    let text = BlockingText::default();
    let model = Model::new("mock", 8192, Arc::new(text.clone()));
    (Bed::with(config, MockConfig::default(), model).await, text)
}

fn ask_in_background(bed: &Bed, path: &'static str, body: Value) -> tokio::task::JoinHandle<u16> {
    let target = bed.target.clone();
    tokio::spawn(async move {
        let mut wire = Connection::open(&target).await.unwrap();
        let head = wire.request("POST", path, &[], body.to_string().as_bytes()).await.unwrap();
        wire.body().await.unwrap();
        head.status
    })
}

/// While every worker thread is blocked and more large bodies wait, health checks, small requests
/// and streams still work.
#[tokio::test]
async fn large_bodies_delay_no_other_client() {
    let (bed, text) = blocking_bed(ServerConfig { work_threads: 2, ..config() }).await;
    let long = "x".repeat(5000);
    let mut large = Vec::new();
    for _ in 0..2 {
        large.push(ask_in_background(&bed, COMPLETIONS, json!({"prompt": long})));
        let messages = json!([{"role": "user", "content": long}]);
        large.push(ask_in_background(&bed, CHAT, json!({"messages": messages})));
        large.push(ask_in_background(&bed, "/tokenize", json!({"messages": messages})));
        large.push(ask_in_background(&bed, "/tokenize", json!({"prompt": long})));
    }
    bed.until("both threads are blocked", || text.waiting() == 2).await;
    for _ in 0..10 {
        assert_eq!(bed.get("/health/live").await.0.status, 200);
        assert_eq!(bed.get("/metrics").await.0.status, 200);
        let made = bed.ok(COMPLETIONS, &json!({"prompt": "small"})).await;
        assert_eq!(made["choices"][0]["text"], "small");
        let ask = json!({"messages": [{"role": "user", "content": "small"}], "stream": true});
        assert_eq!(bed.stream(CHAT, &ask).await.last().unwrap(), "[DONE]");
    }
    assert!(large.iter().all(|one| !one.is_finished()));
    text.release();
    for one in large {
        assert_eq!(soon("a large request is answered", one).await.unwrap(), 200);
    }
}

#[tokio::test]
async fn bodies_share_one_budget() {
    let mut config = config();
    config.limits.body_bytes = 90_000;
    config.limits.body_budget_bytes = 128 * 1024;
    config.limits.body_wait_ms = 50;
    config.limits.body_ms = 2000;
    let (bed, text) = blocking_bed(config).await;
    let large = json!({"prompt": "x".repeat(8000), "user": "u".repeat(70_000)});
    let holds = ask_in_background(&bed, COMPLETIONS, large.clone());
    bed.until("its body is held", || text.waiting() == 1).await;
    for path in [COMPLETIONS, CHAT, "/tokenize"] {
        let (head, body) = bed.try_post(path, large.to_string().as_bytes()).await.unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(head.status, 429, "{body}");
        assert_eq!(head.header("retry-after"), Some("1"));
        assert!(body["error"]["message"].as_str().unwrap().contains("131072 bytes"), "{body}");
    }
    bed.ok(COMPLETIONS, &json!({"prompt": "small"})).await;
    text.release();
    assert_eq!(holds.await.unwrap(), 200);
    bed.ok(COMPLETIONS, &large).await;
    // A declared length takes nothing from the budget; received bytes do until the request ends.
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n\
                content-type: application/json\r\n";
    let mut claims = Vec::new();
    for _ in 0..20 {
        let mut wire = bed.connect().await;
        let text = format!("{head}content-length: 90000\r\n\r\n{{");
        wire.stream().write_all(text.as_bytes()).await.unwrap();
        claims.push(wire);
    }
    bed.ok(COMPLETIONS, &large).await;
    let mut wire = bed.connect().await;
    let sent = "x".repeat(80_000);
    let text = format!("{head}transfer-encoding: chunked\r\n\r\n13880\r\n{sent}\r\n");
    wire.stream().write_all(text.as_bytes()).await.unwrap();
    soon("a body counts while it arrives", async {
        while bed.post(COMPLETIONS, &large).await.0 != 429 {}
    })
    .await;
    let mut answer = vec![0; 12];
    wire.stream().read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 408");
    bed.ok(COMPLETIONS, &large).await;
}

/// Text with too many bytes to fit is refused on every route before it is tokenized.
#[tokio::test]
async fn text_that_cannot_fit_is_refused_by_its_size() {
    let bed = Bed::new(MockConfig { embedding: 4, ..MockConfig::default() }).await;
    let long = "x".repeat(7 << 20);
    let said = json!([{"role": "user", "content": long}]);
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": long}]}]);
    for (path, ask, param) in [
        (COMPLETIONS, json!({"prompt": long}), "prompt"),
        (COMPLETIONS, json!({"prompt": ["a", long]}), "prompt"),
        (CHAT, json!({"messages": said}), "messages"),
        (CHAT, json!({"messages": parts}), "messages"),
        ("/v1/embeddings", json!({"input": long}), "input"),
        ("/tokenize", json!({"prompt": long}), "prompt"),
        ("/tokenize", json!({"messages": said}), "messages"),
    ] {
        let error = bed.error(path, &ask, 400).await;
        assert_eq!(error["param"], param);
        assert_eq!(error["code"], "context_length_exceeded");
        let message = error["message"].as_str().unwrap();
        // For tokenize, the rendered text counts.
        assert!(message.contains("bytes"), "{path}: {message}");
    }
    // Text that may fit by its size is tokenized up to the limit.
    let error = bed.error(COMPLETIONS, &json!({"prompt": "x".repeat(9000)}), 400).await;
    assert_eq!(error["message"], "the prompt has too many tokens; at most 8191 are allowed");
    bed.ok(COMPLETIONS, &json!({"prompt": "x".repeat(8191)})).await;
}

#[tokio::test]
async fn a_body_must_be_an_object() {
    let bed = Bed::new(MockConfig::default()).await;
    let fields = r#"["x", null, null, null, null]"#;
    for path in [CHAT, COMPLETIONS, "/v1/embeddings", "/tokenize", "/detokenize"] {
        for (text, found) in [
            (fields, "a JSON list"),
            ("  [[[]]]", "a JSON list"),
            ("null", "null"),
            ("3", "a number"),
            ("\"x\"", "a JSON string"),
            ("true", "true or false"),
            ("", "empty"),
            ("\u{feff}{}", "a byte order mark"),
        ] {
            let (status, body) = bed.post_text(path, text).await;
            assert_eq!(status, 400, "{path} {text}");
            let message = body["error"]["message"].as_str().unwrap();
            assert!(message.contains(found), "{path} {text}: {message}");
        }
    }
    for bytes in [&b"\xff\xfe{\0}\0"[..], b"{\"prompt\": \"\xff\xfe\"}", b"{\"prompt\": \"a\0b\"}"]
    {
        assert_eq!(bed.try_post(COMPLETIONS, bytes).await.unwrap().0.status, 400);
    }
    let mut wire = bed.connect().await;
    let gzip = [("content-encoding", "gzip")];
    let head = wire.request("POST", COMPLETIONS, &gzip, b"{}").await.unwrap();
    assert_eq!(head.status, 415);
}

/// Parsed JSON can take forty times the memory of its text, so values are counted before parsing.
#[tokio::test]
async fn values_are_counted_before_parsing() {
    let bed = Bed::new(MockConfig::default()).await;
    let many = format!("[{}1]", "{\"\":0},".repeat(200_000));
    let said = "\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]";
    let arguments = Value::from(format!("{{\"a\": {many}}}"));
    let call = format!(
        "{{\"role\": \"assistant\", \"tool_calls\": [{{\"id\": \"1\", \"type\": \"function\", \
         \"function\": {{\"name\": \"f\", \"arguments\": {arguments}}}}}]}}"
    );
    for (path, body) in [
        (CHAT, format!("{{{said}, \"chat_template_kwargs\": {{\"a\": {many}}}}}")),
        (CHAT, format!("{{{said}, \"unknown\": {many}}}")),
        (CHAT, format!("{{\"messages\": {many}}}")),
        (CHAT, format!("{{\"messages\": [{call}]}}")),
        ("/tokenize", format!("{{\"messages\": [{call}]}}")),
        (COMPLETIONS, format!("{{\"prompt\": {many}}}")),
        ("/v1/embeddings", format!("{{\"input\": {}}}", many.replace("{\"\":0}", "[1]"))),
    ] {
        let (status, answer) = bed.post_text(path, &body).await;
        assert_eq!(status, 400, "{path}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("131072"), "{path}: {message}");
    }
    // Token ids do not count as values: a million of them are only too long.
    let ids = format!("[{}1]", "1,".repeat(1_000_000));
    let (status, answer) = bed.post_text(COMPLETIONS, &format!("{{\"prompt\": {ids}}}")).await;
    assert_eq!((status, answer["error"]["code"].as_str()), (400, Some("context_length_exceeded")));
    let (status, answer) = bed.post_text("/detokenize", &format!("{{\"tokens\": {ids}}}")).await;
    assert_eq!(status, 400);
    assert!(answer["error"]["message"].as_str().unwrap().contains("131072"), "{answer}");
}

#[tokio::test]
async fn template_variables_are_bounded_and_not_reserved() {
    let bed = Bed::new(MockConfig::default()).await;
    let ask = |kwargs: Value| json!({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": kwargs});
    for name in [
        "messages",
        "tools",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "unk_token",
        "raise_exception",
        "strftime_now",
        "__marker",
    ] {
        let error = bed.error(CHAT, &ask(json!({"fine": 1, name: []})), 400).await;
        assert_eq!(error["param"], format!("chat_template_kwargs.{name}"));
        assert!(error["message"].as_str().unwrap().contains(name));
    }
    let many: serde_json::Map<_, _> = (0..65).map(|i| (format!("v{i}"), json!(1))).collect();
    let mut deep = json!(1);
    for _ in 0..17 {
        deep = json!([deep]);
    }
    for kwargs in [
        Value::from(many),
        json!({"a": "x".repeat(7_700_000)}),
        json!({"a": deep}),
        json!([]),
        json!(1),
    ] {
        let error = bed.error(CHAT, &ask(kwargs), 400).await;
        assert_eq!(error["param"], "chat_template_kwargs");
    }
    bed.ok(CHAT, &ask(json!({"enable_thinking": false, "documents": [{"a": [1]}]}))).await;
}

/// Errors quote input only up to a bounded length.
#[tokio::test]
async fn errors_are_short() {
    let bed = Bed::new(MockConfig::default()).await;
    let long = "\u{1}".repeat(100_000);
    let said = json!([{"role": "user", "content": "x"}]);
    for (path, ask) in [
        (COMPLETIONS, json!({"prompt": "x", "model": long})),
        (COMPLETIONS, json!({"prompt": "x", "temperature": long})),
        (COMPLETIONS, json!({"prompt": "x", "logit_bias": {&long: 1}})),
        (CHAT, json!({"messages": [{"role": long, "content": "x"}]})),
        (CHAT, json!({"messages": said, "tool_choice": long})),
        (CHAT, json!({"messages": said, "response_format": {"type": long}})),
        (CHAT, json!({"messages": said, "chat_template_kwargs": {format!("__{long}"): 1}})),
        ("/v1/embeddings", json!({"input": "x", "pooling": long})),
    ] {
        let (head, body) = bed.try_post(path, ask.to_string().as_bytes()).await.unwrap();
        assert!(matches!(head.status, 400 | 404), "{}", head.status);
        assert!(body.len() < 10_000, "{} bytes", body.len());
    }
    let (head, body) = bed.get(&format!("/{}", "%20".repeat(5000))).await;
    assert_eq!(head.status, 404);
    assert!(body.len() < 2000, "{} bytes", body.len());
}

#[tokio::test]
async fn a_client_that_never_reads_is_disconnected() {
    let mut config = config();
    config.limits.connections = 1;
    config.limits.write_ms = 200;
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    let mut wire = bed.connect().await;
    let ask = json!({"prompt": "x", "ignore_eos": true, "max_tokens": 8000, "logprobs": 20,
                     "n": 8, "stream": true});
    let ask = ask.to_string();
    let text = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{ask}",
        ask.len()
    );
    wire.stream().write_all(text.as_bytes()).await.unwrap();
    soon("its connection is free again", async {
        loop {
            let mut next = bed.connect().await;
            let head = next.request("GET", "/health/live", &[], b"").await;
            if head.is_ok_and(|head| head.status == 200) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    drop(wire);
}
