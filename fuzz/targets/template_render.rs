//! Any template with any messages and variables: a template, a zero byte, JSON of messages, a zero
//! byte, JSON of variables. Missing parts have defaults.
#![no_main]

use formats::chat::ChatTemplate;
use formats::tokenizer::Escaper;
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

fuzz_target!(|input: &str| {
    let mut parts = input.split('\0');
    let source = parts.next().unwrap_or_default();
    let mut json = || parts.next().and_then(|part| serde_json::from_str::<Value>(part).ok());
    let messages = json().unwrap_or_else(|| {
        json!([{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": null}])
    });
    let extra = match json() {
        Some(Value::Object(extra)) => extra,
        _ => Map::from_iter([("x".to_owned(), json!({"a": [1, 2.5, "text"], "b": null}))]),
    };
    let specials = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    let template = match ChatTemplate::new(source, specials) {
        Ok(template) => template,
        Err(error) => return one_line(&error),
    };
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let escaper = Escaper::new(["<|im_end|>", "<|im_start|>"]);
    match template.render(&messages, None, true, &extra) {
        Ok(text) => assert!(text.len() <= formats::limits::RENDERED_BYTES),
        Err(error) => one_line(&error),
    }
    let escaped = template.render_escaped(&messages, Some(&tools), false, &extra, &escaper);
    if let Err(error) = escaped {
        one_line(&error);
    }
});

fn one_line(error: &formats::Error) {
    let line = error.to_string();
    assert!(!line.contains('\n') && line.len() < 2_000, "{line}");
}
