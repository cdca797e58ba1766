//! Schemas that once crashed the process or blocked every stream.

use crate::bed::{Bed, config, model};
use mock::{MockConfig, demo};
use serde_json::{Map, Value, json};
use server::{Limits, Model, ServerConfig};

const CHAT: &str = "/v1/chat/completions";

fn chain(links: usize, link: impl Fn(Value) -> Value) -> Value {
    let name = |i: usize| json!({"$ref": format!("#/$defs/d{i}")});
    let mut defs: Map<String, Value> =
        (0..links).map(|i| (format!("d{i}"), link(name(i + 1)))).collect();
    defs.insert(format!("d{links}"), json!({"type": "string"}));
    json!({"$ref": "#/$defs/d0", "$defs": defs})
}

fn properties(count: usize, required: bool) -> Value {
    let names: Vec<String> = (0..count).map(|i| format!("p{i}")).collect();
    let all: Map<String, Value> =
        names.iter().map(|name| (name.clone(), json!({"type": "string"}))).collect();
    let required = if required { names } else { Vec::new() };
    json!({"type": "object", "properties": all, "required": required})
}

fn hostile() -> Vec<Value> {
    let patterns: Map<String, Value> =
        (0..400).map(|i| (format!("^p{i}[a-z]+x$"), json!({"type": "string"}))).collect();
    vec![
        chain(594, |next| next),
        chain(336, |next| json!({"allOf": [next]})),
        chain(289, |next| json!({"anyOf": [next]})),
        chain(277, |next| json!({"type": "array", "items": next})),
        properties(4234, true),
        properties(5000, false),
        json!({"type": "object", "patternProperties": patterns}),
        json!({"type": "string", "pattern": "(a|b)".repeat(5000)}),
        json!({"$ref": "#"}),
        json!({"$ref": "#/nowhere"}),
        json!({"type": "pear"}),
        json!({"type": "string", "pattern": "(?=a)"}),
        json!({"type": "string", "pattern": "["}),
    ]
}

fn body(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn hostile_schemas_get_short_errors() {
    // Tools are part of the prompt and need a large context.
    let mock = MockConfig { context: 1 << 20, ..MockConfig::default() };
    let roomy = Model { context: 1 << 20, ..model() };
    let bed = Bed::with(config(), mock, roomy).await;
    for schema in hostile() {
        let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
        let named = json!({"type": "function", "function": {"name": "f"}});
        for (param, extra) in [
            ("response_format", json!({"response_format": format})),
            ("tools", json!({"tools": [tool], "tool_choice": "required"})),
            ("tools", json!({"tools": [tool], "tool_choice": named})),
        ] {
            if param == "tools" && schema == json!({"$ref": "#"}) {
                // Inside a call this schema compiles but never ends: the answer fails, not the
                // request.
                continue;
            }
            let (status, answer) = bed.post(CHAT, &body(extra)).await;
            let error = &answer["error"];
            assert_eq!(status, 400, "{answer}");
            let shown = error["param"].as_str().unwrap_or_default();
            // An error found before compilation names the field more precisely.
            assert!(shown.starts_with(param), "{answer}");
            let message = error["message"].as_str().unwrap();
            let plain = !message.contains('\n') && message.len() < 400;
            assert!(plain && !message.contains("device"), "{message}");
        }
    }
    // The server still works.
    let (status, answer) = bed.post(CHAT, &body(json!({}))).await;
    assert_eq!(status, 200, "{answer}");
}

#[tokio::test]
async fn streams_go_on_while_schemas_are_compiled() {
    let limits = Limits { grammar_ms: 1, ..Limits::default() };
    let config = ServerConfig { limits, ..config() };
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    // Few compilations finish within a millisecond: the others are refused, and the server keeps
    // running.
    let mut refused = 0;
    for i in 0..8 {
        let schema = properties(400 + i, false);
        let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
        let (status, answer) = bed.post(CHAT, &body(json!({"response_format": format}))).await;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        refused += u32::from(status == 400 && message.contains("1 ms to compile"));
        assert!([200, 400, 503].contains(&status), "{answer}");
    }
    assert!(refused > 0);
}

#[tokio::test]
async fn a_schema_is_compiled_once() {
    let bed = Bed::new(MockConfig { oracle: demo(), ..MockConfig::default() }).await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}},
        "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    for _ in 0..20 {
        let (status, answer) =
            bed.post(CHAT, &body(json!({"response_format": format.clone()}))).await;
        assert_eq!(status, 200, "{answer}");
        let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(content).unwrap();
        assert!(value["a"].is_i64(), "{content}");
    }
}
