//! gpt-oss's messages on channels, over its own chat template: reasoning, text and calls, streamed and not.

use crate::bed::{Bed, config};
use crate::checkpoint::tokenizer_with;
use engine::request::{Request, Thinking};
use formats::chat::ChatTemplate;
use mock::MockConfig;
use serde_json::{Value, json};
use server::Model;
use server::answer::{Choice, ChoiceSetup, Delta, Reasoning, ToolFormat};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use text::{CheckpointText, TextModel};

const CHAT: &str = "/v1/chat/completions";
const TEMPLATE: &str =
    include_str!("../../../formats/tests/data/templates/openai-gpt-oss-120b.jinja");
const MARKS: [&str; 7] = [
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
];
const CALL: &str = "<|channel|>analysis<|message|>Let me look: é.<|end|><|start|>assistant\
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Zürich\"}\
    <|call|>and more";
const ANSWER: &str = "<|channel|>analysis<|message|>Why not?<|end|><|start|>assistant\
    <|channel|>final<|message|>Because. END here<|return|>";

fn text() -> CheckpointText {
    let template = ChatTemplate::new(TEMPLATE, BTreeMap::new()).unwrap();
    // Only the end of a whole answer stops the engine.
    CheckpointText::new(Arc::new(tokenizer_with(&MARKS, 7)), Some(template), vec![262], 263)
}

/// A server whose model always says the same, and what its engine was asked for.
async fn says(answer: &'static str) -> (Bed, Arc<Mutex<Vec<Request>>>) {
    let text = text();
    let (tools, reasoning) = (ToolFormat::of(&text), Reasoning::of(&text));
    let tokens = text.encode(answer, false, 1 << 10).unwrap();
    let model = Model { tools, reasoning, ..Model::new("gpt-oss", 4096, Arc::new(text)) };
    let asked: Arc<Mutex<Vec<Request>>> = Arc::default();
    let kept = asked.clone();
    let oracle = Arc::new(move |request: &Request, _| {
        kept.lock().unwrap().push(request.clone());
        tokens.clone()
    });
    let mock = MockConfig { oracle, vocab: 263, context: 4096, ..MockConfig::default() };
    (Bed::with(config(), mock, model).await, asked)
}

fn ask(more: Value) -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let mut ask = json!({
        "messages": [{"role": "user", "content": "What is it like?"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": city}}],
    });
    ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ask
}

/// Reasoning, text, calls and reason.
type Answer = (String, String, Vec<(String, String)>, String);

fn whole(answer: &Value) -> Answer {
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    let text = |key: &str| message[key].as_str().unwrap_or("").to_owned();
    let calls = message["tool_calls"].as_array().into_iter().flatten().map(|call| {
        let part = |key: &str| call["function"][key].as_str().unwrap().to_owned();
        (part("name"), part("arguments"))
    });
    let reason = choice["finish_reason"].as_str().unwrap().to_owned();
    (text("reasoning_content"), text("content"), calls.collect(), reason)
}

/// The same from a stream, with the number of pieces of arguments.
fn streamed(events: &[String]) -> (Answer, usize) {
    let (mut answer, mut pieces) = (Answer::default(), 0);
    for event in &events[..events.len() - 1] {
        let chunk: Value = serde_json::from_str(event).unwrap();
        for choice in chunk["choices"].as_array().unwrap() {
            let delta = &choice["delta"];
            answer.0.push_str(delta["reasoning_content"].as_str().unwrap_or(""));
            answer.1.push_str(delta["content"].as_str().unwrap_or(""));
            answer.3.push_str(choice["finish_reason"].as_str().unwrap_or(""));
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                if let Some(name) = call["function"]["name"].as_str() {
                    answer.2.push((name.into(), String::new()));
                }
                let more = call["function"]["arguments"].as_str().unwrap_or("");
                pieces += usize::from(!more.is_empty());
                answer.2.last_mut().unwrap().1.push_str(more);
            }
        }
    }
    (answer, pieces)
}

#[test]
fn messages_on_channels_are_detected() {
    let text = text();
    assert!(matches!(ToolFormat::of(&text), ToolFormat::Harmony(_)));
    let tags = Reasoning::of(&text).unwrap();
    assert_eq!(tags.open, "<|channel|>analysis<|message|>");
    // The tokens alone are not enough: another template may write other messages.
    let template = ChatTemplate::new("{{ messages[0].content }}", BTreeMap::new()).unwrap();
    let tokenizer = Arc::new(tokenizer_with(&MARKS, 7));
    let other = CheckpointText::new(tokenizer, Some(template), vec![262], 263);
    assert!(matches!(ToolFormat::of(&other), ToolFormat::Generic { .. }));
}

/// Without a server: what `run` and `chat` do with an answer.
#[test]
fn an_answer_is_read_by_what_the_chat_looks_like() {
    let text = text();
    let tokens = text.encode(ANSWER, false, 1 << 10).unwrap();
    let read = |prompt: &str| {
        let setup = ChoiceSetup::of_chat(|token| text.id_of(token), prompt, vec![]);
        let mut choice = Choice::new(text.detokenizer(), setup);
        let mut out = Vec::new();
        let ended = tokens.iter().position(|token| choice.push(*token, &mut out));
        choice.finish(false, &mut out);
        let (mut thought, mut said) = (String::new(), String::new());
        for delta in out {
            match delta {
                Delta::Reasoning(piece) => thought += &piece,
                Delta::Text(piece) => said += &piece,
                other => panic!("{other:?}"),
            }
        }
        (thought, said, ended.is_some())
    };
    let rendered = "<|start|>user<|message|>Why?<|end|><|start|>assistant";
    assert_eq!(read(rendered), ("Why not?".into(), "Because. END here".into(), true));
    // Another template: its answers have no messages.
    let (thought, said, ended) = read("User: Why?\nAssistant:");
    assert!(thought.is_empty() && said.contains("Because") && !ended, "{said}");
}

#[tokio::test]
async fn channels_become_reasoning_text_and_calls() {
    let call = [("weather".to_owned(), "{\"city\": \"Zürich\"}".to_owned())];
    let said = |thought: &str, text: &str, calls: &[(String, String)], reason: &str| {
        (thought.to_owned(), text.to_owned(), calls.to_vec(), reason.to_owned())
    };
    let both = said("Why not?", "Because. END here", &[], "stop");
    let cut = said("Why not?", "Because. ", &[], "stop");
    let made = said("Let me look: é.", "", &call, "tool_calls");
    // Without functions there is nothing to call.
    let text = said("Let me look: é.", "{\"city\": \"Zürich\"}", &[], "stop");
    for (answer, more, expected) in [
        (ANSWER, json!({}), &both),
        (ANSWER, json!({"stop": "END"}), &cut),
        (ANSWER, json!({"stop": "final"}), &both),
        (CALL, json!({}), &made),
        (CALL, json!({"tool_choice": "none"}), &text),
    ] {
        let (bed, _) = says(answer).await;
        let found = bed.ok(CHAT, &ask(more.clone())).await;
        assert_eq!(&whole(&found), expected, "{more}");
        let thought = found["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64();
        assert_eq!(thought, Some(expected.0.len() as u64), "a token is a byte");
        let mut body = ask(more);
        body["stream"] = true.into();
        let (found, pieces) = streamed(&bed.stream(CHAT, &body).await);
        assert_eq!(&found, expected);
        assert!(expected.2.is_empty() || pieces > 10, "arguments come as they are written");
        bed.until("nothing is left", || bed.link.inflight() == 0).await;
    }
}

#[tokio::test]
async fn a_restricted_answer_begins_in_its_message() {
    let (bed, asked) = says("{\"a\": 1}").await;
    let body = ask(json!({"response_format": {"type": "json_object"}, "tools": null}));
    let found = bed.ok(CHAT, &body).await;
    assert_eq!(found["choices"][0]["message"]["content"], "{\"a\": 1}");
    let text = text();
    let encode = |words: &str| text.encode(words, false, 64).unwrap();
    let header = encode("<|start|>assistant<|channel|>final<|message|>");
    assert!(asked.lock().unwrap()[0].prompt.ends_with(&header));
    // With reasoning the engine opens and closes it.
    asked.lock().unwrap().clear();
    let mut thinks = body.clone();
    thinks["thinking_token_budget"] = 9.into();
    bed.ok(CHAT, &thinks).await;
    let request = asked.lock().unwrap()[0].clone();
    assert!(request.prompt.ends_with(&encode("<|start|>assistant")));
    let open = encode("<|channel|>analysis<|message|>").into();
    let close = encode("<|end|><|start|>assistant<|channel|>final<|message|>").into();
    assert_eq!(request.sampling.thinking, Some(Thinking { open, close, budget: 9 }));
}

#[tokio::test]
async fn a_required_call_is_parsed_from_the_restricted_answer() {
    let (bed, _) = says("[{\"name\": \"weather\", \"parameters\": {\"city\": \"Bern\"}}]").await;
    let found = whole(&bed.ok(CHAT, &ask(json!({"tool_choice": "required"}))).await);
    let call = ("weather".to_owned(), "{\"city\": \"Bern\"}".to_owned());
    assert_eq!(found, (String::new(), String::new(), vec![call], "tool_calls".to_owned()));
}

/// The reasoning before a call goes back to the model as its template wants it, and so do the call and its result.
#[tokio::test]
async fn a_conversation_with_a_call_is_rendered() {
    let (bed, asked) = says(ANSWER).await;
    let messages = json!([
        {"role": "user", "content": "What is it like?"},
        {"role": "assistant", "reasoning_content": "I look.", "tool_calls": [{
            "id": "1", "type": "function",
            "function": {"name": "weather", "arguments": "{\"city\": \"Bern\"}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]);
    bed.ok(CHAT, &ask(json!({"messages": messages, "reasoning_effort": "high"}))).await;
    let text = text();
    let prompt = asked.lock().unwrap()[0].prompt.clone();
    let bytes: Vec<u8> =
        prompt.iter().flat_map(|token| text.token_bytes(*token).unwrap()).collect();
    let prompt = String::from_utf8(bytes).unwrap();
    for part in [
        "Reasoning: high",
        "type weather = (_: {",
        "<|start|>assistant<|channel|>analysis<|message|>I look.<|end|>",
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{\"city\": \"Bern\"}<|call|>",
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>\"rain\"<|end|>",
    ] {
        assert!(prompt.contains(part), "{part} is not in\n{prompt}");
    }
    assert!(prompt.ends_with("<|start|>assistant"));
}
