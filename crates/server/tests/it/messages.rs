//! The words of errors: each says what is wrong, with what, and what is allowed.

use crate::bed::{Bed, config, model};
use mock::MockConfig;
use serde_json::json;
use server::Model;

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn errors_say_what_is_wrong() {
    let bed = Bed::new(MockConfig { seats: 2, ..MockConfig::default() }).await;
    let image = r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}"#;
    let chat = |more: &str| {
        format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"hi\"}}]{more}}}")
    };
    for (body, message) in [
        (image.to_string(), "image_url is not supported; this model reads text only"),
        (chat(","), "the body is not JSON: trailing comma at column 50"),
        (chat(", \"stop\": [\"x\",]"), "the body is not JSON: trailing comma at column 64"),
        ("{\"messages\": [".into(), "the body is not JSON: EOF while parsing a list at column 14"),
        ("{\n\"a\": }".into(), "the body is not JSON: expected value at line 2 column 6"),
        ("hello".into(), "the body is not JSON: it must begin with {"),
        ("{} {}".into(), "missing field `messages` at column 2"),
        (chat("") + " x", "the body is not JSON: trailing characters at column 51"),
        ("[1, 2]".into(), "the body must be a JSON object; it is a JSON list"),
        (String::new(), "the body must be a JSON object; it is empty"),
        (
            chat(", \"max_tokens\": -1"),
            "max_tokens must be an integer between 1 and 4294967295, not -1",
        ),
        (chat(", \"max_tokens\": 0"), "max_tokens must be at least 1"),
        (
            chat(", \"max_tokens\": 1.5"),
            "max_tokens must be an integer between 1 and 4294967295, not 1.5",
        ),
        (
            chat(", \"temperature\": \"warm\""),
            "temperature must be a number between 0 and 2, not string \"warm\"",
        ),
        (
            chat(", \"n\": 400"),
            "n must be between 1 and 256; --limit choices=N allows more, --max-batch says how many run at once",
        ),
        (chat(", \"n\": -4"), "n must be an integer between 1 and 256, not -4"),
        (
            chat(", \"stop\": 3"),
            "stop: invalid type: integer `3`, expected a string or a list of strings at column 59",
        ),
    ] {
        let (status, answer) = bed.post_text(CHAT, &body).await;
        assert_eq!((status, answer["error"]["message"].as_str()), (400, Some(message)), "{body}");
    }
}

#[tokio::test]
async fn more_choices_than_run_at_once_name_n_and_the_flag() {
    let bed = Bed::new(MockConfig { seats: 2, ..MockConfig::default() }).await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "n": 3});
    let error = bed.error(CHAT, &body, 400).await;
    assert_eq!(error["param"], "n");
    let message = error["message"].as_str().unwrap();
    assert_eq!(
        message,
        "n is too large: at most 2 run at once; lower n, or start the server with a larger --max-batch"
    );
}

#[tokio::test]
async fn choices_beyond_the_batch_wait_for_each_other() {
    let mock = MockConfig { seats: 2, ..MockConfig::default() };
    let model = Model { at_once: 2, ..model() };
    let bed = Bed::with(config(), mock, model).await;
    for n in [3, 4, 9, 32] {
        let body = json!({
            "messages": [{"role": "user", "content": "hi"}], "n": n, "max_tokens": 2,
        });
        let answer = bed.ok(CHAT, &body).await;
        assert_eq!(answer["choices"].as_array().map(Vec::len), Some(n), "{answer}");
        let body = json!({"prompt": "hi", "n": n, "max_tokens": 2});
        let answer = bed.ok("/v1/completions", &body).await;
        assert_eq!(answer["choices"].as_array().map(Vec::len), Some(n), "{answer}");
    }
}
