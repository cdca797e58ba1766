//! Completions, streamed and not.

use crate::bed::Bed;
use mock::MockConfig;
use serde_json::{Value, json};
use server::openai::completions::types::CompletionResponse;

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn prompts_of_every_kind() {
    let bed = Bed::new(MockConfig::default()).await;
    for (prompt, texts) in [
        (json!("abc"), vec!["abc"]),
        (json!(["abc", "de"]), vec!["abc", "de"]),
        (json!([97, 98]), vec!["ab"]),
        (json!([[97], [98, 99]]), vec!["a", "bc"]),
    ] {
        let found = bed.ok(PATH, &json!({"prompt": prompt})).await;
        let found: CompletionResponse = serde_json::from_value(found).unwrap();
        assert_eq!(found.object, "text_completion");
        let made: Vec<_> = found.choices.iter().map(|c| c.text.as_str()).collect();
        assert_eq!(made, texts);
    }
    let found = bed.ok(PATH, &json!({"prompt": ["abc", "de"], "n": 2})).await;
    let made: Vec<_> =
        found["choices"].as_array().unwrap().iter().map(|c| c["text"].clone()).collect();
    assert_eq!(made, ["abc", "abc", "de", "de"]);
    let sixteen = bed.ok(PATH, &json!({"prompt": "x".repeat(40)})).await;
    assert_eq!(sixteen["usage"]["completion_tokens"], 16);
    assert_eq!(sixteen["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn streamed() {
    let bed = Bed::new(MockConfig::default()).await;
    let ask = json!({
        "prompt": ["aé", "日"], "stream": true, "stream_options": {"include_usage": true},
    });
    let events = bed.stream(PATH, &ask).await;
    let (mut texts, mut usage) = ([String::new(), String::new()], None);
    for event in &events[..events.len() - 1] {
        let chunk: CompletionResponse = serde_json::from_str(event).unwrap();
        for choice in chunk.choices {
            texts[choice.index as usize] += &choice.text;
        }
        usage = chunk.usage.or(usage);
    }
    assert_eq!(texts, ["aé", "日"]);
    assert_eq!(usage.unwrap().completion_tokens, 6);
    assert_eq!(events.last().unwrap(), "[DONE]");
}

#[tokio::test]
async fn echo_and_log_probabilities() {
    let bed = Bed::new(MockConfig::default()).await;
    let ask = json!({"prompt": "abc", "echo": true, "logprobs": 2, "max_tokens": 2});
    let found = bed.ok(PATH, &ask).await;
    let choice = &found["choices"][0];
    assert_eq!(choice["text"], "abcab");
    assert_eq!(choice["logprobs"]["tokens"], json!(["a", "b", "c", "a", "b"]));
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 1, 2, 3, 4]));
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -0.25, -0.25, -0.25, -0.25]));
    assert_eq!(choice["logprobs"]["top_logprobs"][0], Value::Null);
    assert_eq!(choice["logprobs"]["top_logprobs"][1], json!({"b": -0.25, "c": -1.25}));
}

/// Many choices become separate requests, of which only the first computes the log-probabilities of
/// the prompt.
#[tokio::test]
async fn every_choice_has_the_log_probabilities_of_its_prompt() {
    let bed = Bed::new(MockConfig::default()).await;
    let ask = |n: u32| {
        let prompts = ["abc", "de"];
        json!({"prompt": prompts, "echo": true, "logprobs": 2, "max_tokens": 2, "n": n})
    };
    let one = bed.ok(PATH, &ask(1)).await;
    let many = bed.ok(PATH, &ask(6)).await;
    let choices = many["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 12);
    for (index, choice) in choices.iter().enumerate() {
        let alone = &one["choices"][index / 6];
        assert_eq!((&choice["text"], &choice["logprobs"]), (&alone["text"], &alone["logprobs"]));
    }
    assert_eq!(many["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"]);

    let mut streamed = ask(6);
    streamed["stream"] = true.into();
    let events = bed.stream(PATH, &streamed).await;
    let (mut texts, mut scores) = (vec![String::new(); 12], [0; 12]);
    for event in &events[..events.len() - 1] {
        let chunk: CompletionResponse = serde_json::from_str(event).unwrap();
        for choice in chunk.choices {
            texts[choice.index as usize] += &choice.text;
            scores[choice.index as usize] += choice.logprobs.map_or(0, |l| l.tokens.len());
        }
    }
    for (index, text) in texts.iter().enumerate() {
        let alone = &one["choices"][index / 6];
        assert_eq!(alone["text"], text.as_str());
        assert_eq!(alone["logprobs"]["tokens"].as_array().unwrap().len(), scores[index]);
    }
}

/// Rows that return none to five tokens a step change when text comes, and nothing else.
#[tokio::test]
async fn several_tokens_at_once_are_all_streamed_and_counted() {
    let one = Bed::new(MockConfig::default()).await;
    let several = Bed::new(MockConfig { tokens_per_row: 5, ..MockConfig::default() }).await;
    let text = "abé日🎼 stop here, and more";
    for more in [
        json!({}),
        json!({"logprobs": 2, "n": 3}),
        json!({"logprobs": 0, "echo": true}),
        json!({"max_tokens": 7, "logprobs": 1}),
        json!({"stop": "stop"}),
        json!({"stop_token_ids": [b'h'], "logprobs": 1}),
        json!({"ignore_eos": true, "max_tokens": 90, "logprobs": 1, "n": 2}),
    ] {
        let mut ask = json!({"prompt": text, "max_tokens": 60});
        ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (wanted, found) = (one.ok(PATH, &ask).await, several.ok(PATH, &ask).await);
        assert_eq!(found["choices"], wanted["choices"], "{more}");
        assert_eq!(found["usage"], wanted["usage"], "{more}");

        ask["stream"] = true.into();
        ask["stream_options"] = json!({"include_usage": true});
        let events = several.stream(PATH, &ask).await;
        let count = wanted["choices"].as_array().unwrap().len();
        let (mut texts, mut scores) = (vec![String::new(); count], vec![Vec::new(); count]);
        let (mut reasons, mut usage) = (vec![Value::Null; count], Value::Null);
        for event in &events[..events.len() - 1] {
            let chunk: Value = serde_json::from_str(event).unwrap();
            if !chunk["usage"].is_null() {
                usage = chunk["usage"].clone();
            }
            for choice in chunk["choices"].as_array().unwrap() {
                let at = choice["index"].as_u64().unwrap() as usize;
                texts[at] += choice["text"].as_str().unwrap();
                let tokens = choice["logprobs"]["token_logprobs"].as_array();
                scores[at].extend(tokens.into_iter().flatten().cloned());
                if !choice["finish_reason"].is_null() {
                    reasons[at] = choice["finish_reason"].clone();
                }
            }
        }
        // The prompt is cached by now; the rest of the usage is the same.
        for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(usage[count], wanted["usage"][count], "{more}");
        }
        for (at, choice) in wanted["choices"].as_array().unwrap().iter().enumerate() {
            assert_eq!(choice["text"], texts[at].as_str(), "{more}");
            assert_eq!(choice["finish_reason"], reasons[at], "{more}");
            let wanted = choice["logprobs"]["token_logprobs"].as_array().cloned();
            assert_eq!(wanted.unwrap_or_default(), scores[at], "{more}");
        }
    }
}

#[tokio::test]
async fn ignore_eos_min_tokens_and_stop_token_ids() {
    let bed = Bed::new(MockConfig::default()).await;
    let more = json!({"prompt": "ab", "ignore_eos": true, "max_tokens": 5});
    assert_eq!(bed.ok(PATH, &more).await["choices"][0]["text"], "ababa");
    let least = json!({"prompt": "ab", "min_tokens": 3, "max_tokens": 9});
    assert_eq!(bed.ok(PATH, &least).await["choices"][0]["text"], "aba");
    let until = json!({"prompt": "abcd", "stop_token_ids": [99]});
    assert_eq!(bed.ok(PATH, &until).await["choices"][0]["text"], "ab");
}

#[tokio::test]
async fn errors_name_the_field() {
    let bed = Bed::new(MockConfig::default()).await;
    for (more, param) in [
        (json!({}), Value::Null),
        (json!({"prompt": ""}), json!("prompt")),
        (json!({"prompt": []}), json!("prompt")),
        (json!({"prompt": [[]]}), json!("prompt")),
        (json!({"prompt": {"a": 1}}), json!("prompt")),
        (json!({"prompt": [70000]}), json!("prompt")),
        (json!({"prompt": vec!["x"; 300]}), json!("prompt")),
        (json!({"prompt": "x", "logprobs": 21}), json!("logprobs")),
        (json!({"prompt": "x", "suffix": "y"}), json!("suffix")),
        (json!({"prompt": "x", "n": 257}), json!("n")),
        (json!({"prompt": "x".repeat(8192)}), json!("prompt")),
    ] {
        assert_eq!(bed.error(PATH, &more, 400).await["param"], param, "{more}");
    }
}
