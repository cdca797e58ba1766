//! Fields beyond OpenAI's: those of vLLM and SGLang that are implemented, those refused by name,
//! and unknown ones, which are reported.

use crate::bed::{Bed, config, model};
use mock::MockConfig;
use serde_json::{Value, json};
use std::sync::Arc;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// A server that answers with the source of the request's grammar, or with its prompt.
async fn bed() -> Bed {
    let oracle = Arc::new(|request: &engine::request::Request, _| {
        let grammar = request.sampling.grammar.as_ref();
        match grammar {
            Some(grammar) => format!("{:?}", grammar.source()).bytes().map(u32::from).collect(),
            None => request.prompt.iter().map(|token| (*token).min(255)).collect(),
        }
    });
    let model = server::Model { reasoning: None, ..model() };
    Bed::with(config(), MockConfig { oracle, ..MockConfig::default() }, model).await
}

/// A request for a route with one more field.
fn with(path: &str, name: &str, value: &Value) -> Value {
    let mut body = match path {
        CHAT => json!({"messages": [{"role": "user", "content": "hi"}]}),
        _ => json!({"prompt": "hi", "max_tokens": 200}),
    };
    body[name] = value.clone();
    body
}

fn text(path: &str, answer: &Value) -> String {
    let choice = &answer["choices"][0];
    let text = if path == CHAT { &choice["message"]["content"] } else { &choice["text"] };
    text.as_str().unwrap().into()
}

#[tokio::test]
async fn guided_fields_restrict_the_answer() {
    let bed = bed().await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let shut = r#"JsonSchema("{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"additionalProperties\":false}")"#;
    let lark = "start: \"a\" | \"b\"";
    let choices = r#"Regex("(yes|no\\.)")"#;
    let named = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    for (name, value, expected) in [
        ("guided_json", schema.clone(), shut),
        ("guided_json", schema.to_string().into(), shut),
        ("structured_outputs", json!({"json": schema}), shut),
        ("response_format", named, shut),
        ("response_format", json!({"type": "json_object"}), "JsonObject"),
        ("structured_outputs", json!({"json_object": true}), "JsonObject"),
        ("guided_regex", "[0-9]+".into(), "Regex(\"[0-9]+\")"),
        ("regex", "[0-9]+".into(), "Regex(\"[0-9]+\")"),
        ("structured_outputs", json!({"regex": "[0-9]+"}), "Regex(\"[0-9]+\")"),
        ("guided_choice", json!(["yes", "no."]), choices),
        ("structured_outputs", json!({"choice": ["yes", "no."]}), choices),
        ("guided_grammar", lark.into(), "Lark(\"start: \\\"a\\\" | \\\"b\\\"\")"),
        ("structured_outputs", json!({"grammar": lark}), "Lark(\"start: \\\"a\\\" | \\\"b\\\"\")"),
    ] {
        for path in [CHAT, COMPLETIONS] {
            let answer = bed.ok(path, &with(path, name, &value)).await;
            assert_eq!(text(path, &answer), expected, "{path} {name} {value}");
        }
    }
    for (name, value, param) in [
        ("guided_json", json!(3), "guided_json"),
        ("guided_json", "no schema".into(), "guided_json"),
        ("guided_choice", json!([]), "guided_choice"),
        ("guided_regex", "(".into(), "guided_regex"),
        ("guided_grammar", "root ::= \"a\"".into(), "guided_grammar"),
        ("structured_outputs", json!({"structural_tag": "x"}), "structured_outputs.structural_tag"),
        ("response_format", json!({"type": "xml"}), "response_format.type"),
    ] {
        for path in [CHAT, COMPLETIONS] {
            let error = bed.error(path, &with(path, name, &value), 400).await;
            assert_eq!(error["param"], param, "{value}");
        }
    }
    let mut two = with(CHAT, "guided_regex", &"a".into());
    two["response_format"] = json!({"type": "json_object"});
    let error = bed.error(CHAT, &two, 400).await;
    assert!(error["message"].as_str().unwrap().contains("response_format and guided_regex"));
}

#[tokio::test]
async fn unsupported_fields_are_refused_by_name() {
    let bed = bed().await;
    for (name, value) in [
        ("functions", json!([{"name": "f"}])),
        ("function_call", json!("auto")),
        ("bad_words", json!(["x"])),
        ("chat_template", json!("{{ messages }}")),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "alloy"})),
        ("ebnf", json!("root ::= \"a\"")),
        ("use_beam_search", json!(true)),
        ("length_penalty", json!(2)),
        ("skip_special_tokens", json!(false)),
        ("include_stop_str_in_output", json!(true)),
        ("allowed_token_ids", json!([1])),
        ("logits_processors", json!(["x"])),
        ("truncate_prompt_tokens", json!(0)),
        ("truncate_prompt_tokens", json!(9000)),
        ("prompt_logprobs", json!(21)),
        ("prompt_logprobs", json!(-1)),
    ] {
        for path in [CHAT, COMPLETIONS] {
            let error = bed.error(path, &with(path, name, &value), 400).await;
            assert_eq!(error["param"], name, "{value}");
            assert!(error["message"].as_str().unwrap().contains(name), "{error}");
        }
    }
    let error = bed.error(COMPLETIONS, &with(COMPLETIONS, "best_of", &json!(3)), 400).await;
    assert_eq!(error["param"], "best_of");
    let mut body = with(CHAT, "prompt_logprobs", &json!(1));
    body["stream"] = true.into();
    assert_eq!(bed.error(CHAT, &body, 400).await["param"], "prompt_logprobs");
    // Values without an effect are accepted.
    for (name, value) in [
        ("functions", json!([])),
        ("function_call", Value::Null),
        ("bad_words", json!([])),
        ("modalities", json!(["text"])),
        ("use_beam_search", json!(false)),
        ("length_penalty", json!(1)),
        ("skip_special_tokens", json!(true)),
        ("metadata", json!({"a": "b"})),
        ("store", json!(true)),
    ] {
        for path in [CHAT, COMPLETIONS] {
            bed.ok(path, &with(path, name, &value)).await;
        }
    }
    bed.ok(COMPLETIONS, &with(COMPLETIONS, "best_of", &json!(1))).await;
}

#[tokio::test]
async fn unknown_fields_are_listed_and_counted() {
    let bed = bed().await;
    let mut body = with(CHAT, "guided_jsn", &json!({"deep": [1, 2]}));
    body["temprature"] = 3.into();
    body["with\nbreak"] = 1.into();
    body["metadata"] = json!({});
    for _ in 0..2 {
        let (head, _) = bed.try_post(CHAT, body.to_string().as_bytes()).await.unwrap();
        assert_eq!(head.status, 200);
        assert_eq!(head.header("x-ignored-fields"), Some("guided_jsn, temprature"));
    }
    let plain = with(CHAT, "seed", &1.into()).to_string();
    let (head, _) = bed.try_post(CHAT, plain.as_bytes()).await.unwrap();
    assert_eq!(head.header("x-ignored-fields"), None);
    let (_, metrics) = bed.get("/metrics").await;
    let line = "dacapo_fields_ignored_total{route=\"/v1/chat/completions\"} 4";
    assert!(String::from_utf8(metrics).unwrap().contains(line));
}

#[tokio::test]
async fn log_probabilities_of_prompts() {
    let bed = bed().await;
    for (n, stop) in [(1, Value::Null), (3, json!("never"))] {
        for path in [CHAT, COMPLETIONS] {
            let mut body = with(path, "prompt_logprobs", &2.into());
            body["n"] = n.into();
            body["stop"] = stop.clone();
            let answer = bed.ok(path, &body).await;
            let tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
            let lists: Vec<&Value> = match path {
                CHAT => vec![&answer["prompt_logprobs"]],
                _ => answer["choices"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|c| &c["prompt_logprobs"])
                    .collect(),
            };
            assert_eq!(lists.len(), if path == CHAT { 1 } else { n });
            for list in lists {
                let list = list.as_array().unwrap();
                assert_eq!((list.len(), &list[0]), (tokens, &Value::Null));
                let entry = list[1].as_object().unwrap();
                assert_eq!(entry.len(), 2);
                assert!(entry.values().any(|one| one["rank"] == 1 && one["logprob"] == -0.25));
            }
            assert!(path == CHAT || text(path, &answer) == "hi");
        }
    }
    // With echo each list has its own number of alternatives.
    let mut body = with(COMPLETIONS, "prompt_logprobs", &3.into());
    (body["echo"], body["logprobs"]) = (true.into(), 1.into());
    let choice = bed.ok(COMPLETIONS, &body).await["choices"][0].clone();
    assert_eq!(choice["prompt_logprobs"][1].as_object().unwrap().len(), 3);
    assert_eq!(choice["logprobs"]["top_logprobs"][1].as_object().unwrap().len(), 1);
    assert_eq!(choice["text"], "hihi");
    let plain = bed.ok(COMPLETIONS, &with(COMPLETIONS, "n", &1.into())).await;
    assert!(plain["choices"][0].get("prompt_logprobs").is_none());
}

#[tokio::test]
async fn prompts_are_truncated_on_request() {
    let bed = bed().await;
    let long = "0123456789".repeat(1000);
    let mut body = json!({"prompt": long, "truncate_prompt_tokens": 4, "max_tokens": 10});
    let answer = bed.ok(COMPLETIONS, &body).await;
    assert_eq!(
        (text(COMPLETIONS, &answer).as_str(), &answer["usage"]["prompt_tokens"]),
        ("6789", &json!(4))
    );
    body["truncate_prompt_tokens"] = (-1).into();
    let answer = bed.ok(COMPLETIONS, &body).await;
    assert_eq!(answer["usage"]["prompt_tokens"], 8191);
    body["truncate_prompt_tokens"] = Value::Null;
    bed.error(COMPLETIONS, &body, 400).await;
    let mut chat = with(CHAT, "truncate_prompt_tokens", &12.into());
    chat["messages"][0]["content"] = long.into();
    assert_eq!(bed.ok(CHAT, &chat).await["usage"]["prompt_tokens"], 12);
    let embedding = MockConfig { embedding: 8, ..MockConfig::default() };
    let bed = Bed::new(embedding).await;
    let two = json!({"input": "xxab", "truncate_prompt_tokens": 2});
    let cut = bed.ok("/v1/embeddings", &two).await;
    assert_eq!(cut["usage"]["prompt_tokens"], 2);
    let plain = bed.ok("/v1/embeddings", &json!({"input": "ab"})).await;
    assert_eq!(cut["data"], plain["data"]);
    let wrong = json!({"input": "a", "truncate_prompt_tokens": -2});
    let error = bed.error("/v1/embeddings", &wrong, 400).await;
    assert_eq!(error["param"], "truncate_prompt_tokens");
}

#[tokio::test]
async fn the_last_message_can_be_continued() {
    let bed = bed().await;
    let mut body = json!({"messages": [
        {"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"},
    ], "continue_final_message": true, "add_generation_prompt": false});
    let prompt = text(CHAT, &bed.ok(CHAT, &body).await);
    assert!(prompt.ends_with("assistant\nOne, two"), "{prompt}");
    body["add_generation_prompt"] = true.into();
    assert_eq!(bed.error(CHAT, &body, 400).await["param"], "continue_final_message");
    body["continue_final_message"] = false.into();
    body["add_generation_prompt"] = false.into();
    let prompt = text(CHAT, &bed.ok(CHAT, &body).await);
    assert!(!prompt.ends_with("assistant\n"), "{prompt}");
}
