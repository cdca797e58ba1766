//! Anthropic's messages, streamed and not.

use crate::bed::{Bed, config, model, repeats};
use mock::{MockConfig, demo};
use serde_json::{Value, json};
use server::ServerConfig;
use server::anthropic::types::MessagesResponse;

const MESSAGES: &str = "/v1/messages";

async fn demo_bed() -> Bed {
    Bed::new(MockConfig { oracle: demo(), ..MockConfig::default() }).await
}

fn ask(text: &str, more: Value) -> Value {
    let mut body = json!({"max_tokens": 500, "messages": [{"role": "user", "content": text}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn weather() -> Value {
    json!([{"name": "weather", "description": "The weather", "input_schema": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    }}])
}

/// The message that a stream makes, as Anthropic's client puts it together.
fn assembled(events: &[String]) -> Value {
    let mut message = Value::Null;
    let mut partial = String::new();
    for event in events {
        let event: Value = serde_json::from_str(event).unwrap();
        let at = event["index"].as_u64().unwrap_or(0) as usize;
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!(at, message["content"].as_array().unwrap().len());
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
                partial.clear();
            }
            "content_block_delta" => {
                let (block, delta) = (&mut message["content"][at], &event["delta"]);
                let mut add = |key: &str| {
                    let text =
                        format!("{}{}", block[key].as_str().unwrap(), delta[key].as_str().unwrap());
                    block[key] = text.into();
                };
                match delta["type"].as_str().unwrap() {
                    "text_delta" => add("text"),
                    "thinking_delta" => add("thinking"),
                    "signature_delta" => add("signature"),
                    "input_json_delta" => partial += delta["partial_json"].as_str().unwrap(),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                if message["content"][at]["type"] == "tool_use" {
                    message["content"][at]["input"] = serde_json::from_str(&partial).unwrap();
                }
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"]["output_tokens"] = event["usage"]["output_tokens"].clone();
            }
            "message_stop" | "ping" => {}
            other => panic!("{other}"),
        }
    }
    message
}

/// The answer as one response; the stream must make the same message.
async fn both(bed: &Bed, body: &Value) -> Value {
    let whole = bed.ok(MESSAGES, body).await;
    serde_json::from_value::<MessagesResponse>(whole.clone()).unwrap();
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let made = assembled(&bed.stream(MESSAGES, &streamed).await);
    for key in ["type", "role", "model", "stop_reason", "stop_sequence"] {
        assert_eq!(made[key], whole[key], "{key}");
    }
    assert_eq!(made["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
    let plain = |message: &Value| {
        let mut blocks = message["content"].clone();
        for block in blocks.as_array_mut().unwrap() {
            for key in ["id", "citations"] {
                block.as_object_mut().unwrap().remove(key);
            }
        }
        blocks
    };
    assert_eq!(plain(&made), plain(&whole));
    whole
}

#[tokio::test]
async fn text_thinking_and_stop_reasons() {
    let bed = demo_bed().await;
    let whole = both(&bed, &ask("Grüße 世界", json!({"system": "Be brief."}))).await;
    assert_eq!(
        (whole["type"].as_str(), whole["stop_reason"].as_str()),
        (Some("message"), Some("end_turn"))
    );
    let text = whole["content"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("You said: “Grüße 世界”"), "{text}");
    assert_eq!(whole["usage"]["output_tokens"], text.len());
    let again = bed.ok(MESSAGES, &ask("Grüße 世界", json!({"system": "Be brief."}))).await;
    assert!(again["usage"]["cache_read_input_tokens"].as_u64() > Some(0));

    let cut = both(&bed, &ask("hi", json!({"max_tokens": 5}))).await;
    assert_eq!(cut["stop_reason"], "max_tokens");
    let stopped = both(&bed, &ask("hi", json!({"stop_sequences": ["never", "mock"]}))).await;
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_sequence"]),
        (&json!("stop_sequence"), &json!("mock"))
    );

    let thought = both(
        &bed,
        &ask(
            "please think",
            json!({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}),
        ),
    )
    .await;
    assert_eq!(thought["content"][0]["type"], "thinking");
    assert_eq!(thought["content"][0]["thinking"], "They said: please think\n");
    assert_eq!(thought["content"][1]["text"], "I have thought about it.");
}

#[tokio::test]
async fn tools_and_their_results() {
    let bed = demo_bed().await;
    for choice in [
        json!({"type": "auto"}),
        json!({"type": "any"}),
        json!({"type": "tool", "name": "weather"}),
    ] {
        let body = ask("weather?", json!({"tools": weather(), "tool_choice": choice}));
        let whole = both(&bed, &body).await;
        assert_eq!(whole["stop_reason"], "tool_use", "{choice}");
        assert_eq!(whole["content"][0]["name"], "weather");
        assert_eq!(whole["content"][0]["input"], json!({"city": "Paris"}));
    }
    let none = ask("weather?", json!({"tools": weather(), "tool_choice": {"type": "none"}}));
    assert_eq!(both(&bed, &none).await["stop_reason"], "end_turn");
    let mut body = ask("weather?", json!({"tools": weather()}));
    body["messages"].as_array_mut().unwrap().extend([
        json!({"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
        ]}),
        json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
        ]}),
    ]);
    assert_eq!(both(&bed, &body).await["content"][0]["text"], "The tool says: rain");
}

#[tokio::test]
async fn schemas_counts_and_continuations() {
    let bed = demo_bed().await;
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let format = json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}});
    let whole = both(&bed, &ask("hi", format)).await;
    assert_eq!(whole["content"][0]["text"], "{\"a\":7}");
    let mut body = ask("hello there", json!({"tools": weather()}));
    let used = bed.ok(MESSAGES, &body).await["usage"].clone();
    body.as_object_mut().unwrap().remove("max_tokens");
    let counted = bed.ok("/v1/messages/count_tokens", &body).await["input_tokens"].as_u64();
    assert_eq!(
        counted,
        Some(
            used["input_tokens"].as_u64().unwrap()
                + used["cache_read_input_tokens"].as_u64().unwrap()
        )
    );
    // The assistant's last message is continued.
    let bed = Bed::new(MockConfig { oracle: repeats(), ..MockConfig::default() }).await;
    let mut body = ask("Count.", json!({}));
    body["messages"]
        .as_array_mut()
        .unwrap()
        .push(json!({"role": "assistant", "content": "One, two"}));
    let echo = bed.ok(MESSAGES, &body).await["content"][0]["text"].clone();
    assert!(echo.as_str().unwrap().ends_with("assistant\nOne, two"), "{echo}");
}

#[tokio::test]
async fn errors_have_anthropics_format() {
    let bed = demo_bed().await;
    for (body, status, kind, part) in [
        (ask("x", json!({"model": "claude"})), 404, "not_found_error", "claude"),
        (json!({"messages": []}), 400, "invalid_request_error", "max_tokens"),
        (ask("x", json!({"max_tokens": 0})), 400, "invalid_request_error", "max_tokens"),
        (ask("x", json!({"temperature": 1.5})), 400, "invalid_request_error", "temperature"),
        (ask("x", json!({"container": "c"})), 400, "invalid_request_error", "container"),
        (
            ask("x", json!({"tools": [{"type": "web_search_20250305", "name": "w"}]})),
            400,
            "invalid_request_error",
            "Anthropic",
        ),
        (
            json!({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
            400,
            "invalid_request_error",
            "image is not supported; this model reads text only",
        ),
        (
            json!({"max_tokens": 5, "messages": [{"role": "system", "content": "x"}]}),
            400,
            "invalid_request_error",
            "role",
        ),
    ] {
        let (found, answer) = bed.post(MESSAGES, &body).await;
        assert_eq!((found, &answer["type"]), (status, &json!("error")), "{answer}");
        assert_eq!(answer["error"]["type"], kind);
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(part), "{message}");
    }
    let (_, body) = bed.get("/v1/messages").await;
    assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["type"], "error");
    let failing =
        Bed::new(MockConfig { fail_every: Some(1), oracle: repeats(), ..MockConfig::default() })
            .await;
    let events = failing.stream(MESSAGES, &ask("x", json!({"stream": true}))).await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
}

#[tokio::test]
async fn the_key_may_be_in_anthropics_header() {
    let config = ServerConfig { api_keys: vec!["sesame".into()], ..config() };
    let mut bed = Bed::with(config, MockConfig::default(), model()).await;
    bed.target.key = None;
    for (key, status) in [("sesame", 200), ("wrong", 401)] {
        let mut wire = bed.connect().await;
        let headers = [("x-api-key", key), ("anthropic-version", "2023-06-01")];
        let body = ask("x", json!({})).to_string();
        let head = wire.request("POST", MESSAGES, &headers, body.as_bytes()).await.unwrap();
        assert_eq!(head.status, status);
        let answer: Value = serde_json::from_slice(&wire.body().await.unwrap()).unwrap();
        assert!(status == 200 || answer["error"]["type"] == "authentication_error");
    }
}
