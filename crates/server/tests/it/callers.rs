//! Host names, API keys and separate prefix caches.

use crate::bed::{Bed, config, model};
use engine::request::Request;
use load::client::Target;
use mock::{MockConfig, echo};
use serde_json::json;
use server::ServerConfig;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

async fn status(bed: &Bed, head: &str) -> u16 {
    let mut wire = bed.connect().await;
    wire.stream().write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    wire.stream().read_exact(&mut answer).await.unwrap();
    String::from_utf8(answer).unwrap()[9..].parse().unwrap()
}

/// DNS rebinding: a web page whose name resolves to this machine sends that name.
#[tokio::test]
async fn unknown_host_names_are_refused_on_loopback() {
    let bed = Bed::new(MockConfig::default()).await;
    let post = "content-type: application/json\r\ncontent-length: 15\r\n\r\n{\"prompt\": \"x\"}";
    for (host, expected) in [
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
    ] {
        for path in ["/", "/health/live", "/v1/models", "/metrics", "/live/graph"] {
            let head = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n");
            assert_eq!(status(&bed, &head).await, expected, "{host} {path}");
        }
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: {host}\r\n{post}");
        assert_eq!(status(&bed, &head).await, expected, "{host}");
    }
    assert_eq!(status(&bed, "GET /health/live HTTP/1.1\r\n\r\n").await, 400);
    assert_eq!(status(&bed, "GET /health/live HTTP/1.0\r\n\r\n").await, 200);
    let whole = "GET http://evil.example/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n";
    assert_eq!(status(&bed, whole).await, 421);
    let two = "GET /health/live HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n";
    assert_eq!(status(&bed, two).await, 400);
    let named = ServerConfig { allowed_hosts: vec!["llm.internal".into()], ..config() };
    let bed = Bed::with(named, MockConfig::default(), model()).await;
    for (host, expected) in [("llm.internal:80", 200), ("evil.example", 421)] {
        let head = format!("GET /health/live HTTP/1.1\r\nhost: {host}\r\n\r\n");
        assert_eq!(status(&bed, &head).await, expected, "{host}");
    }
    let keyed = ServerConfig { api_keys: vec!["sesame".into()], ..config() };
    let bed = Bed::with(keyed, MockConfig::default(), model()).await;
    let head = "GET /health/live HTTP/1.1\r\nhost: behind.a.proxy\r\n\r\n";
    assert_eq!(status(&bed, head).await, 200);
}

/// The tenants of the engine requests, per API key.
async fn tenants(share: bool, keys: &[&str]) -> Vec<[u64; 4]> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (record, answer) = (seen.clone(), echo());
    let oracle = Arc::new(move |request: &Request, choice| {
        record.lock().unwrap().push(request.tenant);
        answer(request, choice)
    });
    let config = ServerConfig {
        api_keys: keys.iter().map(|key| (*key).into()).collect(),
        share_prefix_cache: share,
        ..config()
    };
    let mut bed = Bed::with(config, MockConfig { oracle, ..MockConfig::default() }, model()).await;
    let mut all = Vec::new();
    for key in keys {
        bed.target = Target { key: Some((*key).into()), ..bed.target.clone() };
        let said = json!([{"role": "user", "content": "x"}]);
        bed.ok("/v1/completions", &json!({"prompt": "x"})).await;
        bed.ok("/v1/chat/completions", &json!({"messages": said})).await;
        bed.ok("/v1/completions", &json!({"prompt": "x", "cache_salt": "s"})).await;
        bed.ok("/v1/chat/completions", &json!({"messages": said, "cache_salt": "s"})).await;
        all.push(std::mem::take(&mut *seen.lock().unwrap()).try_into().unwrap());
    }
    all
}

#[tokio::test]
async fn clients_with_different_keys_share_a_cache_only_if_configured() {
    let apart = tenants(false, &["alice", "bob"]).await;
    for [complete, chat, salted, salted_chat] in &apart {
        assert_eq!((complete, salted), (chat, salted_chat));
        assert_ne!(complete, salted);
        assert_ne!(*complete, 0);
    }
    assert_ne!(apart[0][0], apart[1][0]);
    assert_ne!(apart[0][2], apart[1][2]);
    let shared = tenants(true, &["alice", "bob"]).await;
    assert_eq!(shared[0], shared[1]);
    assert_eq!(shared[0][0], 0);
    assert_eq!(tenants(false, &["alice"]).await[0][0], 0);
}
