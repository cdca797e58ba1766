//! OpenAI's responses, streamed and not.

use crate::bed::{Bed, repeats};
use load::client::Connection;
use mock::{MockConfig, demo};
use serde_json::{Value, json};
use server::ServerConfig;
use server::openai::responses::types::ResponsesResponse;

const RESPONSES: &str = "/v1/responses";

async fn demo_bed() -> Bed {
    Bed::new(MockConfig { oracle: demo(), ..MockConfig::default() }).await
}

fn ask(input: impl Into<Value>, more: Value) -> Value {
    let mut body = json!({"input": input.into()});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn weather() -> Value {
    json!([{"type": "function", "name": "weather", "description": "The weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    }, "strict": true}])
}

/// Checks the order of events and returns the last response; the deltas must make its output.
fn checked(events: &[String]) -> Value {
    let events: Vec<Value> = events.iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    let kind = |i: usize| events[i]["type"].as_str().unwrap();
    assert_eq!((kind(0), kind(1)), ("response.created", "response.in_progress"));
    let mut items: Vec<Value> = Vec::new();
    let mut text = String::new();
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], i);
        match kind(i) {
            "response.output_item.added" => {
                assert_eq!(event["output_index"], items.len());
                text.clear();
            }
            "response.output_text.delta"
            | "response.reasoning_text.delta"
            | "response.function_call_arguments.delta" => text += event["delta"].as_str().unwrap(),
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(event["text"], text.as_str());
            }
            "response.function_call_arguments.done" => {
                assert_eq!(event["arguments"], text.as_str())
            }
            "response.output_item.done" => items.push(event["item"].clone()),
            _ => {}
        }
    }
    let last = events.last().unwrap()["response"].clone();
    assert_eq!(last["output"], Value::Array(items));
    last
}

/// The answer as one response; the stream must end with the same output.
async fn both(bed: &Bed, body: &Value) -> Value {
    let whole = bed.ok(RESPONSES, body).await;
    serde_json::from_value::<ResponsesResponse>(whole.clone()).unwrap();
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let last = checked(&bed.stream(RESPONSES, &streamed).await);
    for key in ["status", "incomplete_details", "tools", "text"] {
        assert_eq!(last[key], whole[key], "{key}");
    }
    let plain = |response: &Value| {
        let mut items = response["output"].clone();
        for item in items.as_array_mut().unwrap() {
            let item = item.as_object_mut().unwrap();
            assert!(item.remove("id").is_some());
            item.remove("call_id");
        }
        items
    };
    assert_eq!(plain(&last), plain(&whole));
    whole
}

#[tokio::test]
async fn text_reasoning_and_limits() {
    let bed = demo_bed().await;
    let whole = both(&bed, &ask("Grüße 世界", json!({"instructions": "Be brief."}))).await;
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("completed")));
    let part = &whole["output"][0]["content"][0];
    assert_eq!(part["type"], "output_text");
    assert!(part["text"].as_str().unwrap().starts_with("You said: “Grüße 世界”"));
    let usage = &whole["usage"];
    let sum = usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], sum);
    let cut = both(&bed, &ask("hi", json!({"max_output_tokens": 5}))).await;
    assert_eq!(cut["status"], "incomplete");
    assert_eq!(cut["incomplete_details"]["reason"], "max_output_tokens");
    let thought = both(&bed, &ask("please think", json!({}))).await;
    assert_eq!(thought["output"][0]["type"], "reasoning");
    assert_eq!(thought["output"][0]["content"][0]["text"], "They said: please think\n");
    assert_eq!(thought["output"][1]["content"][0]["text"], "I have thought about it.");
    let scored = both(&bed, &ask("hi", json!({"top_logprobs": 2, "max_output_tokens": 4}))).await;
    let list = scored["output"][0]["content"][0]["logprobs"].as_array().unwrap();
    assert_eq!((list.len(), list[0]["top_logprobs"].as_array().unwrap().len()), (4, 2));
}

#[tokio::test]
async fn tools_and_schemas() {
    let bed = demo_bed().await;
    let named = json!({"type": "function", "name": "weather"});
    for choice in [json!("auto"), json!("required"), named] {
        let whole =
            both(&bed, &ask("weather?", json!({"tools": weather(), "tool_choice": choice}))).await;
        let call = &whole["output"][0];
        assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("weather")));
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"city": "Paris"}));
    }
    let history = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ]);
    let told = both(&bed, &ask(history, json!({"tools": weather()}))).await;
    assert_eq!(told["output"][0]["content"][0]["text"], "The tool says: rain");
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let format =
        json!({"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": true}});
    let made = both(&bed, &ask("hi", json!({"text": format}))).await;
    assert_eq!(made["output"][0]["content"][0]["text"], "{\"a\":7}");
}

async fn request(bed: &Bed, method: &str, path: &str) -> (u16, Value) {
    let mut wire = Connection::open(&bed.target).await.unwrap();
    let head = wire.request(method, path, &[], b"").await.unwrap();
    let body = wire.body().await.unwrap();
    (head.status, serde_json::from_slice(&body).unwrap())
}

#[tokio::test]
async fn responses_are_kept_and_continued() {
    // Repeats the prompt, which shows the whole conversation.
    let bed = Bed::new(MockConfig { oracle: repeats(), ..MockConfig::default() }).await;
    for stream in [false, true] {
        let first = ask("First.", json!({"stream": stream, "instructions": "Only once."}));
        let id = match stream {
            false => bed.ok(RESPONSES, &first).await["id"].clone(),
            true => checked(&bed.stream(RESPONSES, &first).await)["id"].clone(),
        };
        let id = id.as_str().unwrap();
        let next = bed.ok(RESPONSES, &ask("Second.", json!({"previous_response_id": id}))).await;
        assert_eq!(next["previous_response_id"], id);
        let prompt = next["output"][0]["content"][0]["text"].as_str().unwrap();
        assert!(
            prompt.contains("user\nFirst.") && prompt.ends_with("user\nSecond.\nassistant\n"),
            "{prompt}"
        );
        assert!(
            prompt.contains("assistant\nsystem\nOnly once.") && !prompt.starts_with("system"),
            "{prompt}"
        );
        let path = format!("{RESPONSES}/{id}");
        let (status, kept) = request(&bed, "GET", &path).await;
        assert_eq!((status, &kept["id"]), (200, &json!(id)));
        assert_eq!(request(&bed, "DELETE", &path).await.1["deleted"], true);
        assert_eq!(request(&bed, "GET", &path).await.0, 404);
        let gone = ask("x", json!({"previous_response_id": id}));
        assert_eq!(bed.error(RESPONSES, &gone, 404).await["param"], "previous_response_id");
    }
    let apart = bed.ok(RESPONSES, &ask("x", json!({"store": false}))).await;
    let path = format!("{RESPONSES}/{}", apart["id"].as_str().unwrap());
    assert_eq!(request(&bed, "GET", &path).await.0, 404);
}

#[tokio::test]
async fn kept_responses_are_limited() {
    for (name, value, kept) in [("responses", 2, 2), ("responses_bytes", 5_000, 1)] {
        let mut config = crate::bed::config();
        config.limits.set(name, value).unwrap();
        let bed = Bed::with(config, MockConfig::default(), crate::bed::model()).await;
        let mut ids = Vec::new();
        for _ in 0..3 {
            ids.push(bed.ok(RESPONSES, &ask("x", json!({}))).await["id"].clone());
        }
        let mut found = 0;
        for (i, id) in ids.iter().enumerate() {
            let path = format!("{RESPONSES}/{}", id.as_str().unwrap());
            let (status, _) = request(&bed, "GET", &path).await;
            // The newest are kept.
            assert_eq!(status == 200, i >= 3 - kept, "{name}");
            found += usize::from(status == 200);
        }
        assert_eq!(found, kept);
    }
}

#[tokio::test]
async fn a_key_cannot_read_the_responses_of_another() {
    let config =
        ServerConfig { api_keys: vec!["alice".into(), "bob".into()], ..crate::bed::config() };
    let mut bed = Bed::with(config, MockConfig::default(), crate::bed::model()).await;
    let id = bed.ok(RESPONSES, &ask("secret", json!({}))).await["id"].clone();
    bed.target.key = Some("bob".into());
    bed.error(RESPONSES, &ask("x", json!({"previous_response_id": id})), 404).await;
}

#[tokio::test]
async fn errors_name_the_field() {
    let bed = demo_bed().await;
    for (body, param) in [
        (ask(json!([]), json!({})), "input"),
        (ask("x", json!({"background": true})), "background"),
        (ask("x", json!({"conversation": "c"})), "conversation"),
        (ask("x", json!({"truncation": "auto"})), "truncation"),
        (ask("x", json!({"tools": [{"type": "web_search"}]})), "tools[0].type"),
        (ask("x", json!({"tool_choice": {"type": "mcp"}})), "tool_choice"),
        (ask("x", json!({"include": ["file_search_call.results"]})), "include"),
        (ask("x", json!({"temperature": 3})), "temperature"),
        (
            ask(json!([{"role": "user", "content": [{"type": "input_image"}]}]), json!({})),
            "input[0].content[0].type",
        ),
        (ask(json!([{"type": "item_reference", "id": "x"}]), json!({})), "input[0].type"),
    ] {
        let error = bed.error(RESPONSES, &body, 400).await;
        assert_eq!(error["param"], param, "{body}");
    }
    let failing =
        Bed::new(MockConfig { fail_every: Some(1), oracle: repeats(), ..MockConfig::default() })
            .await;
    let events = failing.stream(RESPONSES, &ask("x", json!({"stream": true}))).await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["status"]),
        (&json!("response.failed"), &json!("failed"))
    );
}
