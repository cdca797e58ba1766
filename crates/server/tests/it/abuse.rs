//! Malicious and broken clients.

use crate::bed::{Bed, config, model, soon};
use load::client::Connection;
use mock::MockConfig;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const CHAT: &str = "/v1/chat/completions";

async fn check_alive(bed: &Bed) {
    let made = bed.ok("/v1/completions", &json!({"prompt": "well"})).await;
    assert_eq!(made["choices"][0]["text"], "well");
}

#[tokio::test]
async fn bodies_that_are_not_requests() {
    let bed = Bed::new(MockConfig::default()).await;
    for text in [
        "",
        "{",
        "null",
        "[]",
        "3",
        "\"x\"",
        "{}",
        "{\"messages\"",
        "\u{feff}{}",
        "{} {}",
        "{\"messages\": [], \"messages\": []}",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"\\ud800\"}]}",
        "{\"temperature\": 1e999, \"messages\": []}",
        "\0\0\0",
    ] {
        let (status, body) = bed.post_text(CHAT, text).await;
        assert_eq!(status, 400, "{text:?} → {body}");
        assert!(body["error"]["message"].is_string());
    }
    let deep = "[".repeat(60_000) + &"]".repeat(60_000);
    for body in [
        deep.clone(),
        format!("{{\"messages\": {deep}}}"),
        format!("{{\"messages\": [{{\"role\": \"user\", \"content\": {deep}}}]}}"),
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"x\"}}], \"response_format\": \
             {{\"type\": \"json_schema\", \"json_schema\": {{\"schema\": {}1{}}}}}}}",
            "{\"a\":".repeat(60_000),
            "}".repeat(60_000)
        ),
        format!("{{\"prompt\": {deep}}}"),
    ] {
        let (status, _) = bed.post_text(CHAT, &body).await;
        assert_eq!(status, 400);
        let (status, _) = bed.post_text("/v1/completions", &body).await;
        assert_eq!(status, 400);
    }
    // Deep nesting in an unknown field, which is skipped and not built.
    let unread = format!(
        "{{\"messages\": [{{\"role\": \"user\", \"content\": \"x\"}}], \"max_tokens\": 1, \
         \"unknown\": {deep}}}"
    );
    let (status, _) = bed.post_text(CHAT, &unread).await;
    assert!(status == 200 || status == 400);
    check_alive(&bed).await;
}

#[tokio::test]
async fn bodies_too_large_too_slow_or_not_json() {
    let mut config = config();
    config.limits.body_bytes = 10_000;
    config.limits.body_ms = 200;
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    let large = json!({"prompt": "x".repeat(20_000)});
    bed.error("/v1/completions", &large, 413).await;
    let mut wire = bed.connect().await;
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    let text = format!(
        "{head}transfer-encoding: chunked\r\n\r\n4e20\r\n{}\r\n0\r\n\r\n",
        "x".repeat(20_000)
    );
    wire.stream().write_all(text.as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    wire.stream().read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 413");
    let mut wire = bed.connect().await;
    wire.stream()
        .write_all(format!("{head}content-length: 100\r\n\r\n{{").as_bytes())
        .await
        .unwrap();
    wire.stream().read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 408");
    for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
        let mut wire = bed.connect().await;
        let text = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n\
             content-length: 2\r\n\r\n{{}}"
        );
        wire.stream().write_all(text.as_bytes()).await.unwrap();
        wire.stream().read_exact(&mut answer).await.unwrap();
        assert_eq!(answer, b"HTTP/1.1 415", "{kind}");
    }
    check_alive(&bed).await;
}

#[tokio::test]
async fn headers_too_large_or_too_many() {
    let bed = Bed::new(MockConfig::default()).await;
    let long = "x".repeat(64 * 1024);
    let mut wire = bed.connect().await;
    let head = wire.request("GET", "/health/live", &[("x-long", &long)], b"").await.unwrap();
    assert_eq!(head.status, 431);
    let many: Vec<_> = (0..500).map(|i| (format!("x-{i}"), "y")).collect();
    let many: Vec<_> = many.iter().map(|(n, v)| (n.as_str(), *v)).collect();
    let mut wire = bed.connect().await;
    let head = wire.request("GET", "/health/live", &many, b"").await.unwrap();
    assert_eq!(head.status, 431);
    for junk in
        ["\x16\x03\x01\x02\0", "GET\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "\r\n\r\n\0\r\n\r\n"]
    {
        let mut wire = bed.connect().await;
        wire.stream().write_all(junk.as_bytes()).await.unwrap();
        wire.stream().shutdown().await.unwrap();
        let mut rest = Vec::new();
        let _ = wire.stream().read_to_end(&mut rest).await;
    }
    check_alive(&bed).await;
}

#[tokio::test]
async fn slow_heads_are_dropped_and_delay_no_other_client() {
    // With a limit of an hour, other requests must be answered while the slow heads are open.
    for header_ms in [3_600_000, 300] {
        let mut config = config();
        config.limits.header_ms = header_ms;
        let bed = Bed::with(config, MockConfig::default(), model()).await;
        let mut wires = Vec::new();
        for _ in 0..200 {
            let mut wire = bed.connect().await;
            wire.stream().write_all(b"POST /v1/completions HTTP/1.1\r\nhost: ").await.unwrap();
            wires.push(wire);
        }
        check_alive(&bed).await;
        for mut wire in wires.into_iter().filter(|_| header_ms == 300) {
            // A late head may get a response before the connection closes; only the close matters.
            let _ =
                soon("the connection is closed", wire.stream().read_to_end(&mut Vec::new())).await;
        }
    }
}

#[tokio::test]
async fn too_many_connections_get_an_error() {
    let mut config = config();
    config.limits.connections = 4;
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        let mut wire = bed.connect().await;
        assert_eq!(wire.request("GET", "/health/live", &[], b"").await.unwrap().status, 200);
        held.push(wire);
    }
    let mut wire = bed.connect().await;
    let mut answer = String::new();
    wire.stream().read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    drop(held);
    soon("the connections are free again", async {
        loop {
            let mut wire = bed.connect().await;
            let head = wire.request("GET", "/health/live", &[], b"").await;
            if head.is_ok_and(|head| head.status == 200) {
                break;
            }
        }
    })
    .await;
    check_alive(&bed).await;
}

#[tokio::test]
async fn requests_beyond_the_limit_are_refused_at_once() {
    let mut config = config();
    config.limits.inflight = 8;
    let mock =
        MockConfig { step_time: Duration::from_millis(5), seats: 4, ..MockConfig::default() };
    let bed = Bed::with(config, mock, model()).await;
    let ask = json!({"prompt": "x", "ignore_eos": true, "max_tokens": 100}).to_string();
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..32 {
        let (target, ask) = (bed.target.clone(), ask.clone());
        calls.spawn(async move {
            let mut wire = Connection::open(&target).await.unwrap();
            let head = wire.request("POST", "/v1/completions", &[], ask.as_bytes()).await.unwrap();
            let body = wire.body().await.unwrap();
            (head, serde_json::from_slice::<Value>(&body).unwrap())
        });
    }
    let (mut fine, mut refused) = (0, 0);
    while let Some(ended) = calls.join_next().await {
        let (head, body) = ended.unwrap();
        match head.status {
            200 => fine += 1,
            429 => {
                refused += 1;
                assert_eq!(head.header("retry-after"), Some("1"));
                assert_eq!(body["error"]["code"], "rate_limit_exceeded");
            }
            other => panic!("{other}: {body}"),
        }
    }
    // On a busy machine a late request may arrive after another has finished.
    assert_eq!(fine + refused, 32);
    assert!(fine >= 8 && refused > 0, "{fine} answered, {refused} refused");
    check_alive(&bed).await;
    // A call with more prompts than the limit is refused as a whole.
    let many = json!({"prompt": vec!["x"; 9]});
    bed.error("/v1/completions", &many, 429).await;
    bed.until("nothing is left", || bed.link.inflight() == 0).await;
}
