//! The other routes, API keys, draining and traces.

use crate::bed::{Bed, config, model, soon};
use load::client::Connection;
use mock::MockConfig;
use serde_json::{Value, json};
use server::{Exit, ServerConfig};
use std::time::Duration;

#[tokio::test]
async fn models() {
    let bed = Bed::new(MockConfig::default()).await;
    let (head, body) = bed.get("/v1/models").await;
    let list: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(head.status, 200);
    assert_eq!(list["data"][0]["id"], "mock");
    assert_eq!(list["data"][0]["max_model_len"], 8192);
    assert_eq!(bed.get("/v1/models/mock").await.0.status, 200);
    assert_eq!(bed.get("/v1/models/org/other").await.0.status, 404);
}

#[tokio::test]
async fn tokenize_and_detokenize() {
    let bed = Bed::new(MockConfig::default()).await;
    let there = bed.ok("/tokenize", &json!({"prompt": "hé", "return_token_strs": true})).await;
    assert_eq!(there["tokens"], json!([104, 195, 169]));
    assert_eq!(there["count"], 3);
    assert_eq!(there["token_strs"][0], "h");
    let back = bed.ok("/detokenize", &json!({"tokens": [104, 195, 169]})).await;
    assert_eq!(back["prompt"], "hé");
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    assert_eq!(bed.ok("/tokenize", &chat).await["tokens"][0], 256);
    bed.error("/tokenize", &json!({}), 400).await;
    bed.error("/tokenize", &json!({"messages": []}), 400).await;
    bed.error("/detokenize", &json!({"tokens": [259]}), 400).await;
    bed.error("/detokenize", &json!({"tokens": [-1]}), 400).await;
}

#[tokio::test]
async fn tokenizer_info() {
    let bed = Bed::new(MockConfig::default()).await;
    let (head, body) = bed.get("/tokenizer_info").await;
    let info: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((head.status, &info["vocab_size"]), (200, &json!(259)));
    assert_eq!(
        (&info["eos_token"], &info["eos_token_ids"]),
        (&json!("<|im_end|>"), &json!([257, 258]))
    );
    assert_eq!(bed.get("/version").await.0.status, 404);
}

#[tokio::test]
async fn embeddings() {
    let bed = Bed::new(MockConfig { embedding: 8, ..MockConfig::default() }).await;
    let ask = json!({"input": ["ab", "b"], "model": "mock"});
    let made = bed.ok("/v1/embeddings", &ask).await;
    assert_eq!(made["data"][1]["index"], 1);
    assert_eq!(made["data"][0]["embedding"].as_array().unwrap().len(), 8);
    assert_eq!(made["usage"]["prompt_tokens"], 3);
    let last = json!({"input": "ab", "pooling": "last"});
    let last = bed.ok("/v1/embeddings", &last).await;
    assert_eq!(last["data"][0]["embedding"], made["data"][1]["embedding"]);
    let coded = json!({"input": "b", "encoding_format": "base64"});
    let coded = bed.ok("/v1/embeddings", &coded).await;
    assert_eq!(coded["data"][0]["embedding"].as_str().unwrap().len(), 44);
    for (wrong, param) in [
        (json!({"input": "b", "dimensions": 9}), "dimensions"),
        (json!({"input": "b", "pooling": "max"}), "pooling"),
        (json!({"input": "b", "encoding_format": "int8"}), "encoding_format"),
        (json!({"input": ""}), "input"),
    ] {
        assert_eq!(bed.error("/v1/embeddings", &wrong, 400).await["param"], param);
    }
    let none = Bed::new(MockConfig::default()).await;
    let error = none.error("/v1/embeddings", &json!({"input": "b"}), 501).await;
    assert_eq!(error["code"], "not_supported");
}

#[tokio::test]
async fn metrics_count_what_happened() {
    let bed = Bed::new(MockConfig::default()).await;
    bed.ok("/v1/completions", &json!({"prompt": "hello", "max_tokens": 3})).await;
    // There are about ten snapshots a second, so the newest may be from the middle of the answer.
    bed.until("a snapshot from after the answer", || {
        let snapshot = bed.link.snapshot();
        !snapshot.steps.is_empty() && snapshot.running == 0 && snapshot.pages.used == 0
    })
    .await;
    let (head, text) = bed.get("/metrics").await;
    assert_eq!(head.status, 200);
    let text = String::from_utf8(text).unwrap();
    for line in [
        "dacapo_generated_tokens_total 3",
        "dacapo_prompt_tokens_total 5",
        "dacapo_ready 1",
        "dacapo_requests_waiting 0",
        "dacapo_kv_pages{state=\"used\"} 0",
        "dacapo_time_to_first_token_seconds_count 1",
        "dacapo_inter_token_seconds_count 2",
        "dacapo_choices_finished_total{finish=\"length\"} 1",
        "dacapo_graph_steps_replayed_total{phase=\"prefill\",bucket=\"128\"} 1",
        "dacapo_http_requests_total{route=\"/v1/completions\",status=\"200\"} 1",
        "vllm:num_requests_waiting 0",
        "vllm:num_requests_running 0",
        "vllm:kv_cache_usage_perc 0.0",
        "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"65536\"} 1",
        "# EOF",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn every_route_but_health_requires_the_key() {
    let config = ServerConfig { api_keys: vec!["sesame".into()], ..config() };
    let mut bed = Bed::with(config, MockConfig::default(), model()).await;
    let routes = [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/mock"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/tokenizer_info"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/x"),
        ("DELETE", "/v1/responses/x"),
        ("GET", "/metrics"),
        ("GET", "/get_server_info"),
        ("GET", "/get_model_info"),
        ("GET", "/v1/loads"),
        ("GET", "/get_load"),
        ("GET", "/openapi.json"),
        ("GET", "/live"),
        ("GET", "/live/graph"),
        ("GET", "/live/plan?bucket=decode/1"),
        ("GET", "/"),
        ("GET", "/app.js"),
        ("GET", "/nowhere"),
        ("DELETE", "/v1/models"),
    ];
    assert_eq!(bed.get("/v1/models").await.0.status, 200);
    for key in [None, Some("Sesame".to_string())] {
        bed.target.key = key;
        for (method, path) in routes {
            let mut wire = bed.connect().await;
            let head = wire.request(method, path, &[], b"").await.unwrap();
            assert_eq!(head.status, 401, "{method} {path}");
            let body: Value = serde_json::from_slice(&wire.body().await.unwrap()).unwrap();
            assert_eq!(body["error"]["code"], "invalid_api_key");
        }
        for path in ["/health", "/health/live", "/health/ready", "/ping"] {
            assert_eq!(bed.get(path).await.0.status, 200, "{path}");
        }
    }
    let mut wire = bed.connect().await;
    let head = wire.request("GET", "/", &[("accept", "text/html")], b"").await.unwrap();
    assert!(head.header("www-authenticate").unwrap().starts_with("Basic"));
}

#[tokio::test]
async fn pages_of_allowed_origins_may_use_the_server() {
    let config = ServerConfig {
        api_keys: vec!["sesame".into()],
        allow_origins: vec!["https://chat.example".into()],
        ..config()
    };
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    for (origin, allowed) in [("https://chat.example", true), ("https://evil.example", false)] {
        let mut wire = bed.connect().await;
        let head = wire.request("GET", "/v1/models", &[("origin", origin)], b"").await.unwrap();
        assert_eq!(head.header("access-control-allow-origin"), allowed.then_some(origin));
        wire.body().await.unwrap();
        let asked = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization, content-type"),
        ];
        let mut wire = bed.connect().await;
        let head = wire.request("OPTIONS", "/v1/chat/completions", &asked, b"").await.unwrap();
        let names = head.header("access-control-allow-headers");
        assert_eq!(names, allowed.then_some("authorization, content-type"));
        assert_eq!(head.status == 204, allowed, "{}", head.status);
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_the_response_is_counted() {
    let slow = MockConfig { step_time: Duration::from_millis(300), ..MockConfig::default() };
    let bed = Bed::new(slow).await;
    let ask = json!({"prompt": "0123456789", "max_tokens": 10}).to_string();
    let mut wire = bed.connect().await;
    let left = wire.request("POST", "/v1/completions", &[], ask.as_bytes());
    assert!(tokio::time::timeout(Duration::from_millis(400), left).await.is_err());
    drop(wire);
    soon("it is counted", async {
        let line = "dacapo_http_requests_total{route=\"/v1/completions\",status=\"499\"} 1";
        while !String::from_utf8(bed.get("/metrics").await.1).unwrap().contains(line) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn the_page_and_its_files() {
    let bed = Bed::new(MockConfig::default()).await;
    let (head, body) = bed.get("/").await;
    assert_eq!(head.header("content-type"), Some("text/html; charset=utf-8"));
    let policy = head.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'self'"));
    let page = String::from_utf8(body).unwrap();
    assert!(!page.contains("https://") && !page.contains("style=") && !page.contains("onclick="));
    for file in ["/style.css", "/app.js"] {
        assert_eq!(bed.get(file).await.0.status, 200, "{file}");
    }
    let (_, graph) = bed.get("/live/graph").await;
    let graph: Value = serde_json::from_slice(&graph).unwrap();
    assert_eq!(graph["model"], "mock");
    bed.until("the first snapshot is published", || !bed.link.snapshot().graph.plans.is_empty())
        .await;
    let (head, svg) = bed.get("/live/plan?bucket=decode%2F8").await;
    assert_eq!(head.header("content-type"), Some("image/svg+xml"));
    assert!(svg.starts_with(b"<svg"));
    assert_eq!(bed.get("/live/plan?bucket=none").await.0.status, 404);
    assert_eq!(bed.get("/live/plan").await.0.status, 400);
}

#[tokio::test]
async fn the_live_view_reports_every_step_once() {
    let bed = Bed::new(MockConfig::default()).await;
    let mut wire = bed.connect().await;
    let head = wire.request("GET", "/live", &[], b"").await.unwrap();
    assert_eq!(head.header("content-type"), Some("text/event-stream"));
    bed.ok("/v1/completions", &json!({"prompt": "hello"})).await;
    // Five tokens and the end are six steps. Each step is in exactly one view.
    let (mut view, mut steps_seen) = (Value::Null, Vec::<u64>::new());
    let mut parser = load::SseParser::default();
    while view["tokens"] != 5 || steps_seen.len() < 6 {
        let mut event = |data: &str| {
            view = serde_json::from_str(data).unwrap();
            let steps = view["steps"].as_array().unwrap();
            steps_seen.extend(steps.iter().map(|step| step["step"].as_u64().unwrap()));
        };
        let mut take = |bytes: &[u8]| {
            parser.push(bytes, &mut event);
        };
        assert!(soon("the next view", wire.read(&mut take)).await.unwrap());
    }
    assert_eq!(steps_seen, [1, 2, 3, 4, 5, 6]);
    assert_eq!(view["seats"], 256);
    assert_eq!(view["ready"], json!({"Ok": null}));
}

#[tokio::test]
async fn unknown_routes_and_request_ids() {
    let bed = Bed::new(MockConfig::default()).await;
    assert_eq!(bed.get("/v2/models").await.0.status, 404);
    assert_eq!(bed.get("/favicon.ico").await.0.status, 404);
    let (head, _) = bed.get("/v1/completions").await;
    assert_eq!(head.status, 405);
    assert!(head.header("allow").is_some());
    let (head, _) = bed.get("/health/live").await;
    assert!(head.header("x-request-id").unwrap().starts_with("req-"));
    let mut wire = bed.connect().await;
    let given = [("x-request-id", "mine-1")];
    let head = wire.request("GET", "/health/live", &given, b"").await.unwrap();
    assert_eq!(head.header("x-request-id"), Some("mine-1"));
}

#[tokio::test]
async fn draining_finishes_running_requests_and_accepts_no_new_ones() {
    let slow = MockConfig { step_time: Duration::from_millis(20), ..MockConfig::default() };
    let mut bed = Bed::new(slow).await;
    let ask = json!({"prompt": "0123456789", "max_tokens": 10, "stream": true}).to_string();
    let mut wire = bed.connect().await;
    let mut kept = bed.connect().await;
    let head = kept.request("GET", "/health/ready", &[], b"").await.unwrap();
    assert_eq!(head.status, 200);
    kept.body().await.unwrap();
    let head = wire.request("POST", "/v1/completions", &[], ask.as_bytes()).await.unwrap();
    assert_eq!(head.status, 200);
    bed.begin_stop();
    soon("new connections are refused", async {
        while Connection::open(&bed.target).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let events = crate::bed::read_events(&mut wire).await;
    assert_eq!(events.last().unwrap(), "[DONE]");
    assert!(events.iter().all(|e| !e.contains("error")));
    assert_eq!(bed.ended().await, Exit::Drained);
}

#[tokio::test]
async fn a_server_that_leaves_first_fails_its_health_checks() {
    let mut config = config();
    config.limits.leave_ms = 1500;
    let mut bed = Bed::with(config, MockConfig::default(), model()).await;
    let ask = json!({"prompt": "0123456789", "max_tokens": 10});
    assert_eq!(bed.get("/health").await.0.status, 200);
    bed.begin_stop();
    soon("health checks fail", async {
        while bed.get("/health").await.0.status != 503 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!(bed.get("/health/live").await.0.status, 200);
    bed.ok("/v1/completions", &ask).await;
    assert_eq!(bed.ended().await, Exit::Drained);
}

#[tokio::test]
async fn routers_learn_what_the_worker_is_and_how_busy() {
    let bed = Bed::new(MockConfig::default()).await;
    bed.ok("/v1/completions", &json!({"prompt": "hello", "max_tokens": 3})).await;
    bed.until("a snapshot from after the answer", || {
        let snapshot = bed.link.snapshot();
        !snapshot.steps.is_empty() && snapshot.running == 0 && snapshot.pages.used == 0
    })
    .await;
    let read = async |path: &str| -> Value {
        let (head, body) = bed.get(path).await;
        assert_eq!(head.status, 200, "{path}");
        serde_json::from_slice(&body).unwrap()
    };
    let info = read("/get_server_info").await;
    assert_eq!((&info["served_model_name"], &info["page_size"]), (&json!("mock"), &json!(16)));
    assert_eq!(info["max_total_num_tokens"], 65_536 * 16);
    assert_eq!((&info["max_running_requests"], &info["dp_size"]), (&json!(256), &json!(1)));
    let info = read("/get_model_info").await;
    assert_eq!((&info["is_generation"], &info["max_context_length"]), (&json!(true), &json!(8192)));
    let loads = read("/v1/loads").await;
    assert_eq!(loads["dp_rank_count"], 1);
    let load = &loads["loads"][0];
    assert_eq!((&load["num_running_reqs"], &load["num_waiting_reqs"]), (&json!(0), &json!(0)));
    assert_eq!((&load["num_used_tokens"], &load["token_usage"]), (&json!(0), &json!(0.0)));
    assert_eq!(&read("/get_load").await[0], load);
}

#[tokio::test]
async fn the_drain_deadline_ends_streams_with_an_error() {
    let mut config = config();
    config.limits.drain_ms = 100;
    let slow = MockConfig { step_time: Duration::from_millis(20), ..MockConfig::default() };
    let mut bed = Bed::with(config, slow, model()).await;
    let ask = json!({"prompt": "x", "ignore_eos": true, "max_tokens": 5000, "stream": true});
    let mut wire = bed.connect().await;
    let body = ask.to_string();
    let head = wire.request("POST", "/v1/completions", &[], body.as_bytes()).await.unwrap();
    assert_eq!(head.status, 200);
    bed.begin_stop();
    let events = crate::bed::read_events(&mut wire).await;
    assert_eq!(events[events.len() - 1], "[DONE]");
    assert!(events[events.len() - 2].contains("shutting down"), "{events:?}");
    assert_eq!(bed.ended().await, Exit::Cut);
}

#[tokio::test]
async fn step_records_are_written_to_the_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.jsonl");
    let config = ServerConfig { trace: Some(path.clone()), ..config() };
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    let ask = json!({"prompt": "x", "ignore_eos": true, "max_tokens": 3000});
    bed.ok("/v1/completions", &ask).await;
    assert_eq!(bed.stop().await, Exit::Drained);
    let text = std::fs::read_to_string(path).unwrap();
    let records: Vec<server::link::StepRecord> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let numbers: Vec<u64> = records.iter().map(|r| r.step).collect();
    assert_eq!(numbers, (1..=3000).collect::<Vec<_>>());
}
