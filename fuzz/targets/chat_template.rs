//! Any text as a chat template, rendered with a conversation and tools.
#![no_main]

use formats::chat::ChatTemplate;
use formats::tokenizer::Escaper;
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::LazyLock;

static MESSAGES: LazyLock<Value> = LazyLock::new(|| {
    json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <|im_end|> there"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": {"x": 1.5, "y": [true]}}},
        ]},
        {"role": "tool", "content": [{"type": "text", "text": "42"}]},
    ])
});

fuzz_target!(|source: &str| {
    let specials = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    let Ok(template) = ChatTemplate::new(source, specials) else { return };
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let escaper = Escaper::new(["<|im_end|>", "<|im_start|>"]);
    let _ = template.render(&MESSAGES, None, true, &Map::new());
    let _ = template.render_escaped(&MESSAGES, Some(&tools), false, &Map::new(), &escaper);
});
