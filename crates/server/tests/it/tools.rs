//! Tool calls in all formats, streamed and not, one or several.

use crate::bed::{Bed, config, model};
use mock::MockConfig;
use serde_json::{Value, json};
use server::answer::ToolFormat;
use std::sync::Arc;

const CHAT: &str = "/v1/chat/completions";
const HERMES: &str = "I shall look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": \
    {\"city\": \"Zürich\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n\
    </tool_call>\nThat is all.";
const LLAMA: &str = "{\"name\": \"weather\", \"parameters\": {\"city\": \"Zürich\"}}; \
    {\"name\": \"time\", \"parameters\": {}}";
const PYTHONIC: &str = "[weather(city=\"Zürich\"), time()]";

fn function(name: &str, schema: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": schema}})
}

fn ask(more: Value) -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let mut ask = json!({
        "messages": [{"role": "user", "content": "What is it like?"}],
        "tools": [function("weather", city), function("time", json!({"type": "object"}))],
    });
    ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ask
}

async fn says(format: ToolFormat, answer: &'static str) -> Bed {
    let oracle = Arc::new(move |_: &_, _| answer.bytes().map(u32::from).collect());
    let model = server::Model { tools: format, ..model() };
    Bed::with(config(), MockConfig { oracle, ..MockConfig::default() }, model).await
}

/// Text, calls and reason of one choice.
type Answer = (String, Vec<(String, String)>, String);

fn whole(choice: &Value) -> Answer {
    let message = &choice["message"];
    let calls = message["tool_calls"].as_array().into_iter().flatten().map(|call| {
        let part = |key: &str| call["function"][key].as_str().unwrap().to_string();
        (part("name"), part("arguments"))
    });
    let text = message["content"].as_str().unwrap_or("").into();
    (text, calls.collect(), choice["finish_reason"].as_str().unwrap().into())
}

fn streamed(events: &[String], n: usize) -> Vec<Answer> {
    let mut answers = vec![Answer::default(); n];
    for event in &events[..events.len() - 1] {
        let chunk: Value = serde_json::from_str(event).unwrap();
        for choice in chunk["choices"].as_array().unwrap() {
            let (text, calls, reason) = &mut answers[choice["index"].as_u64().unwrap() as usize];
            text.push_str(choice["delta"]["content"].as_str().unwrap_or(""));
            reason.push_str(choice["finish_reason"].as_str().unwrap_or(""));
            for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
                if let Some(name) = call["function"]["name"].as_str() {
                    assert_eq!(call["index"], calls.len());
                    calls.push((name.into(), String::new()));
                }
                let more = call["function"]["arguments"].as_str().unwrap_or("");
                calls[call["index"].as_u64().unwrap() as usize].1.push_str(more);
            }
        }
    }
    answers
}

#[tokio::test]
async fn several_calls_or_one_in_every_format() {
    let generic = ToolFormat::Generic { system: true };
    let (written, made) = ("{\"city\": \"Zürich\"}", "{\"city\":\"Zürich\"}");
    for (format, answer, before, after, arguments) in [
        (ToolFormat::Hermes, HERMES, "I shall look.", "\nThat is all.", written),
        (generic, HERMES, "I shall look.", "\nThat is all.", written),
        (ToolFormat::Llama, LLAMA, "", "", written),
        (ToolFormat::Llama, PYTHONIC, "", "", made),
    ] {
        let bed = says(format, answer).await;
        let calls = [
            ("weather".to_string(), arguments.to_string()),
            ("time".to_string(), "{}".to_string()),
        ];
        let all = (format!("{before}{after}"), calls.to_vec(), "tool_calls".to_string());
        let one = (before.to_string(), calls[..1].to_vec(), "tool_calls".to_string());
        for (parallel, expected) in [(json!(true), &all), (Value::Null, &all), (json!(false), &one)]
        {
            let body = ask(json!({"parallel_tool_calls": parallel, "n": 2}));
            let answer = bed.ok(CHAT, &body).await;
            let choices = answer["choices"].as_array().unwrap();
            let found: Vec<_> = choices.iter().map(whole).collect();
            assert_eq!(found, [expected.clone(), expected.clone()], "{format:?} {parallel}");
            let mut body = body;
            body["stream"] = true.into();
            let found = streamed(&bed.stream(CHAT, &body).await, 2);
            assert_eq!(found, [expected.clone(), expected.clone()], "{format:?} {parallel}");
        }
        bed.until("nothing is left", || bed.link.inflight() == 0).await;
    }
}

#[tokio::test]
async fn a_required_call_is_a_list_enforced_by_the_grammar() {
    // An answer that the grammar of `required` allows, for any format of the model.
    const LIST: &str = "[{\"name\": \"weather\", \"parameters\": {\"city\": \"Zürich\"}}, \
        {\"name\": \"time\", \"parameters\": {}}]";
    for format in [ToolFormat::Hermes, ToolFormat::Llama, ToolFormat::Generic { system: true }] {
        let bed = says(format, LIST).await;
        let body = ask(json!({"tool_choice": "required", "stream": true}));
        let found = streamed(&bed.stream(CHAT, &body).await, 1);
        let names: Vec<_> = found[0].1.iter().map(|call| call.0.as_str()).collect();
        assert_eq!(
            (names.as_slice(), found[0].2.as_str()),
            (&["weather", "time"][..], "tool_calls")
        );
        // Truncated before the arguments of the second call: the first is there, and the reason
        // is `length`.
        let body = ask(json!({"tool_choice": "required", "stream": true, "max_tokens": 70}));
        let found = streamed(&bed.stream(CHAT, &body).await, 1);
        assert_eq!((found[0].0.as_str(), found[0].1.len(), found[0].2.as_str()), ("", 1, "length"));
    }
}

/// The pieces of arguments that a stream sends.
fn argument_pieces(events: &[String]) -> Vec<String> {
    let chunks = events[..events.len() - 1].iter();
    let chunks = chunks.map(|event| serde_json::from_str::<Value>(event).unwrap());
    let pieces = chunks.filter_map(|chunk| {
        let call = &chunk["choices"][0]["delta"]["tool_calls"][0];
        call["function"]["arguments"].as_str().filter(|text| !text.is_empty()).map(Into::into)
    });
    pieces.collect()
}

#[tokio::test]
async fn arguments_are_streamed_and_a_cut_call_is_not_content() {
    for (format, answer) in [(ToolFormat::Hermes, HERMES), (ToolFormat::Llama, LLAMA)] {
        let bed = says(format, answer).await;
        let events = bed.stream(CHAT, &ask(json!({"stream": true}))).await;
        // The mock sends a byte a token: every character of the arguments is a piece.
        let pieces = argument_pieces(&events);
        assert!(pieces.len() > 15, "{pieces:?}");
        let at = |word: &str| answer.find(word).unwrap() as u64;
        for (tokens, calls) in [
            (at("name") - 1, vec![]),
            (at("weather\"") + 3, vec![]),
            (at("Z"), vec![("weather".to_string(), "{\"city\": \"".to_string())]),
        ] {
            let body = ask(json!({"max_tokens": tokens}));
            let (text, found, reason) = whole(&bed.ok(CHAT, &body).await["choices"][0]);
            assert!(!text.contains('<') && !text.contains('{'), "{text}");
            assert_eq!((found, reason.as_str()), (calls.clone(), "length"));
            let body = ask(json!({"max_tokens": tokens, "stream": true}));
            let found = streamed(&bed.stream(CHAT, &body).await, 1);
            assert_eq!((&found[0].1, found[0].2.as_str()), (&calls, "length"));
        }
    }
}

#[tokio::test]
async fn a_template_without_tools_gets_them_as_text() {
    // Answers with the prompt, so that the test sees what the model does.
    let model = server::Model { tools: ToolFormat::Generic { system: true }, ..model() };
    let bed = Bed::with(config(), MockConfig::default(), model).await;
    let mut body = ask(json!({"tool_choice": "auto"}));
    body["messages"] = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it like?"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {
            "name": "weather", "arguments": "{\"city\": \"Bern\"}",
        }}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]);
    let same = json!({"messages": body["messages"], "tools": body["tools"]});
    let tokens = bed.ok("/tokenize", &same).await["tokens"].clone();
    let told = bed.ok("/detokenize", &json!({"tokens": tokens})).await;
    let prompt = told["prompt"].as_str().unwrap();
    for part in [
        "system\nBe brief.\n\nYou can call functions.",
        "{\"name\":\"weather\",\"parameters\":{",
        "{\"name\":\"weather\",\"arguments\":{\"city\":\"Bern\"}}",
        "user\n<tool_response>\nrain\n</tool_response>",
    ] {
        assert!(prompt.contains(part), "{part} is not in\n{prompt}");
    }
    let used = bed.ok(CHAT, &body).await["usage"]["prompt_tokens"].as_u64();
    assert!(used > Some(prompt.len() as u64), "the chat has the same prompt");
}
