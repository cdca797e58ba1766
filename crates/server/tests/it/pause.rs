//! Generation that is paused and goes on.

use crate::bed::{Bed, config, model, soon};
use mock::MockConfig;
use serde_json::{Value, json};
use server::ServerConfig;
use std::path::Path;
use std::time::Duration;

const COMPLETIONS: &str = "/v1/completions";

/// A step takes 10 ms.
async fn bed(root: &Path) -> Bed {
    let weight_roots = vec![root.canonicalize().unwrap()];
    let config = ServerConfig { admin: true, weight_roots, ..config() };
    let slow = MockConfig { step_time: Duration::from_millis(10), ..MockConfig::default() };
    Bed::with(config, slow, model()).await
}

async fn post(bed: &Bed, path: &str, body: &str) -> (u16, Value) {
    let (head, body) = bed.try_post(path, body.as_bytes()).await.unwrap();
    (head.status, serde_json::from_slice(&body).unwrap())
}

async fn is_paused(bed: &Bed) -> bool {
    let (_, body) = bed.get("/is_paused").await;
    serde_json::from_slice::<Value>(&body).unwrap()["is_paused"].as_bool().unwrap()
}

/// About half a second.
fn long() -> Value {
    json!({"prompt": "x".repeat(50), "max_tokens": 50})
}

fn last_step(bed: &Bed) -> u64 {
    bed.link.snapshot().steps.last().map_or(0, |step| step.step)
}

/// Pauses while a request runs, waits, and does something; returns how the request ended.
async fn meanwhile<F: Future<Output = ()>>(bed: &Bed, path: &str, body: &str, then: F) -> u16 {
    let request = long();
    let running = bed.post(COMPLETIONS, &request);
    let paused = async {
        bed.until("it runs", || bed.link.snapshot().running > 0).await;
        let (status, answer) = post(bed, path, body).await;
        assert_eq!((status, &answer["is_paused"]), (200, &json!(true)), "{answer}");
        then.await;
    };
    soon("both are done", async { tokio::join!(running, paused).0.0 }).await
}

#[tokio::test]
async fn requests_stand_still_and_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let bed = bed(folder.path()).await;
    let (sglang, retract) = (r#"{"mode": "in_place"}"#, r#"{"mode": "retract"}"#);
    for (pause, body, resume) in [
        ("/pause", "", "/resume"),
        ("/pause?mode=keep", "", "/resume"),
        ("/pause_generation", sglang, "/continue_generation"),
        ("/pause_generation", retract, "/continue_generation"),
    ] {
        let status = meanwhile(&bed, pause, body, async {
            let before = last_step(&bed);
            assert!(is_paused(&bed).await);
            assert_eq!(bed.get("/health").await.0.status, 200);
            let (asked, later) = (json!({"prompt": "later"}), Duration::from_millis(150));
            let waits = tokio::time::timeout(later, bed.post(COMPLETIONS, &asked)).await;
            assert!(waits.is_err(), "a request is not answered meanwhile");
            assert_eq!(last_step(&bed), before, "no step runs");
            assert_eq!(post(&bed, resume, "").await.0, 200);
            assert!(!is_paused(&bed).await);
        });
        assert_eq!(status.await, 200, "{pause}");
        bed.until("nothing is left", || bed.link.inflight() == 0).await;
    }
}

#[tokio::test]
async fn requests_finish_first_or_are_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let bed = bed(folder.path()).await;
    for (path, body, expected) in [
        ("/pause?mode=wait", "", 200),
        ("/pause?mode=abort", "", 503),
        ("/pause_generation", "", 503),
    ] {
        let status = meanwhile(&bed, path, body, async {
            bed.until("none runs", || bed.link.inflight() == 0).await;
            let asked = json!({"prompt": "later"});
            let later = bed.ok(COMPLETIONS, &asked);
            let resume = async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                assert_eq!(post(&bed, "/resume", "").await.0, 200);
            };
            tokio::join!(later, resume);
        });
        assert_eq!(status.await, expected, "{path}");
    }
    for (path, body) in [("/pause?mode=soon", ""), ("/pause_generation", r#"{"mode": "keep"}"#)] {
        assert_eq!(post(&bed, path, body).await.0, 400, "{path}");
    }
    // Nothing is paused.
    assert_eq!(post(&bed, "/resume", "").await.0, 200);
}

#[tokio::test]
async fn the_model_changes_while_it_stands_still() {
    let folder = tempfile::tempdir().unwrap();
    let bed = bed(folder.path()).await;
    let update = |mode: &str| json!({"model_path": folder.path(), "mode": mode});
    let status = meanwhile(&bed, "/pause", "", async {
        let error = bed.error("/update_weights", &update("wait"), 400).await;
        assert!(error["message"].as_str().unwrap().contains("generation is paused"), "{error}");
        assert_eq!(post(&bed, "/sleep", "").await.0, 400);
        assert_eq!(bed.get("/health").await.0.status, 200);
        bed.ok("/update_weights", &update("keep")).await;
        assert!(is_paused(&bed).await);
        assert_eq!(post(&bed, "/resume", "").await.0, 200);
    });
    assert_eq!(status.await, 200);
    let status = meanwhile(&bed, "/pause", "", async {
        bed.ok("/update_weights", &update("abort")).await;
        assert!(is_paused(&bed).await);
        assert_eq!(post(&bed, "/resume", "").await.0, 200);
    });
    assert_eq!(status.await, 503);
    bed.ok(COMPLETIONS, &json!({"prompt": "after"})).await;
}

#[tokio::test]
async fn the_routes_exist_only_for_operators() {
    let bed = Bed::new(MockConfig::default()).await;
    for path in ["/pause", "/resume", "/pause_generation", "/continue_generation"] {
        let (status, _) = post(&bed, path, "").await;
        assert!(status == 404 || status == 405, "{path}: {status}");
    }
}

/// A server that is told to stop while it is paused ends its requests.
#[tokio::test]
async fn a_paused_server_stops() {
    let folder = tempfile::tempdir().unwrap();
    let weight_roots = vec![folder.path().canonicalize().unwrap()];
    let mut config = ServerConfig { admin: true, weight_roots, ..config() };
    config.limits.drain_ms = 50;
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    assert_eq!(post(&bed, "/pause", "").await.0, 200);
    let asked = long();
    let waits =
        tokio::time::timeout(Duration::from_millis(50), bed.post(COMPLETIONS, &asked)).await;
    assert!(waits.is_err());
    soon("it ends", bed.stop()).await;
}
