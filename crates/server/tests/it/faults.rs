//! The engine fails, stalls or does not start.

use crate::bed::{Bed, config, model, read_events, soon};
use mock::{Mock, MockConfig};
use serde_json::{Value, json};
use server::link::{Health, once};
use std::time::Duration;

fn ask(stream: bool) -> Value {
    json!({"prompt": "hello, hello, hello", "max_tokens": 400, "ignore_eos": true,
           "stream": stream})
}

fn fragile() -> MockConfig {
    MockConfig {
        panic_every: Some(20),
        step_time: Duration::from_millis(1),
        ..MockConfig::default()
    }
}

#[tokio::test]
async fn a_panic_ends_every_stream_with_an_error_and_the_engine_restarts() {
    let bed = Bed::new(fragile()).await;
    for round in 0..5 {
        let mut wires = Vec::new();
        for _ in 0..4 {
            let mut wire = bed.connect().await;
            let body = ask(true).to_string();
            let head = wire.request("POST", "/v1/completions", &[], body.as_bytes()).await.unwrap();
            if head.status == 200 {
                wires.push(wire);
            } else {
                assert_eq!(head.status, 503);
            }
        }
        for mut wire in wires {
            let events = read_events(&mut wire).await;
            assert_eq!(events[events.len() - 1], "[DONE]");
            let last: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
            let message = last["error"]["message"].as_str().unwrap();
            assert!(message.contains("the engine failed: a planted panic"), "{message}");
        }
        bed.until("ready again", || bed.link.health().as_str() == "ready").await;
        bed.until(&format!("nothing runs in round {round}"), || bed.link.inflight() == 0).await;
        assert_eq!(bed.get("/health/ready").await.0.status, 200);
    }
    let short = json!({"prompt": "ab", "max_tokens": 2});
    assert_eq!(bed.ok("/v1/completions", &short).await["choices"][0]["text"], "ab");
    let (_, metrics) = bed.get("/metrics").await;
    let metrics = String::from_utf8(metrics).unwrap();
    assert!(!metrics.contains("dacapo_engine_restarts_total 0"), "{metrics}");
}

#[tokio::test]
async fn the_server_reports_an_engine_that_cannot_restart() {
    let bed = Bed::over(config(), once(Mock::new(fragile())), model()).await;
    let (status, body) = bed.post("/v1/completions", &ask(false)).await;
    assert_eq!(status, 503, "{body}");
    bed.until("it is not ready", || bed.link.health().as_str() != "ready").await;
    assert_eq!(bed.get("/health/live").await.0.status, 200);
    let (head, body) = bed.get("/health/ready").await;
    assert_eq!(head.status, 503);
    assert!(head.header("retry-after").is_some());
    assert!(String::from_utf8_lossy(&body).contains("the engine failed"));
    bed.error("/v1/completions", &ask(false), 503).await;
    assert_eq!(bed.get("/").await.0.status, 200);
    assert_eq!(bed.get("/metrics").await.0.status, 200);
}

#[tokio::test]
async fn a_failed_device_ends_the_engine() {
    let gone = MockConfig { gone_at: Some(5), ..MockConfig::default() };
    let bed = Bed::over(config(), once(Mock::new(gone)), model()).await;
    let long = json!({"prompt": "0123456789", "max_tokens": 10});
    let (status, body) = bed.post("/v1/completions", &long).await;
    assert_eq!(status, 503, "{body}");
    assert!(body["error"]["message"].as_str().unwrap().contains("the device failed"), "{body}");
    bed.until("it is not ready", || bed.link.health() == Health::Dead).await;
    assert_eq!(bed.get("/health/ready").await.0.status, 503);
    assert_eq!(bed.get("/health/live").await.0.status, 200);
    bed.error("/v1/completions", &long, 503).await;
    bed.until("nothing is left", || bed.link.inflight() == 0).await;
}

#[tokio::test]
async fn a_stalled_step_is_reported() {
    let mut config = config();
    config.limits.stall_ms = 100;
    let stall = Some((5, Duration::from_secs(3)));
    let bed = Bed::with(config, MockConfig { stall, ..MockConfig::default() }, model()).await;
    let long = json!({"prompt": "0123456789", "max_tokens": 10});
    let answer = bed.post("/v1/completions", &long);
    let watch = soon("the stall is reported", async {
        while bed.get("/health/ready").await.0.status != 503 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let ((status, _), ()) = tokio::join!(answer, watch);
    assert_eq!(status, 200);
    bed.until("it is ready again", || bed.link.health().as_str() == "ready").await;
    assert_eq!(bed.get("/health/ready").await.0.status, 200);
}

#[tokio::test]
async fn a_request_that_failed_on_the_device_gets_an_error() {
    let mock = MockConfig { fail_every: Some(1), ..MockConfig::default() };
    let bed = Bed::new(mock).await;
    let error = bed.error("/v1/completions", &json!({"prompt": "hello"}), 500).await;
    assert!(error["message"].as_str().unwrap().contains("lost its state"));
    let events = bed.stream("/v1/completions", &json!({"prompt": "hello", "stream": true})).await;
    assert!(events[events.len() - 2].contains("lost its state"));
    bed.until("nothing is left", || bed.link.inflight() == 0).await;
}

#[tokio::test]
async fn an_engine_that_does_not_start() {
    let none = Box::new(|| Err("no such device".to_string()));
    let bed = Bed::over(config(), none, model()).await;
    bed.error("/v1/completions", &ask(false), 503).await;
    bed.error("/v1/embeddings", &json!({"input": "x"}), 503).await;
    assert_eq!(bed.get("/health/ready").await.0.status, 503);
    assert_eq!(bed.ok("/tokenize", &json!({"prompt": "x"})).await["count"], 1);
}
