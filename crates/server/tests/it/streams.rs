//! Properties of streams for any answer and stop strings, and slow or disconnecting clients.

use crate::bed::{Bed, read_events};
use engine::request::Token;
use mock::MockConfig;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// For any answer and stop strings, the text of a stream equals that of the complete response, is
/// valid UTF-8 and has no stop string.
#[test]
fn streams_equal_complete_responses() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let answer = Arc::new(Mutex::new(Vec::<u8>::new()));
    let scripted = answer.clone();
    let oracle = Arc::new(move |_: &_, _| {
        scripted.lock().unwrap().iter().map(|b| Token::from(*b)).collect::<Vec<_>>()
    });
    let bed = runtime.block_on(Bed::new(MockConfig { oracle, ..MockConfig::default() }));
    let bytes = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..40),
        "[abé日🎼<]{0,30}".prop_map(String::into_bytes),
    ];
    let stops = proptest::collection::vec("[abé日🎼<]{1,3}", 0..3);
    let mut runner = TestRunner::new(Config { cases: 150, ..Config::default() });
    let checked = runner.run(&(bytes, stops), |(bytes, stops)| {
        answer.lock().unwrap().clone_from(&bytes);
        let ask = json!({"prompt": "x", "max_tokens": 100, "stop": stops});
        let (events, whole) = runtime.block_on(async {
            let mut streamed = ask.clone();
            streamed["stream"] = true.into();
            (bed.stream("/v1/completions", &streamed).await, bed.ok("/v1/completions", &ask).await)
        });
        let text: String = events[..events.len() - 1]
            .iter()
            .map(|e| serde_json::from_str::<Value>(e).unwrap())
            .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_string())
            .collect();
        let expected = String::from_utf8_lossy(&bytes);
        prop_assert_eq!(&whole["choices"][0]["text"], &text);
        prop_assert!(expected.starts_with(&text));
        for stop in &stops {
            prop_assert!(!text.contains(stop.as_str()));
        }
        if !stops.iter().any(|stop| expected.contains(stop.as_str())) {
            prop_assert_eq!(text, expected);
        }
        Ok(())
    });
    checked.unwrap();
}

fn endless() -> Value {
    json!({"prompt": "abc", "ignore_eos": true, "max_tokens": 8000, "stream": true})
}

#[tokio::test]
async fn a_disconnected_client_is_cancelled_and_its_pages_are_freed() {
    let mock = MockConfig { step_time: Duration::from_millis(2), ..MockConfig::default() };
    let bed = Bed::new(mock).await;
    let mut whole = endless();
    whole["stream"] = false.into();
    for ask in [endless(), whole] {
        let mut wires = Vec::new();
        for _ in 0..8 {
            let mut wire = bed.connect().await;
            let body = ask.to_string();
            let text = format!(
                "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\n\r\n{body}",
                body.len()
            );
            tokio::io::AsyncWriteExt::write_all(wire.stream(), text.as_bytes()).await.unwrap();
            wires.push(wire);
        }
        bed.until("all are running", || bed.link.snapshot().running == 8).await;
        drop(wires);
        bed.until("all are cancelled", || bed.link.inflight() == 0).await;
        bed.until("all pages are free", || bed.link.snapshot().pages.used == 0).await;
    }
}

#[tokio::test]
async fn a_client_that_stops_reading_loses_its_stream() {
    let mut config = crate::bed::config();
    config.limits.backlog = 256;
    let mock = MockConfig { context: 4_000_000, pages: 1 << 22, ..MockConfig::default() };
    let mut model = crate::bed::model();
    model.context = 4_000_000;
    let bed = Bed::with(config, mock, model).await;
    let mut ask = endless();
    ask["max_tokens"] = 3_000_000.into();
    let mut slow = bed.connect().await;
    let body = ask.to_string();
    let head = slow.request("POST", "/v1/completions", &[], body.as_bytes()).await.unwrap();
    assert_eq!(head.status, 200);
    // The socket buffers fill, then the backlog; then the engine's thread cancels the request.
    bed.until("the stream is cancelled", || bed.link.inflight() == 0).await;
    let other = bed.ok("/v1/completions", &json!({"prompt": "quick"})).await;
    assert_eq!(other["choices"][0]["text"], "quick");
    let events = read_events(&mut slow).await;
    assert!(events[events.len() - 2].contains("slow_reader"), "{:?}", events.last());
    assert_eq!(events[events.len() - 1], "[DONE]");
}

#[tokio::test]
async fn a_complete_response_ignores_the_backlog_limit() {
    let mut config = crate::bed::config();
    config.limits.backlog = 2;
    let mock = MockConfig { context: 100_000, pages: 1 << 16, ..MockConfig::default() };
    let mut model = crate::bed::model();
    model.context = 100_000;
    let bed = Bed::with(config, mock, model).await;
    let mut ask = endless();
    ask["max_tokens"] = 20_000.into();
    ask["stream"] = false.into();
    let found = bed.ok("/v1/completions", &ask).await;
    assert_eq!(found["usage"]["completion_tokens"], 20_000);
}

#[tokio::test]
async fn a_waiting_stream_is_kept_alive() {
    let mut config = crate::bed::config();
    config.limits.ping_ms = 50;
    let mock =
        MockConfig { seats: 1, step_time: Duration::from_millis(2), ..MockConfig::default() };
    let bed = Bed::with(config, mock, crate::bed::model()).await;
    let mut first = bed.connect().await;
    let body = endless().to_string();
    first.request("POST", "/v1/completions", &[], body.as_bytes()).await.unwrap();
    let mut second = bed.connect().await;
    let ask = json!({"prompt": "waits", "stream": true}).to_string();
    let head = second.request("POST", "/v1/completions", &[], ask.as_bytes()).await.unwrap();
    assert_eq!(head.status, 200);
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(": ping") {
        assert!(second.read(&mut |bytes| seen.extend_from_slice(bytes)).await.unwrap());
    }
    drop(first);
    let events = read_events(&mut second).await;
    assert_eq!(events.last().unwrap(), "[DONE]");
}
