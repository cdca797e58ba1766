//! Token ids of prompts and answers, and log-probabilities of exactly these tokens.

use crate::bed::Bed;
use mock::MockConfig;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// The mock answers with the prompt and ends with this token.
const END: u32 = 257;

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{value}: {error}"))
}

#[tokio::test]
async fn answers_have_the_token_that_ended_them() {
    let bed = Bed::new(MockConfig::default()).await;
    let prompt = [104, 105, 33];
    let ask = json!({"prompt": prompt, "return_token_ids": true, "logprobs": 0, "n": 2});
    let answer = bed.ok(COMPLETIONS, &ask).await;
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], "hi!");
        assert_eq!(ids(&choice["prompt_token_ids"]), prompt);
        assert_eq!(ids(&choice["token_ids"]), [104, 105, 33, END]);
        assert_eq!(choice["logprobs"]["token_logprobs"].as_array().unwrap().len(), 4);
    }
    // One that ran out of tokens has no such token, and one that a string stopped has those of the string.
    let more = json!({"prompt": prompt, "return_token_ids": true, "max_tokens": 2});
    assert_eq!(ids(&bed.ok(COMPLETIONS, &more).await["choices"][0]["token_ids"]), [104, 105]);
    let more = json!({"prompt": prompt, "return_token_ids": true, "stop": "i", "logprobs": 0});
    let choice = &bed.ok(COMPLETIONS, &more).await["choices"][0];
    assert_eq!((&choice["text"], ids(&choice["token_ids"])), (&json!("h"), vec![104, 105]));
    assert_eq!(choice["logprobs"]["token_logprobs"].as_array().unwrap().len(), 2);
    let plain = bed.ok(COMPLETIONS, &json!({"prompt": prompt})).await;
    assert!(plain["choices"][0].get("token_ids").is_none());
}

#[tokio::test]
async fn chats_have_them_too() {
    let bed = Bed::new(MockConfig::default()).await;
    let ask = json!({
        "messages": [{"role": "user", "content": "hi"}],
        "return_token_ids": true,
        "logprobs": true,
    });
    let answer = bed.ok(CHAT, &ask).await;
    let prompt = ids(&answer["prompt_token_ids"]);
    assert_eq!(prompt.len() as u64, answer["usage"]["prompt_tokens"].as_u64().unwrap());
    let choice = &answer["choices"][0];
    let tokens = ids(&choice["token_ids"]);
    assert_eq!(tokens.last(), Some(&END));
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), tokens.len());
}

#[tokio::test]
async fn streams_have_them_in_parts() {
    let bed = Bed::new(MockConfig::default()).await;
    let complete = json!({"prompt": "hi é!", "return_token_ids": true});
    let chat =
        json!({"messages": [{"role": "user", "content": "hi é!"}], "return_token_ids": true});
    for (path, mut ask) in [(COMPLETIONS, complete), (CHAT, chat)] {
        let whole = bed.ok(path, &ask).await;
        ask["stream"] = true.into();
        let (mut prompts, mut tokens) = (Vec::new(), Vec::new());
        for event in bed.stream(path, &ask).await.iter().filter(|event| *event != "[DONE]") {
            let chunk: Value = serde_json::from_str(event).unwrap();
            let choice = &chunk["choices"][0];
            let prompt = chunk.get("prompt_token_ids").or(choice.get("prompt_token_ids"));
            prompts.extend(prompt.map(ids));
            tokens.extend(choice.get("token_ids").map(ids).unwrap_or_default());
        }
        let choice = &whole["choices"][0];
        let prompt = whole.get("prompt_token_ids").or(choice.get("prompt_token_ids"));
        assert_eq!(prompts, [ids(prompt.unwrap())], "{path}: once");
        assert_eq!(tokens, ids(&choice["token_ids"]), "{path}");
    }
}

#[tokio::test]
async fn many_choices_are_allowed() {
    let bed = Bed::new(MockConfig::default()).await;
    let answer = bed.ok(COMPLETIONS, &json!({"prompt": "hi", "n": 256})).await;
    assert_eq!(answer["choices"].as_array().unwrap().len(), 256);
    bed.error(COMPLETIONS, &json!({"prompt": "hi", "n": 257}), 400).await;
}

#[tokio::test]
async fn log_probabilities_of_what_is_drawn_from() {
    let bed = Bed::new(MockConfig::default()).await;
    for mode in ["raw_logprobs", "processed_logprobs"] {
        bed.ok(COMPLETIONS, &json!({"prompt": "hi", "logprobs": 1, "logprobs_mode": mode})).await;
    }
    let error = bed.error(COMPLETIONS, &json!({"prompt": "hi", "logprobs_mode": "x"}), 400).await;
    assert_eq!(error["param"], "logprobs_mode");
}
