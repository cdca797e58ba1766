//! Converts a request for a response to a chat request.

use super::types::{Input, Item, ItemContent, ResponsesRequest, ResponsesTool, TextFormat};
use crate::error::ApiError;
use crate::openai::chat::types::ChatRequest;
use serde_json::{Map, Value, json};

/// The messages of the new input.
pub(crate) fn messages(input: &Input) -> Result<Vec<Value>, ApiError> {
    let items = match input {
        Input::Text(text) => return Ok(vec![json!({"role": "user", "content": text})]),
        Input::Items(items) => items,
    };
    if items.is_empty() {
        return Err(ApiError::invalid("input", "input must not be empty"));
    }
    let mut out: Vec<Value> = Vec::with_capacity(items.len());
    let mut thoughts = String::new();
    for (i, item) in items.iter().enumerate() {
        let name = format!("input[{i}]");
        match item.kind.as_deref().unwrap_or("message") {
            "message" => {
                let role = required(&name, "role", item.role.as_deref())?;
                let content = content(&name, "content", item.content.as_ref())?;
                let mut message = json!({"role": role, "content": content});
                if role == "assistant" && !thoughts.is_empty() {
                    message["reasoning_content"] = std::mem::take(&mut thoughts).into();
                }
                out.push(message);
            }
            "function_call" => add_call(&name, item, &mut thoughts, &mut out)?,
            "function_call_output" => {
                let id = required(&name, "call_id", item.call_id.as_deref())?;
                let content = content(&name, "output", item.output.as_ref())?;
                out.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
            }
            "reasoning" => {
                if item.content.is_some() {
                    thoughts.push_str(&content(&name, "content", item.content.as_ref())?);
                }
            }
            other => {
                let text = format!("{other:?} is not supported: send messages and function calls");
                return Err(ApiError::invalid(format!("{name}.type"), text));
            }
        }
    }
    Ok(out)
}

/// Adds a call to the assistant's message before it, or to a new one.
fn add_call(
    name: &str,
    item: &Item,
    thoughts: &mut String,
    out: &mut Vec<Value>,
) -> Result<(), ApiError> {
    let call = json!({
        "id": required(name, "call_id", item.call_id.as_deref())?,
        "type": "function",
        "function": {
            "name": required(name, "name", item.name.as_deref())?,
            "arguments": required(name, "arguments", item.arguments.as_deref())?,
        },
    });
    if out.last().is_none_or(|last| last["role"] != "assistant") {
        let mut message = json!({"role": "assistant", "content": ""});
        if !thoughts.is_empty() {
            message["reasoning_content"] = std::mem::take(thoughts).into();
        }
        out.push(message);
    }
    if let Some(Value::Object(last)) = out.last_mut() {
        let calls = last.entry("tool_calls").or_insert_with(|| json!([]));
        if let Some(calls) = calls.as_array_mut() {
            calls.push(call);
        }
    }
    Ok(())
}

fn required<'a>(name: &str, field: &str, value: Option<&'a str>) -> Result<&'a str, ApiError> {
    let missing = || ApiError::invalid(format!("{name}.{field}"), format!("{name} needs {field}"));
    value.ok_or_else(missing)
}

fn content(name: &str, field: &str, value: Option<&ItemContent>) -> Result<String, ApiError> {
    let name = format!("{name}.{field}");
    match value {
        None => Err(ApiError::invalid(name.clone(), format!("{name} is missing"))),
        Some(ItemContent::Text(text)) => Ok(text.clone()),
        Some(ItemContent::Parts(parts)) => {
            let mut text = String::new();
            for (j, part) in parts.iter().enumerate() {
                let known = matches!(
                    part.kind.as_str(),
                    "input_text" | "output_text" | "reasoning_text" | "text" | "refusal"
                );
                if !known {
                    let kind = &part.kind;
                    let why = format!("{kind} is not supported; this model reads text only");
                    return Err(ApiError::invalid(format!("{name}[{j}].type"), why));
                }
                let said = part.text.as_deref().or(part.refusal.as_deref());
                text.push_str(required(&format!("{name}[{j}]"), "text", said)?);
            }
            Ok(text)
        }
    }
}

/// The chat request that means the same, after the messages of earlier responses.
pub(crate) fn chat(
    request: &ResponsesRequest,
    mut messages: Vec<Value>,
) -> Result<ChatRequest, ApiError> {
    if let Some(instructions) = &request.instructions {
        messages.insert(0, json!({"role": "system", "content": instructions}));
    }
    if request.truncation.as_deref().is_some_and(|word| word != "disabled") {
        let text = "truncation must be disabled: no item is dropped";
        return Err(ApiError::invalid("truncation", text));
    }
    let include = request.include.as_deref().unwrap_or_default();
    const LOGPROBS: &str = "message.output_text.logprobs";
    // Its content is empty here: reasoning is not encrypted.
    const ENCRYPTED: &str = "reasoning.encrypted_content";
    if let Some(other) = include.iter().find(|name| *name != LOGPROBS && *name != ENCRYPTED) {
        let text = format!("{other:?} is not supported: only {LOGPROBS} is");
        return Err(ApiError::invalid("include", text));
    }
    let logprobs =
        request.top_logprobs.is_some_and(|top| top > 0) || include.iter().any(|n| n == LOGPROBS);
    let mut body = json!({
        "model": request.model,
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": request.stream,
        "parallel_tool_calls": request.parallel_tool_calls,
        "logprobs": logprobs,
        "top_logprobs": request.top_logprobs,
        "reasoning_effort": request.reasoning.as_ref().and_then(|r| r.effort.clone()),
    });
    if let Some(tools) = &request.tools {
        let tools: Result<Vec<Value>, ApiError> =
            tools.iter().enumerate().map(|(i, one)| tool(i, one)).collect();
        body["tools"] = tools?.into();
    }
    if let Some(choice) = &request.tool_choice {
        body["tool_choice"] = tool_choice(choice)?;
    }
    if let Some(format) = request.text.as_ref().and_then(|text| text.format.as_ref()) {
        body["response_format"] = response_format(format)?;
    }
    serde_json::from_value(body)
        .map_err(|e| ApiError::internal(format!("internal error: converting the request: {e}")))
}

fn response_format(format: &TextFormat) -> Result<Value, ApiError> {
    match (format.kind.as_str(), &format.schema) {
        ("json_schema", Some(schema)) => Ok(json!({
            "type": "json_schema", "json_schema": {"name": format.name, "schema": schema},
        })),
        ("json_schema", None) => {
            Err(ApiError::invalid("text.format.schema", "json_schema needs a schema"))
        }
        ("text" | "json_object", _) => Ok(json!({"type": format.kind})),
        (other, _) => {
            let text = format!("{other:?} is not text, json_object or json_schema");
            Err(ApiError::invalid("text.format.type", text))
        }
    }
}

fn tool(i: usize, tool: &ResponsesTool) -> Result<Value, ApiError> {
    if tool.kind != "function" {
        let kind = &tool.kind;
        let text = format!("{kind:?} runs on OpenAI's servers; send a function");
        return Err(ApiError::invalid(format!("tools[{i}].type"), text));
    }
    Ok(json!({"type": "function", "function": {
        "name": tool.name, "description": tool.description, "parameters": tool.parameters,
    }}))
}

fn tool_choice(choice: &Value) -> Result<Value, ApiError> {
    let named = choice.as_object().filter(|named| named.get("type") == Some(&"function".into()));
    match (choice, named.and_then(|named| named.get("name")).and_then(Value::as_str)) {
        (Value::String(_), _) => Ok(choice.clone()),
        (_, Some(name)) => Ok(json!({"type": "function", "function": {"name": name}})),
        (_, None) => {
            let text = "tool_choice must be none, auto, required or \
                        {\"type\": \"function\", \"name\": …}";
            Err(ApiError::invalid("tool_choice", text))
        }
    }
}

/// The message that an answer is, for the request that continues it.
pub(crate) fn answered(parts: &[crate::answer::Part]) -> Value {
    use crate::answer::Part;
    let (mut text, mut thoughts, mut calls) = (String::new(), String::new(), Vec::new());
    for part in parts {
        match part {
            Part::Text(more) => text.push_str(more),
            Part::Reasoning(more) => thoughts.push_str(more),
            Part::Call(id, name, arguments) => calls.push(json!({
                "id": id, "type": "function",
                "function": {"name": name, "arguments": arguments},
            })),
        }
    }
    let mut message = Map::new();
    message.insert("role".into(), "assistant".into());
    message.insert("content".into(), text.into());
    if !thoughts.is_empty() {
        message.insert("reasoning_content".into(), thoughts.into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), calls.into());
    }
    Value::Object(message)
}
