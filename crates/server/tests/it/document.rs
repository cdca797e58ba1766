//! The OpenAPI document matches the server.

use crate::bed::{Bed, config, model};
use mock::MockConfig;
use serde_json::{Value, json};
use server::link::Run;

#[tokio::test]
async fn the_document_is_complete() {
    let bed = Bed::new(MockConfig::default()).await;
    let (head, body) = bed.get("/openapi.json").await;
    assert_eq!(head.status, 200);
    let text = String::from_utf8(body).unwrap();
    let document: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document, server::document(&model(), &config().limits));
    assert!(!text.contains("of the model\""), "a placeholder was not replaced");
    for name in text.split("#/components/schemas/").skip(1) {
        let name = name.split(|c: char| !c.is_alphanumeric()).next().unwrap();
        assert!(document["components"]["schemas"][name].is_object(), "{name}");
    }
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            assert!(operation["responses"]["200"].is_object(), "{method} {path}");
        }
    }
}

/// Every bound in the document is enforced, and the error names the field.
#[tokio::test]
async fn every_bound_is_enforced() {
    let bed = Bed::new(MockConfig { embedding: 4, ..MockConfig::default() }).await;
    let mut model = model();
    model.embedding = Some(4);
    let document = server::document(&model, &config().limits);
    let cases = [
        (
            "ChatRequest",
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}], "logprobs": true}),
        ),
        ("CompletionRequest", "/v1/completions", json!({"prompt": "x"})),
        ("EmbeddingRequest", "/v1/embeddings", json!({"input": "x"})),
    ];
    let mut checked = 0;
    for (name, path, base) in cases {
        let fields = document["components"]["schemas"][name]["properties"].as_object().unwrap();
        for (field, schema) in fields {
            let inner = schema["anyOf"].get(0).unwrap_or(schema);
            // Bounds of the integer type itself are checked by the type.
            if inner["minimum"].as_f64().is_some_and(|least| least < -1e15) {
                continue;
            }
            let mut wrong = Vec::new();
            if let Some(least) = inner["minimum"].as_f64() {
                wrong.push(json!(least - 1.0));
                wrong.push(json!((least as i64).saturating_sub(1)));
            }
            if let Some(least) = inner["exclusiveMinimum"].as_f64() {
                wrong.push(json!(least));
            }
            if let Some(most) = inner["maximum"].as_f64() {
                wrong.push(json!(most + 1.0));
            }
            if inner["enum"].is_array() {
                wrong.push(json!("none of these"));
            }
            if inner["minItems"] == 1 {
                wrong.push(json!([]));
            }
            for value in wrong {
                let mut ask = base.clone();
                ask[field.as_str()] = value.clone();
                let error = bed.error(path, &ask, 400).await;
                assert_eq!(error["param"], field.as_str(), "{value}: {error}");
                checked += 1;
            }
        }
    }
    assert!(checked > 40, "{checked}");
}

/// Every metric that the dashboard draws exists.
#[tokio::test]
async fn the_dashboard_uses_existing_metrics() {
    let bed = Bed::new(MockConfig::default()).await;
    // One row replays; more rows than the largest bucket do not, and the reason is counted.
    bed.ok("/v1/completions", &json!({"prompt": "hello"})).await;
    bed.ok("/v1/completions", &json!({"prompt": vec!["hello"; 200]})).await;
    bed.until("both are counted", || {
        let steps = &bed.link.snapshot().steps;
        let replayed = |replayed| steps.iter().any(|s| (s.run == Run::Replayed) == replayed);
        replayed(true) && replayed(false)
    })
    .await;
    let (_, metrics) = bed.get("/metrics").await;
    let metrics = String::from_utf8(metrics).unwrap();
    let dashboard = include_str!("../../../../docs/grafana-dashboard.json");
    let mut names = std::collections::BTreeSet::new();
    for rest in dashboard.split("dacapo_").skip(1) {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap();
        names.insert(&rest[..end]);
    }
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        let family = name.trim_end_matches("_bucket").trim_end_matches("_total");
        let line = format!("# TYPE dacapo_{family} ");
        assert!(metrics.contains(&line), "{name} is not in\n{metrics}");
    }
}
