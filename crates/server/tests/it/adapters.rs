//! Adapters as models: their names, loading and unloading.

use crate::bed::{Bed, config, model};
use mock::MockConfig;
use serde_json::{Value, json};
use server::ServerConfig;

async fn bed(folder: &std::path::Path) -> Bed {
    let weight_roots = vec![folder.canonicalize().unwrap()];
    let config = ServerConfig { admin: true, weight_roots, ..config() };
    let mut model = model();
    model.embedding = Some(4);
    assert!(model.adapters.insert("given", 5));
    assert!(!model.adapters.insert("given", 6), "the name is taken");
    Bed::with(config, MockConfig { embedding: 4, ..MockConfig::default() }, model).await
}

async fn names(bed: &Bed) -> Vec<(String, Option<String>)> {
    let (_, list) = bed.get("/v1/models").await;
    let list: Value = serde_json::from_slice(&list).unwrap();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let data = list["data"].as_array().unwrap().iter();
    data.map(|card| (text(&card["id"]).unwrap(), text(&card["parent"]))).collect()
}

#[tokio::test]
async fn adapters_come_and_go() {
    let folder = tempfile::tempdir().unwrap();
    let bed = bed(folder.path()).await;
    let base = Some("mock".to_owned());
    assert_eq!(names(&bed).await[2..], [("given".into(), base.clone())]);
    let ask = |model: &str| json!({"model": model, "prompt": "hello"});
    let chat =
        |model: &str| json!({"model": model, "messages": [{"role": "user", "content": "x"}]});
    bed.ok("/v1/completions", &ask("given")).await;
    bed.ok("/v1/chat/completions", &chat("given")).await;
    bed.error("/v1/completions", &ask("sql"), 404).await;
    let load = json!({"lora_name": "sql", "lora_path": folder.path()});
    bed.ok("/v1/load_lora_adapter", &load).await;
    bed.ok("/v1/completions", &ask("sql")).await;
    assert_eq!(names(&bed).await[2..], [("given".into(), base.clone()), ("sql".into(), base)]);
    for taken in ["sql", "mock", "other-name", ""] {
        let load = json!({"lora_name": taken, "lora_path": folder.path()});
        let error = bed.error("/v1/load_lora_adapter", &load, 400).await;
        assert_eq!(error["param"], "lora_name", "{taken}");
    }
    let (head, _) = bed.get("/v1/models/sql").await;
    assert_eq!(head.status, 200);
    let metrics = || async { String::from_utf8(bed.get("/metrics").await.1).unwrap() };
    let found = metrics().await;
    for line in [
        "dacapo_adapter_requests_total{adapter=\"given\"} 2",
        "dacapo_adapter_requests_total{adapter=\"sql\"} 1",
        "dacapo_adapter_prompt_tokens_total{adapter=\"sql\"} 5",
        "dacapo_adapter_generated_tokens_total{adapter=\"sql\"} 5",
    ] {
        assert!(found.contains(line), "{line} is not in\n{found}");
    }
    bed.ok("/v1/unload_lora_adapter", &json!({"lora_name": "sql"})).await;
    assert!(!metrics().await.contains("sql"), "an adapter that is gone has no counters");
    bed.error("/v1/completions", &ask("sql"), 404).await;
    bed.error("/v1/unload_lora_adapter", &json!({"lora_name": "sql"}), 404).await;
    // Vectors are made by the model itself.
    bed.error("/v1/embeddings", &json!({"model": "given", "input": "x"}), 404).await;
}

#[tokio::test]
async fn adapters_that_do_not_fit_are_not_listed() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let bed = bed(folder.path()).await;
    let load = json!({"lora_name": "sql", "lora_path": other.path()});
    let error = bed.error("/v1/load_lora_adapter", &load, 400).await;
    assert_eq!(error["param"], "lora_path");
    std::fs::write(folder.path().join("wrong"), "").unwrap();
    let load = json!({"lora_name": "sql", "lora_path": folder.path()});
    let error = bed.error("/v1/load_lora_adapter", &load, 400).await;
    assert_eq!(error["message"], "the adapter does not fit");
    assert_eq!(names(&bed).await.len(), 3);
}

#[tokio::test]
async fn the_routes_exist_only_for_operators() {
    let bed = Bed::new(MockConfig::default()).await;
    let body = json!({"lora_name": "a", "lora_path": "/", "model_path": "/"});
    for path in ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights"] {
        let (status, _) = bed.post(path, &body).await;
        assert!(status == 404 || status == 405, "{path}: {status}");
    }
}
