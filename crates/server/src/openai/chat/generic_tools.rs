//! Tools for a model whose chat template shows none: they are described in a system message, and
//! earlier calls and results become text in the same format.

use super::types::Tool;
use serde_json::{Value, json};

/// Messages for a template without tools. `system`: the template shows system messages; else the
/// description goes into the first message of the user.
pub(super) fn messages(messages: Vec<Value>, tools: Option<&[Tool]>, system: bool) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    let mut after_result = false;
    for message in messages {
        let result = message["role"] == "tool";
        let message = if result { shown_result(&message) } else { shown_calls(message) };
        match out.last_mut().filter(|_| result && after_result) {
            // Results of one turn are one message, because many templates require that roles
            // alternate.
            Some(last) => append(last, "\n", content(&message)),
            None => out.push(message),
        }
        after_result = result;
    }
    let Some(tools) = tools else { return out };
    let text = description(tools);
    let first = if system { "system" } else { "user" };
    match out.iter_mut().find(|message| message["role"] == first) {
        Some(message) if system => append(message, "\n\n", &text),
        Some(message) => {
            let said = content(message).to_string();
            message["content"] = format!("{text}\n\n{said}").into();
        }
        None => out.insert(0, json!({"role": first, "content": text})),
    }
    out
}

fn content(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

fn append(message: &mut Value, between: &str, text: &str) {
    let before = content(message);
    let between = if before.is_empty() { "" } else { between };
    message["content"] = format!("{before}{between}{text}").into();
}

/// What the model is told about the functions and the format of calls.
fn description(tools: &[Tool]) -> String {
    let mut text = String::from(
        "You can call functions. Each line between the tags describes one:\n<tools>\n",
    );
    for tool in tools {
        text.push_str(&json!(tool.function).to_string());
        text.push('\n');
    }
    text.push_str(
        "</tools>\nTo call a function, write its name and its arguments as JSON between tags, once \
         for each call:\n<tool_call>\n{\"name\": \"the name\", \"arguments\": {\"the argument\": \
         \"its value\"}}\n</tool_call>\nThe result follows between <tool_response> tags. If no \
         function helps, answer without a call.",
    );
    text
}

/// A message of the assistant with its calls as text.
fn shown_calls(mut message: Value) -> Value {
    let Some(Value::Array(calls)) = message.as_object_mut().and_then(|m| m.remove("tool_calls"))
    else {
        return message;
    };
    for call in calls {
        let call = json!({
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        });
        append(&mut message, "\n", &format!("<tool_call>\n{call}\n</tool_call>"));
    }
    message
}

/// A tool's result as a message of the user.
fn shown_result(message: &Value) -> Value {
    let text = content(message);
    json!({"role": "user", "content": format!("<tool_response>\n{text}\n</tool_response>")})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::chat::types::Function;

    fn tools() -> Vec<Tool> {
        let function = Function {
            name: "weather".into(),
            description: Some("The weather".into()),
            parameters: None,
            strict: None,
        };
        vec![Tool { kind: "function".into(), function }]
    }

    fn history() -> Vec<Value> {
        let call = |city: &str| {
            json!({"id": "1", "type": "function", "function": {
                "name": "weather", "arguments": {"city": city},
            }})
        };
        vec![
            json!({"role": "user", "content": "hi"}),
            json!({"role": "assistant", "content": "", "tool_calls": [call("Bern"), call("Rome")]}),
            json!({"role": "tool", "content": "rain", "tool_call_id": "1"}),
            json!({"role": "tool", "content": "sun", "tool_call_id": "2"}),
        ]
    }

    #[test]
    fn tools_calls_and_results_become_text() {
        let shown = messages(history(), Some(&tools()), true);
        assert_eq!(shown.len(), 4);
        let system = content(&shown[0]);
        assert!(system.contains("\"name\":\"weather\"") && system.contains("<tool_call>"));
        let calls = content(&shown[2]);
        assert_eq!(calls.matches("<tool_call>").count(), 2);
        assert!(calls.contains("{\"name\":\"weather\",\"arguments\":{\"city\":\"Rome\"}}"));
        assert!(shown[2].get("tool_calls").is_none());
        assert_eq!(shown[3]["role"], "user");
        assert_eq!(content(&shown[3]).matches("<tool_response>").count(), 2);
        assert_eq!(messages(history(), None, true).len(), 3);
    }

    #[test]
    fn the_description_joins_an_existing_message() {
        let mut with_system = history();
        with_system.insert(0, json!({"role": "system", "content": "Be brief."}));
        let shown = messages(with_system, Some(&tools()), true);
        assert_eq!(shown.len(), 4);
        assert!(content(&shown[0]).starts_with("Be brief.\n\nYou can call functions."));
        let shown = messages(history(), Some(&tools()), false);
        assert_eq!((shown.len(), &shown[0]["role"]), (3, &json!("user")));
        assert!(content(&shown[0]).ends_with("\n\nhi"));
    }
}
