//! Sleeping and waking through the operator's routes, with and without requests that run.

use crate::bed::{Bed, config, model, restarting, soon};
use mock::MockConfig;
use serde_json::{Value, json};
use server::ServerConfig;
use std::time::Duration;

async fn admin(mock: MockConfig) -> Bed {
    let config = ServerConfig { admin: true, ..config() };
    Bed::with(config, mock, model()).await
}

/// A POST without a body.
async fn post(bed: &Bed, path: &str) -> (u16, Value) {
    let (head, body) = bed.try_post(path, b"").await.unwrap();
    (head.status, serde_json::from_slice(&body).unwrap())
}

async fn is_sleeping(bed: &Bed) -> bool {
    let (head, body) = bed.get("/is_sleeping").await;
    assert_eq!(head.status, 200);
    serde_json::from_slice::<Value>(&body).unwrap()["is_sleeping"].as_bool().unwrap()
}

fn ask(prompt: &str) -> Value {
    json!({"prompt": prompt, "max_tokens": 64})
}

#[tokio::test]
async fn the_routes_exist_only_for_operators() {
    let bed = Bed::new(MockConfig::default()).await;
    for path in ["/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"] {
        let (status, _) = post(&bed, path).await;
        assert!(status == 404 || status == 405, "{path}: {status}");
    }
    assert_eq!(bed.get("/is_sleeping").await.0.status, 404);
}

#[tokio::test]
async fn requests_are_refused_until_all_of_it_is_back() {
    let bed = admin(MockConfig::default()).await;
    bed.ok("/v1/completions", &ask("before")).await;
    assert!(!is_sleeping(&bed).await);
    assert_eq!(post(&bed, "/sleep?level=1").await.0, 200);
    assert!(is_sleeping(&bed).await);
    let error = bed.error("/v1/completions", &ask("asleep"), 503).await;
    assert_eq!(error["message"], "the model is asleep: POST /wake_up first");
    assert_eq!(bed.get("/health").await.0.status, 503);
    assert_eq!(bed.get("/health/live").await.0.status, 200);
    assert_eq!(post(&bed, "/wake_up?tags=kv_cache").await.0, 200);
    assert!(is_sleeping(&bed).await, "the weights are not back");
    bed.error("/v1/completions", &ask("half asleep"), 503).await;
    assert_eq!(post(&bed, "/wake_up?tags=weights").await.0, 200);
    assert!(!is_sleeping(&bed).await);
    bed.ok("/v1/completions", &ask("after")).await;
    // Awake already.
    assert_eq!(post(&bed, "/wake_up").await.0, 200);
    let (_, metrics) = bed.get("/metrics").await;
    assert!(String::from_utf8(metrics).unwrap().contains("dacapo_asleep 0"));
}

#[tokio::test]
async fn weights_that_were_forgotten_are_read_again_or_waited_for() {
    let bed = admin(MockConfig::default()).await;
    post(&bed, "/sleep?level=2").await;
    assert_eq!(post(&bed, "/wake_up").await.0, 200);
    bed.ok("/v1/completions", &ask("read again")).await;
    post(&bed, "/sleep?level=2").await;
    assert_eq!(post(&bed, "/wake_up?reload=false").await.0, 200);
    let error = bed.error("/v1/completions", &ask("no weights"), 503).await;
    assert_eq!(error["message"], "the model has no weights: update them first");
    assert_eq!(post(&bed, "/wake_up").await.0, 200);
    bed.ok("/v1/completions", &ask("read again")).await;
}

#[tokio::test]
async fn sglangs_names() {
    let bed = admin(MockConfig::default()).await;
    bed.ok("/release_memory_occupation", &json!({"tags": ["kv_cache"]})).await;
    assert!(is_sleeping(&bed).await);
    bed.ok("/resume_memory_occupation", &json!({"tags": ["kv_cache"]})).await;
    assert!(!is_sleeping(&bed).await);
    assert_eq!(post(&bed, "/release_memory_occupation").await.0, 200);
    assert_eq!(post(&bed, "/resume_memory_occupation").await.0, 200);
    bed.error("/release_memory_occupation", &json!({"tags": ["all"]}), 400).await;
    bed.error("/release_memory_occupation", &json!({"tags": 1}), 400).await;
    assert!(!is_sleeping(&bed).await);
}

#[tokio::test]
async fn wrong_parameters_change_nothing() {
    let bed = admin(MockConfig::default()).await;
    for (path, param) in [
        ("/sleep?level=3", "level"),
        ("/sleep?level=", "level"),
        ("/sleep?mode=later", "mode"),
        ("/sleep?deep=1", "deep"),
        ("/wake_up?tags=all", "tags"),
        ("/wake_up?reload=1", "reload"),
    ] {
        let (status, value) = post(&bed, path).await;
        assert_eq!((status, &value["error"]["param"]), (400, &json!(param)), "{path}: {value}");
    }
    assert!(!is_sleeping(&bed).await);
    // A page of another origin could send such a request without asking first.
    let mut wire = bed.connect().await;
    let origin = [("origin", "http://example.com")];
    let head = wire.request("POST", "/sleep", &origin, b"").await.unwrap();
    assert_eq!(head.status, 403);
    assert!(!is_sleeping(&bed).await);
}

/// A request that runs for about a second.
fn slow() -> MockConfig {
    MockConfig { step_time: Duration::from_millis(15), ..MockConfig::default() }
}

async fn with_one_running(bed: &Bed, mode: &str) -> ((u16, Value), (u16, Value)) {
    let asked = json!({"prompt": "x".repeat(60), "max_tokens": 60});
    let running = bed.post("/v1/completions", &asked);
    let sleeping = async {
        bed.until("it runs", || bed.link.snapshot().running > 0).await;
        post(bed, &format!("/sleep?mode={mode}")).await
    };
    soon("both are answered", async { tokio::join!(running, sleeping) }).await
}

#[tokio::test]
async fn running_requests_finish_first() {
    let bed = admin(slow()).await;
    let (answer, slept) = with_one_running(&bed, "wait").await;
    assert_eq!((answer.0, slept.0), (200, 200), "{answer:?}");
    assert!(is_sleeping(&bed).await);
    bed.until("nothing runs", || bed.link.inflight() == 0).await;
}

#[tokio::test]
async fn running_requests_are_dropped_if_asked() {
    let bed = admin(slow()).await;
    let (answer, slept) = with_one_running(&bed, "abort").await;
    assert_eq!((answer.0, slept.0), (503, 200), "{answer:?}");
    assert!(answer.1["error"]["message"].as_str().unwrap().contains("dropped"), "{answer:?}");
    assert!(is_sleeping(&bed).await);
}

#[tokio::test]
async fn running_requests_go_on_after_a_pause() {
    let bed = admin(slow()).await;
    let asked = json!({"prompt": "x".repeat(60), "max_tokens": 60});
    let running = bed.post("/v1/completions", &asked);
    let nap = async {
        bed.until("it runs", || bed.link.snapshot().running > 0).await;
        assert_eq!(post(&bed, "/sleep?mode=keep").await.0, 200);
        assert!(is_sleeping(&bed).await);
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert_eq!(bed.link.inflight(), 1, "it is neither lost nor done");
        assert_eq!(post(&bed, "/wake_up").await.0, 200);
    };
    let (answer, ()) = soon("both are done", async { tokio::join!(running, nap) }).await;
    assert_eq!(answer.0, 200, "{answer:?}");
    assert_eq!(answer.1["usage"]["completion_tokens"], 60);
}

#[tokio::test]
async fn waking_without_memory_is_one_error() {
    let mock = MockConfig { cannot_wake: true, ..MockConfig::default() };
    let bed = admin(mock).await;
    post(&bed, "/sleep").await;
    let (status, value) = post(&bed, "/wake_up").await;
    assert_eq!((status, &value["error"]["message"]), (500, &json!("no memory")));
    assert!(is_sleeping(&bed).await);
    bed.error("/v1/completions", &ask("still asleep"), 503).await;
}

#[tokio::test]
async fn an_idle_engine_sleeps_until_the_next_request() {
    let doze = Some(Duration::from_millis(300));
    let config = ServerConfig { admin: true, sleep_after: doze, ..config() };
    let bed = Bed::with(config.clone(), MockConfig::default(), model()).await;
    for _ in 0..3 {
        bed.until("it falls asleep", || bed.link.is_asleep()).await;
        assert_eq!(bed.get("/health").await.0.status, 200, "a request would be answered");
        bed.ok("/v1/completions", &ask("wake up")).await;
        assert!(!bed.link.is_asleep());
    }
    // One that cannot wake up fails the request, and says so.
    let mock = MockConfig { cannot_wake: true, ..MockConfig::default() };
    let bed = Bed::over(config, restarting(mock), model()).await;
    bed.until("it falls asleep", || bed.link.is_asleep()).await;
    let error = bed.error("/v1/completions", &ask("wake up"), 503).await;
    assert!(error["message"].as_str().unwrap().contains("does not wake up: no memory"), "{error}");
    bed.until("nothing runs", || bed.link.inflight() == 0).await;
}

#[tokio::test]
async fn a_server_that_sleeps_can_be_stopped() {
    let bed = admin(MockConfig::default()).await;
    post(&bed, "/sleep").await;
    soon("it ends", bed.stop()).await;
}
