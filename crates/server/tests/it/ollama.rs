//! Ollama's API: chat, generate, embed and tags.

use crate::bed::{Bed, repeats};
use mock::{MockConfig, demo};
use serde_json::{Value, json};

async fn demo_bed() -> Bed {
    Bed::new(MockConfig { oracle: demo(), embedding: 8, ..MockConfig::default() }).await
}

/// The lines of a stream.
async fn lines(bed: &Bed, path: &str, body: &Value) -> Vec<Value> {
    let (head, text) = bed.try_post(path, body.to_string().as_bytes()).await.unwrap();
    assert_eq!(head.status, 200);
    assert_eq!(head.header("content-type"), Some("application/x-ndjson"));
    let text = String::from_utf8(text).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ask(text: &str, more: Value) -> Value {
    let mut body = json!({"model": "mock:latest", "messages": [{"role": "user", "content": text}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn chat_streamed_and_not() {
    let bed = demo_bed().await;
    let whole = bed.ok("/api/chat", &ask("Grüße", json!({"stream": false}))).await;
    let text = whole["message"]["content"].as_str().unwrap();
    assert!(text.starts_with("You said: “Grüße”"), "{text}");
    assert_eq!((&whole["done"], &whole["done_reason"]), (&json!(true), &json!("stop")));
    assert_eq!(whole["eval_count"], text.len());
    assert!(
        whole["prompt_eval_count"].as_u64() > Some(5) && whole["total_duration"].as_u64() > Some(0)
    );
    let streamed = lines(&bed, "/api/chat", &ask("Grüße", json!({}))).await;
    let (last, parts) = streamed.split_last().unwrap();
    let joined: String =
        parts.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(joined, text);
    assert!(parts.iter().all(|line| line["done"] == false) && parts.len() > 10);
    assert_eq!((&last["done"], &last["eval_count"]), (&json!(true), &whole["eval_count"]));
    let cut = ask(
        "hi",
        json!({"stream": false, "options": {"num_predict": 4, "temperature": 0, "num_ctx": 100}}),
    );
    let cut = bed.ok("/api/chat", &cut).await;
    assert_eq!((&cut["done_reason"], &cut["eval_count"]), (&json!("length"), &json!(4)));
    let thought =
        bed.ok("/api/chat", &ask("please think", json!({"stream": false, "think": true}))).await;
    assert_eq!(thought["message"]["thinking"], "They said: please think\n");
    let scored = ask(
        "hi",
        json!({"stream": false, "logprobs": true, "top_logprobs": 2, "options": {"num_predict": 3}}),
    );
    let list = bed.ok("/api/chat", &scored).await["logprobs"].clone();
    assert_eq!(
        (list.as_array().unwrap().len(), list[0]["top_logprobs"].as_array().unwrap().len()),
        (3, 2)
    );
}

#[tokio::test]
async fn tools_and_formats() {
    let bed = demo_bed().await;
    let tools = json!([{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    }}}]);
    let call = json!({"function": {"name": "weather", "arguments": {"city": "Paris"}}});
    let body = ask("weather?", json!({"tools": tools, "stream": false}));
    assert_eq!(bed.ok("/api/chat", &body).await["message"]["tool_calls"], json!([call]));
    let streamed = lines(&bed, "/api/chat", &ask("weather?", json!({"tools": tools}))).await;
    let calls: Vec<&Value> = streamed
        .iter()
        .map(|line| &line["message"]["tool_calls"])
        .filter(|calls| calls.is_array())
        .collect();
    assert_eq!(calls, [&json!([call])]);
    let mut told = body.clone();
    told["messages"].as_array_mut().unwrap().extend([
        json!({"role": "assistant", "content": "", "tool_calls": [call]}),
        json!({"role": "tool", "tool_name": "weather", "content": "rain"}),
    ]);
    assert_eq!(bed.ok("/api/chat", &told).await["message"]["content"], "The tool says: rain");
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let made = bed.ok("/api/chat", &ask("hi", json!({"format": schema, "stream": false}))).await;
    assert_eq!(made["message"]["content"], "{\"a\":7}");
    let made = bed.ok("/api/chat", &ask("hi", json!({"format": "json", "stream": false}))).await;
    assert!(
        serde_json::from_str::<Value>(made["message"]["content"].as_str().unwrap())
            .unwrap()
            .is_object()
    );
}

#[tokio::test]
async fn generate_with_and_without_a_template() {
    let bed = Bed::new(MockConfig { oracle: repeats(), ..MockConfig::default() }).await;
    let body = json!({"prompt": "hi", "system": "Be brief.", "stream": false});
    let whole = bed.ok("/api/generate", &body).await;
    assert_eq!(whole["response"], "system\nBe brief.\nuser\nhi\nassistant\n");
    let raw = json!({"prompt": "just this", "raw": true, "stream": false});
    assert_eq!(bed.ok("/api/generate", &raw).await["response"], "just this");
    let streamed = lines(&bed, "/api/generate", &json!({"prompt": "just this", "raw": true})).await;
    let joined: String = streamed.iter().map(|line| line["response"].as_str().unwrap()).collect();
    assert_eq!(joined, "just this");
    for (path, body) in [
        ("/api/generate", json!({"model": "mock"})),
        ("/api/chat", json!({"model": "mock", "messages": []})),
    ] {
        assert_eq!(bed.ok(path, &body).await["done_reason"], "load");
    }
}

#[tokio::test]
async fn embeddings_and_tags() {
    let bed = demo_bed().await;
    let made = bed.ok("/api/embed", &json!({"model": "mock", "input": ["ab", "b"]})).await;
    assert_eq!(
        (made["embeddings"].as_array().unwrap().len(), &made["prompt_eval_count"]),
        (2, &json!(3))
    );
    let openai = bed.ok("/v1/embeddings", &json!({"input": "ab"})).await;
    assert_eq!(made["embeddings"][0], openai["data"][0]["embedding"]);
    let long = "x".repeat(9000);
    let cut = bed.ok("/api/embed", &json!({"input": long})).await;
    assert_eq!(cut["prompt_eval_count"], 8191);
    let (status, answer) = bed.post("/api/embed", &json!({"input": long, "truncate": false})).await;
    assert!(status == 400 && answer["error"].is_string(), "{answer}");
    let (_, tags) = bed.get("/api/tags").await;
    let tags: Value = serde_json::from_slice(&tags).unwrap();
    assert_eq!(tags["models"][0]["model"], "mock");
    assert!(tags["models"][0]["modified_at"].as_str().unwrap().ends_with('Z'));
}

#[tokio::test]
async fn errors_have_ollamas_format() {
    let bed = demo_bed().await;
    for (path, body, status, part) in [
        ("/api/chat", ask("x", json!({"model": "llama3"})), 404, "llama3"),
        ("/api/chat", ask("x", json!({"format": 3})), 400, "format"),
        ("/api/chat", ask("x", json!({"options": {"mirostat": 2}})), 400, "mirostat"),
        ("/api/chat", ask("x", json!({"options": {"temperature": 9}})), 400, "temperature"),
        (
            "/api/chat",
            json!({"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]}),
            400,
            "text only",
        ),
        ("/api/generate", json!({"prompt": "x", "template": "{{ .Prompt }}"}), 400, "template"),
        ("/api/generate", json!({"prompt": "x", "suffix": "y"}), 400, "suffix"),
        ("/api/nothing", json!({}), 404, "/api/nothing"),
    ] {
        let (found, answer) = bed.post(path, &body).await;
        assert_eq!(found, status, "{answer}");
        assert!(answer["error"].as_str().unwrap().contains(part), "{answer}");
    }
    let failing =
        Bed::new(MockConfig { fail_every: Some(1), oracle: repeats(), ..MockConfig::default() })
            .await;
    let streamed = lines(&failing, "/api/chat", &ask("x", json!({}))).await;
    assert!(streamed.last().unwrap()["error"].is_string());
}
