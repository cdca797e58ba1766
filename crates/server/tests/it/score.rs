//! Rerank, score and classify, and models that make vectors only.

use crate::bed::{Bed, config, model};
use mock::MockConfig;
use serde_json::{Value, json};
use server::{Model, Scorer};

fn mock(width: usize) -> MockConfig {
    // The mock keeps a token for an answer, which these models do not have.
    MockConfig { embedding: width, context: 8193, ..MockConfig::default() }
}

/// A server whose model makes vectors of `width` numbers.
async fn bed(width: usize, scorer: Option<Scorer>, generates: bool) -> Bed {
    let model = Model { embedding: Some(width as u32), scorer, generates, ..model() };
    Bed::with(config(), mock(width), model).await
}

fn indices(answer: &Value) -> Vec<u64> {
    let results = answer["results"].as_array().unwrap();
    results.iter().map(|result| result["index"].as_u64().unwrap()).collect()
}

#[tokio::test]
async fn documents_are_ordered_by_their_scores() {
    let bed = bed(64, Some(Scorer::Cosine), true).await;
    let request = json!({"query": "abc", "documents": ["xyz", {"text": "abc"}, "abz"]});
    for path in ["/v1/rerank", "/v2/rerank", "/rerank"] {
        let answer = bed.ok(path, &request).await;
        assert_eq!(indices(&answer), [1, 2, 0], "{path}: {answer}");
        let best = answer["results"][0]["relevance_score"].as_f64().unwrap();
        assert!((best - 1.0).abs() < 1e-6, "{best}");
        assert!(answer["results"][0].get("document").is_none());
        assert_eq!(answer["usage"]["total_tokens"], 4 * 3);
    }
    let request = json!({"query": "abc", "documents": ["xyz", {"text": "abc"}, "abz"], "top_n": 1,
                         "return_documents": true});
    let answer = bed.ok("/v1/rerank", &request).await;
    assert_eq!(indices(&answer), [1]);
    assert_eq!(answer["results"][0]["document"], json!({"text": "abc"}));
    for (wrong, param) in [
        (json!({"query": "", "documents": ["x"]}), "query"),
        (json!({"query": "x", "documents": []}), "documents"),
        (json!({"query": "x", "documents": ["x"], "top_n": 0}), "top_n"),
        (json!({"query": "x", "documents": vec!["x"; 2049]}), "documents"),
    ] {
        let error = bed.error("/v1/rerank", &wrong, 400).await;
        assert_eq!(error["param"], param, "{error}");
    }
}

#[tokio::test]
async fn pairs_are_scored_one_to_many_and_one_to_one() {
    let bed = bed(64, Some(Scorer::Cosine), true).await;
    let one = bed.ok("/v1/score", &json!({"text_1": "ab", "text_2": ["ab", "cd"]})).await;
    let scores: Vec<f64> =
        one["data"].as_array().unwrap().iter().map(|s| s["score"].as_f64().unwrap()).collect();
    assert!((scores[0] - 1.0).abs() < 1e-6 && scores[1].abs() < 1e-6, "{scores:?}");
    let two = json!({"text_1": ["ab", "cd"], "text_2": ["cd", "cd"]});
    let two = bed.ok("/v1/score", &two).await;
    assert!(two["data"][0]["score"].as_f64().unwrap() < 1e-6);
    assert!(two["data"][1]["score"].as_f64().unwrap() > 0.999);
    let wrong = json!({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]});
    assert_eq!(bed.error("/v1/score", &wrong, 400).await["param"], "text_1");
}

#[tokio::test]
async fn texts_are_classified() {
    let labels: Vec<String> = ["even", "odd"].map(str::to_owned).into();
    let classes = Scorer::Classes { labels, apart: false };
    let bed = bed(2, Some(classes), false).await;
    // The mock counts tokens modulo the width: `b` is 98, `a` is 97.
    let answer = bed.ok("/v1/classify", &json!({"input": ["bb", "aa"]})).await;
    let data = answer["data"].as_array().unwrap();
    assert_eq!((&data[0]["label"], &data[1]["label"]), (&json!("even"), &json!("odd")));
    for item in data {
        let sum: f64 = item["probs"].as_array().unwrap().iter().map(|p| p.as_f64().unwrap()).sum();
        assert!((sum - 1.0).abs() < 1e-6 && item["num_classes"] == 2);
    }
    // The tokenizer of bytes does not join texts.
    let pair = json!({"query": "a", "documents": ["b"]});
    bed.error("/v1/rerank", &pair, 400).await;
}

#[tokio::test]
async fn a_model_of_vectors_does_nothing_else() {
    let bed = bed(8, Some(Scorer::Cosine), false).await;
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    bed.error("/v1/chat/completions", &chat, 501).await;
    bed.error("/v1/completions", &json!({"prompt": "x"}), 501).await;
    bed.error("/v1/classify", &json!({"input": "x"}), 400).await;
    let pooling = json!({"input": "x", "pooling": "last"});
    assert_eq!(bed.error("/v1/embeddings", &pooling, 400).await["param"], "pooling");
    let short = bed.ok("/v1/embeddings", &json!({"input": "abcdefgh", "dimensions": 4})).await;
    let vector = short["data"][0]["embedding"].as_array().unwrap();
    let squares: f64 = vector.iter().map(|x| x.as_f64().unwrap().powi(2)).sum();
    assert!(vector.len() == 4 && (squares - 1.0).abs() < 1e-6, "{short}");
    for wrong in [0, 9] {
        bed.error("/v1/embeddings", &json!({"input": "x", "dimensions": wrong}), 400).await;
    }
    let many = bed.ok("/v1/embeddings", &json!({"input": vec!["x"; 1000]})).await;
    assert_eq!(many["data"].as_array().unwrap().len(), 1000);
    // The whole context is for the text: there is no answer.
    bed.ok("/v1/embeddings", &json!({"input": "x".repeat(8192)})).await;
    bed.error("/v1/embeddings", &json!({"input": "x".repeat(8193)}), 400).await;
    let cut = json!({"input": "x".repeat(9000), "truncate_prompt_tokens": -1});
    assert_eq!(bed.ok("/v1/embeddings", &cut).await["usage"]["prompt_tokens"], 8192);
}

#[tokio::test]
async fn a_model_that_scores_nothing_says_so() {
    let bed = bed(8, None, true).await;
    let error = bed.error("/v1/score", &json!({"text_1": "a", "text_2": "b"}), 400).await;
    assert!(error["message"].as_str().unwrap().contains("scores"), "{error}");
}
