//! Chat, streamed and not.

use crate::bed::Bed;
use mock::{MockConfig, demo};
use serde_json::{Value, json};
use server::openai::chat::types::{ChatChunk, ChatResponse};

const CHAT: &str = "/v1/chat/completions";

fn says(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}]})
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

async fn demo_bed() -> Bed {
    Bed::new(MockConfig { oracle: demo(), ..MockConfig::default() }).await
}

/// The text, reasoning, calls and finish reason of a stream; parses each event into its type.
fn collect(events: &[String]) -> (String, String, Vec<(String, String)>, String) {
    let (mut text, mut thought, mut calls, mut reason) =
        (String::new(), String::new(), Vec::<(String, String)>::new(), String::new());
    assert_eq!(events.last().unwrap(), "[DONE]");
    for event in &events[..events.len() - 1] {
        let chunk: ChatChunk = serde_json::from_str(event).unwrap();
        assert_eq!(chunk.object, "chat.completion.chunk");
        for choice in chunk.choices {
            text += choice.delta.content.as_deref().unwrap_or("");
            thought += choice.delta.reasoning_content.as_deref().unwrap_or("");
            for call in choice.delta.tool_calls.into_iter().flatten() {
                if let Some(name) = call.function.name {
                    assert!(call.id.is_some() && call.kind.as_deref() == Some("function"));
                    calls.push((name, String::new()));
                }
                calls[call.index as usize].1 += &call.function.arguments.unwrap_or_default();
            }
            reason += choice.finish_reason.as_deref().unwrap_or("");
        }
    }
    (text, thought, calls, reason)
}

#[tokio::test]
async fn streamed_and_complete_answers_are_equal() {
    let bed = demo_bed().await;
    let whole: ChatResponse =
        serde_json::from_value(bed.ok(CHAT, &says("Grüße, 世界 🎼")).await).unwrap();
    assert_eq!(whole.object, "chat.completion");
    assert_eq!(whole.model, "mock");
    let message = &whole.choices[0].message;
    let content = message.content.clone().unwrap();
    assert!(content.starts_with("You said: “Grüße, 世界 🎼”."), "{content}");
    assert_eq!(message.role, "assistant");
    assert_eq!(whole.choices[0].finish_reason.as_deref(), Some("stop"));
    assert_eq!(whole.usage.completion_tokens, content.len() as u64);
    let usage = &whole.usage;
    assert_eq!(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);

    let events = bed.stream(CHAT, &with(says("Grüße, 世界 🎼"), json!({"stream": true}))).await;
    let (text, _, _, reason) = collect(&events);
    assert_eq!((text.as_str(), reason.as_str()), (content.as_str(), "stop"));
    let first: ChatChunk = serde_json::from_str(&events[0]).unwrap();
    assert_eq!(first.choices[0].delta.role.as_deref(), Some("assistant"));
    assert!(events.iter().all(|e| !e.contains("usage")));
}

#[tokio::test]
async fn usage_comes_last_if_requested() {
    let bed = demo_bed().await;
    let ask = json!({"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 9});
    let events = bed.stream(CHAT, &with(says("hello"), ask)).await;
    let chunks: Vec<ChatChunk> =
        events[..events.len() - 1].iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    let (last, rest) = chunks.split_last().unwrap();
    assert!(last.choices.is_empty());
    assert_eq!(last.usage.as_ref().unwrap().completion_tokens, 9);
    assert!(rest.iter().all(|chunk| chunk.usage.is_none()));
    assert_eq!(collect(&events).3, "length");
}

#[tokio::test]
async fn stop_strings_end_an_answer_and_are_removed() {
    let bed = demo_bed().await;
    for stop in [json!("mock"), json!(["not in the answer", "mock", "real"])] {
        let ask = json!({"stop": stop, "n": 2});
        let whole = bed.ok(CHAT, &with(says("hi"), ask.clone())).await;
        let once = bed.ok(CHAT, &with(says("hi"), json!({"max_tokens": 1}))).await;
        assert_eq!(whole["usage"]["prompt_tokens"], once["usage"]["prompt_tokens"]);
        for choice in whole["choices"].as_array().unwrap() {
            let text = choice["message"]["content"].as_str().unwrap();
            assert!(text.ends_with("This is the "), "{text}");
            assert_eq!(choice["finish_reason"], "stop");
        }
        let events =
            bed.stream(CHAT, &with(with(says("hi"), ask), json!({"stream": true, "n": 1}))).await;
        let (text, _, _, reason) = collect(&events);
        assert!(text.ends_with("This is the "), "{text}");
        assert_eq!(reason, "stop");
        assert!(!events.iter().any(|event| event.contains("mock: ")));
    }
    bed.until("the engine is idle", || bed.link.inflight() == 0).await;
}

#[tokio::test]
async fn several_choices() {
    let bed = demo_bed().await;
    let whole = bed.ok(CHAT, &with(says("hi"), json!({"n": 3}))).await;
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (choice, index) in choices.iter().zip(0..) {
        assert_eq!(choice["index"], index);
        let differently = choice["message"]["content"].as_str().unwrap().contains("differently");
        assert_eq!(differently, index > 0);
    }
}

#[tokio::test]
async fn reasoning_is_separated_from_the_answer() {
    let bed = demo_bed().await;
    let whole = bed.ok(CHAT, &says("please think")).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "They said: please think\n");
    assert_eq!(message["content"], "I have thought about it.");
    assert!(whole["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64() > Some(10));
    let events = bed.stream(CHAT, &with(says("please think"), json!({"stream": true}))).await;
    let (text, thought, _, _) = collect(&events);
    assert_eq!(thought, "They said: please think\n");
    assert_eq!(text, "I have thought about it.");
}

fn weather() -> Value {
    json!({"tools": [{"type": "function", "function": {
        "name": "weather",
        "description": "The weather somewhere",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    }}]})
}

#[tokio::test]
async fn tools_are_called_and_answered() {
    let bed = demo_bed().await;
    let arguments = r#"{"city":"Paris","days":7}"#;
    let forced = json!({"type": "function", "function": {"name": "weather"}});
    for choice in [json!("auto"), json!("required"), forced, Value::Null] {
        let ask = with(with(says("weather?"), weather()), json!({"tool_choice": choice}));
        let whole = bed.ok(CHAT, &ask).await;
        let answer = &whole["choices"][0];
        assert_eq!(answer["finish_reason"], "tool_calls", "{choice}");
        assert_eq!(answer["message"]["content"], Value::Null);
        let call = &answer["message"]["tool_calls"][0];
        assert_eq!(call["function"]["name"], "weather");
        assert_eq!(call["function"]["arguments"], arguments);
        let events = bed.stream(CHAT, &with(ask, json!({"stream": true}))).await;
        let (text, _, calls, reason) = collect(&events);
        assert_eq!((text.as_str(), reason.as_str()), ("", "tool_calls"));
        assert_eq!(calls, [("weather".to_string(), arguments.to_string())]);
    }
    let mut ask = with(says("weather?"), weather());
    let messages = ask["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "tool_calls": [{
        "id": "call-1", "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }]}));
    messages.push(json!({"role": "tool", "tool_call_id": "call-1", "content": "rain"}));
    let whole = bed.ok(CHAT, &ask).await;
    assert_eq!(whole["choices"][0]["message"]["content"], "The tool says: rain");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");

    let none = with(with(says("weather?"), weather()), json!({"tool_choice": "none"}));
    let whole = bed.ok(CHAT, &none).await;
    assert!(whole["choices"][0]["message"].get("tool_calls").is_none());
}

#[tokio::test]
async fn answers_have_the_requested_format() {
    let bed = demo_bed().await;
    let any = with(says("hi"), json!({"response_format": {"type": "json_object"}}));
    let text = bed.ok(CHAT, &any).await["choices"][0]["message"]["content"].clone();
    serde_json::from_str::<Value>(text.as_str().unwrap()).unwrap();
    let schema = json!({"type": "object", "properties": {"age": {"type": "integer"}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let ask = with(says("hi"), json!({"response_format": format}));
    let text = bed.ok(CHAT, &ask).await["choices"][0]["message"]["content"].clone();
    assert_eq!(text, r#"{"age":7}"#);
}

#[tokio::test]
async fn log_probabilities() {
    let bed = demo_bed().await;
    let ask = json!({"logprobs": true, "top_logprobs": 3, "max_tokens": 4});
    let whole = bed.ok(CHAT, &with(says("hi"), ask.clone())).await;
    let content = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 4);
    assert_eq!(content[0]["token"], "Y");
    assert_eq!(content[0]["bytes"], json!([89]));
    assert_eq!(content[0]["logprob"], -0.25);
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 3);
    let events = bed.stream(CHAT, &with(with(says("hi"), ask), json!({"stream": true}))).await;
    let count: usize = events[..events.len() - 1]
        .iter()
        .map(|e| serde_json::from_str::<ChatChunk>(e).unwrap())
        .flat_map(|chunk| chunk.choices)
        .filter_map(|choice| choice.logprobs)
        .map(|l| l.content.len())
        .sum();
    assert_eq!(count, 4);
    let none = bed.ok(CHAT, &says("hi")).await;
    assert_eq!(none["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn parts_developer_role_and_unknown_fields_are_accepted() {
    let bed = demo_bed().await;
    let ask = json!({
        "model": "other-name",
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [
                {"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"},
            ]},
        ],
        "seed": -3, "metadata": {"a": 1}, "store": false, "user": "me", "top_k": -1,
        "logit_bias": {"65": -100}, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "min_p": 0.1, "repetition_penalty": 1.1, "priority": 3, "max_completion_tokens": 50,
        "chat_template_kwargs": {"enable_thinking": false},
    });
    let whole = bed.ok(CHAT, &ask).await;
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text.starts_with("You said: “Hello”"), "{text}");
    assert_eq!(whole["usage"]["completion_tokens"], 50);
}

#[tokio::test]
async fn errors_name_the_field() {
    let bed = demo_bed().await;
    let cases = [
        (json!({"temperature": 3}), "temperature"),
        (json!({"temperature": "warm"}), "temperature"),
        (json!({"top_p": -0.5}), "top_p"),
        (json!({"min_p": 1.5}), "min_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"frequency_penalty": 2.1}), "frequency_penalty"),
        (json!({"presence_penalty": -3}), "presence_penalty"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"max_completion_tokens": 0}), "max_completion_tokens"),
        (json!({"n": 0}), "n"),
        (json!({"n": 1000}), "n"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias.x"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias.1"),
        (json!({"logit_bias": {"1": "a"}}), "logit_bias.1"),
        (json!({"stop": 3}), "stop"),
        (json!({"stop": vec!["x"; 17]}), "stop"),
        (json!({"stop": "x".repeat(300)}), "stop"),
        (json!({"stop_token_ids": [100000]}), "stop_token_ids"),
        (json!({"logit_bias": {"007": 1}}), "logit_bias.007"),
        (json!({"priority": 1u64 << 40}), "priority"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "hello"}), "messages"),
        (json!({"messages": [{"role": "king", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
        (json!({"messages": [{"content": "x"}]}), "messages[0]"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]}),
            "messages[0].content[0].type",
        ),
        (
            json!({"messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:"}},
            ]}]}),
            "messages[0].content[0].type",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
            "messages[0].content[0].text",
        ),
        (json!({"reasoning_effort": "huge"}), "reasoning_effort"),
        (json!({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}), "tools[0].type"),
        (
            json!({"tools": [{"type": "function", "function": {"name": ""}}]}),
            "tools[0].function.name",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": "perhaps"}), "tool_choice"),
        (
            json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}),
            "tool_choice.function.name",
        ),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
    ];
    for (more, param) in cases {
        let error = bed.error(CHAT, &with(says("hi"), more.clone()), 400).await;
        assert_eq!(error["param"], param, "{more} → {error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let error = bed.error(CHAT, &with(says("hi"), json!({"model": "gpt-9"})), 404).await;
    assert_eq!(error["code"], "model_not_found");
    let error = bed.error(CHAT, &says(&"x".repeat(9000)), 400).await;
    assert_eq!(error["code"], "context_length_exceeded");
}
