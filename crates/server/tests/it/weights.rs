//! Weights that are replaced through the operator's routes, and the version that every answer carries.

use crate::bed::{Bed, config, model, soon};
use mock::MockConfig;
use serde_json::{Value, json};
use server::ServerConfig;
use std::path::Path;
use std::time::Duration;

async fn admin(mock: MockConfig, root: &Path) -> Bed {
    let weight_roots = vec![root.canonicalize().unwrap()];
    let config = ServerConfig { admin: true, weight_roots, ..config() };
    Bed::with(config, mock, model()).await
}

fn ask(prompt: &str) -> Value {
    json!({"prompt": prompt, "max_tokens": 60})
}

/// The version that an answer carries.
async fn version(bed: &Bed, prompt: &str) -> (u16, String) {
    let mut wire = bed.connect().await;
    let json = [("content-type", "application/json")];
    let body = ask(prompt).to_string();
    let head = wire.request("POST", "/v1/completions", &json, body.as_bytes()).await.unwrap();
    wire.body().await.unwrap();
    (head.status, head.header("x-weight-version").unwrap().to_owned())
}

#[tokio::test]
async fn every_answer_says_which_weights_made_it() {
    let folder = tempfile::tempdir().unwrap();
    let bed = admin(MockConfig::default(), folder.path()).await;
    assert_eq!(version(&bed, "before").await, (200, "0".into()));
    for (route, expected) in [("/update_weights", 1), ("/update_weights_from_disk", 2)] {
        let body = json!({"model_path": folder.path()});
        let answer = bed.ok(route, &body).await;
        assert_eq!(
            (&answer["success"], &answer["weight_version"]),
            (&json!(true), &json!(expected))
        );
        assert_eq!(version(&bed, "after").await, (200, expected.to_string()));
    }
    let (_, info) = bed.get("/get_model_info").await;
    assert_eq!(serde_json::from_slice::<Value>(&info).unwrap()["weight_version"], 2);
}

#[tokio::test]
async fn only_allowed_folders_are_read() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::os::unix::fs::symlink(other.path(), folder.path().join("link")).unwrap();
    let bed = admin(MockConfig::default(), folder.path()).await;
    let above = folder.path().join("..");
    for path in [other.path(), &folder.path().join("link"), Path::new("/nowhere"), &above] {
        let error = bed.error("/update_weights", &json!({"model_path": path}), 400).await;
        assert!(error["message"].as_str().unwrap().contains("--weight-root"), "{error}");
    }
    bed.error("/update_weights", &json!({}), 400).await;
    bed.error("/update_weights", &json!({"model_path": folder.path(), "mode": "soon"}), 400).await;
    // Files that do not fit: the old weights stay.
    std::fs::write(folder.path().join("wrong"), "").unwrap();
    let error = bed.error("/update_weights", &json!({"model_path": folder.path()}), 400).await;
    assert_eq!(error["message"], "the tensors do not fit");
    assert_eq!(version(&bed, "still").await, (200, "0".into()));
}

/// A request that runs for about a second, and an update while it does; then another request.
async fn meanwhile(mode: &str) -> [(u16, String); 2] {
    let folder = tempfile::tempdir().unwrap();
    let slow = MockConfig { step_time: Duration::from_millis(15), ..MockConfig::default() };
    let bed = admin(slow, folder.path()).await;
    let text = "x".repeat(60);
    let running = version(&bed, &text);
    let update = async {
        bed.until("it runs", || bed.link.snapshot().running > 0).await;
        let body = json!({"model_path": folder.path(), "mode": mode});
        let update = bed.ok("/update_weights", &body);
        // Comes while the update waits.
        let later = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            version(&bed, "later").await
        };
        tokio::join!(update, later).1
    };
    let (first, second) = soon("all are answered", async { tokio::join!(running, update) }).await;
    [first, second]
}

#[tokio::test]
async fn requests_finish_first_and_new_ones_wait() {
    // The first was answered by the old weights alone, the second by the new ones alone.
    assert_eq!(meanwhile("wait").await, [(200, "0".into()), (200, "1".into())]);
}

#[tokio::test]
async fn requests_go_on_with_the_new_weights() {
    assert_eq!(meanwhile("keep").await, [(200, "1".into()), (200, "1".into())]);
}

#[tokio::test]
async fn requests_are_dropped() {
    let [first, second] = meanwhile("abort").await;
    assert_eq!((first.0, second), (503, (200, "1".into())));
}

/// A client that leaves while its request waits for an update leaves nothing behind.
#[tokio::test]
async fn waiting_requests_can_be_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let slow = MockConfig { step_time: Duration::from_millis(15), ..MockConfig::default() };
    let bed = admin(slow, folder.path()).await;
    let text = "x".repeat(60);
    let running = version(&bed, &text);
    let update = async {
        bed.until("it runs", || bed.link.snapshot().running > 0).await;
        let body = json!({"model_path": folder.path()});
        let update = bed.ok("/update_weights", &body);
        let left = tokio::time::timeout(Duration::from_millis(200), version(&bed, "left"));
        let (_, left) = tokio::join!(update, left);
        assert!(left.is_err(), "it waited");
    };
    soon("both are done", async { tokio::join!(running, update) }).await;
    bed.until("nothing is left", || bed.link.inflight() == 0).await;
    assert_eq!(version(&bed, "after").await, (200, "1".into()));
}

#[tokio::test]
async fn weights_that_were_forgotten_are_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let bed = admin(MockConfig::default(), folder.path()).await;
    bed.try_post("/sleep?level=2", b"").await.unwrap();
    bed.try_post("/wake_up?reload=false", b"").await.unwrap();
    bed.error("/v1/completions", &ask("no weights"), 503).await;
    bed.ok("/update_weights", &json!({"model_path": folder.path()})).await;
    assert_eq!(version(&bed, "new").await, (200, "1".into()));
}
