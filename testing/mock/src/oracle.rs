//! The answers of the mock.

use engine::request::{Request, Token};
use grammar::{Compiled, Grammar};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use text::TextModel;
use text::bytes::ByteText;

/// Returns the complete answer of a choice; called when the request is admitted.
pub type Oracle = Arc<dyn Fn(&Request, u32) -> Vec<Token> + Send + Sync>;

/// Repeats the prompt, token by token.
pub fn echo() -> Oracle {
    Arc::new(|request, _| request.prompt.to_vec())
}

/// Answers like a small model over [`ByteText`]: calls the first offered tool, fills a required
/// schema, reasons if the prompt says "think", and otherwise repeats the last message with a note.
pub fn demo() -> Oracle {
    Arc::new(|request, choice| {
        let prompt = ByteText.decode(&request.prompt);
        let text = answer(request, &prompt, choice);
        text.bytes().map(Token::from).collect()
    })
}

fn answer(request: &Request, prompt: &str, choice: u32) -> String {
    match request.sampling.grammar.as_ref().map(Compiled::source) {
        Some(Grammar::JsonSchema(schema)) => {
            let schema: Value = serde_json::from_str(schema).unwrap_or(Value::Null);
            return example(&schema, &schema, 0).to_string();
        }
        Some(Grammar::JsonObject) => return json!({"answer": 42, "sure": true}).to_string(),
        Some(Grammar::Regex(_) | Grammar::Lark(_)) | None => {}
    }
    let said = last_message(prompt, "user\n");
    let result = last_message(prompt, "tool\n");
    if let Some(tool) = first_tool(prompt) {
        if result.is_empty() {
            let function = &tool["function"];
            let arguments = example(&function["parameters"], &function["parameters"], 0);
            let call = json!({"name": function["name"], "arguments": arguments});
            return format!("<tool_call>\n{call}\n</tool_call>");
        }
        return format!("The tool says: {result}");
    }
    if said.contains("think") {
        return format!("<think>\nThey said: {said}\n</think>\n\nI have thought about it.");
    }
    if said.is_empty() {
        return " and so on, once more from the beginning.".into();
    }
    let again = if choice > 0 { " (said differently)" } else { "" };
    format!(
        "You said: “{said}”{again}.\n\nThis is the mock: no model runs, but everything else is \
         real. Your message went through the template, the tokenizer, the queue, the engine's \
         thread and this stream, one token at a time. A step of a real model would replay a \
         recorded graph here; the strip beside this chat shows which bucket it used, and how many \
         of its rows were padding. Da capo al fine. 🎼"
    )
}

fn last_message<'a>(prompt: &'a str, role: &str) -> &'a str {
    // Decoded text has no special tokens: a message starts with a line that names its role.
    let mut found = "";
    let mut rest = prompt;
    while let Some(at) = rest.find(role) {
        let body = &rest[at + role.len()..];
        let end = ["\nassistant\n", "\nuser\n", "\ntool\n", "\nsystem\n"]
            .iter()
            .filter_map(|mark| body.find(mark))
            .min();
        found = &body[..end.unwrap_or(body.len())];
        rest = &body[found.len()..];
    }
    found
}

fn first_tool(prompt: &str) -> Option<Value> {
    let (_, tools) = prompt.split_once("<tools>\n")?;
    serde_json::from_str(tools.lines().next()?).ok()
}

/// A value that satisfies a simple schema.
fn example(schema: &Value, root: &Value, depth: usize) -> Value {
    if depth > 16 {
        return Value::Null;
    }
    let go = |schema: &Value| example(schema, root, depth + 1);
    if let Some(path) = schema["$ref"].as_str() {
        return root.pointer(path.trim_start_matches('#')).map_or(Value::Null, go);
    }
    for key in ["const", "default"] {
        if let Some(value) = schema.get(key) {
            return value.clone();
        }
    }
    for key in ["enum", "anyOf", "oneOf", "allOf"] {
        if let Some(first) = schema[key].as_array().and_then(|list| list.first()) {
            return if key == "enum" { first.clone() } else { go(first) };
        }
    }
    let kind = schema["type"].as_str().or_else(|| schema["type"][0].as_str());
    match kind {
        Some("string") => "Paris".into(),
        Some("integer") => schema["minimum"].as_i64().unwrap_or(0).max(7).into(),
        Some("number") => json!(schema["minimum"].as_f64().unwrap_or(0.0).max(7.5)),
        Some("boolean") => true.into(),
        Some("null") => Value::Null,
        Some("array") => {
            let least = schema["minItems"].as_u64().unwrap_or(0).clamp(1, 8);
            (0..least).map(|_| go(&schema["items"])).collect()
        }
        _ => {
            let fields = schema["properties"].as_object();
            let fields = fields.into_iter().flatten();
            Value::Object(fields.map(|(k, v)| (k.clone(), go(v))).collect::<Map<_, _>>())
        }
    }
}
