//! Checks chat requests.

use super::types::{ChatRequest, Content, Message, Tool, ToolChoice};
use crate::app::Model;
use crate::config::Limits;
use crate::error::ApiError;
use crate::http::shape::{ShapeError, count};
use crate::openai::sampling::at_most;
use crate::openai::structured::schema_size;
use serde::Serialize;
use serde_json::{Map, Value};

/// Checks every field; the error names the first invalid one.
pub(crate) fn validate(
    request: &ChatRequest,
    model: &Model,
    limits: &Limits,
) -> Result<(), ApiError> {
    model.check_served(request.model.as_deref())?;
    request.shared().validate(limits, model)?;
    if request.max_completion_tokens == Some(0) {
        let text = "max_completion_tokens must be at least 1";
        return Err(ApiError::invalid("max_completion_tokens", text));
    }
    check_top(request.top_logprobs, limits)?;
    conversation(&request.messages, limits)?;
    let offered = request.tools.as_deref().unwrap_or_default();
    tools(offered, limits)?;
    tool_choice(request.tool_choice.as_ref(), offered)?;
    if let Some(kwargs) = &request.chat_template_kwargs {
        template_kwargs(kwargs, limits)?;
    }
    request.structured().grammar(limits)?;
    if let Some(effort) = request.reasoning_effort.as_deref()
        && !EFFORTS.contains(&effort)
    {
        let text = format!("{effort:?} is not one of {}", EFFORTS.join(", "));
        return Err(ApiError::invalid("reasoning_effort", text));
    }
    if request.continue_final_message == Some(true) && request.add_generation_prompt == Some(true) {
        let text = "continue_final_message and add_generation_prompt exclude each other";
        return Err(ApiError::invalid("continue_final_message", text));
    }
    Ok(())
}

/// The values of `reasoning_effort`.
const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];

/// Template variables that the server sets. Names that end in `_token` are the model's special
/// tokens; names that begin with `__` belong to the template engine.
const RESERVED: [&str; 5] =
    ["messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"];

fn template_kwargs(kwargs: &Map<String, Value>, limits: &Limits) -> Result<(), ApiError> {
    const NAME: &str = "chat_template_kwargs";
    at_most(NAME, "entries", kwargs.len(), limits.kwargs)?;
    let reserved =
        |name: &str| RESERVED.contains(&name) || name.ends_with("_token") || name.starts_with("__");
    if let Some(name) = kwargs.keys().find(|name| reserved(name)) {
        let text = format!("{name:?} is set by the server and cannot be replaced");
        return Err(ApiError::invalid(format!("{NAME}.{name}"), text));
    }
    let size = json_size(kwargs);
    if size > limits.kwargs_bytes {
        let most = limits.kwargs_bytes;
        let text = format!("{NAME} has {size} bytes; at most {most} are allowed");
        return Err(ApiError::invalid(NAME, text));
    }
    if kwargs.values().any(|value| !within(value, limits.kwargs_depth)) {
        let most = limits.kwargs_depth;
        let text = format!("{NAME} is nested too deeply; at most {most} levels are allowed");
        return Err(ApiError::invalid(NAME, text));
    }
    Ok(())
}

/// Whether a value has at most `levels` nesting levels.
fn within(value: &Value, levels: u64) -> bool {
    match value {
        Value::Array(list) => levels > 0 && list.iter().all(|v| within(v, levels - 1)),
        Value::Object(map) => levels > 0 && map.values().all(|v| within(v, levels - 1)),
        _ => true,
    }
}

/// Checks the messages.
pub(crate) fn conversation(messages: &[Message], limits: &Limits) -> Result<(), ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages must not be empty"));
    }
    at_most("messages", "messages", messages.len(), limits.messages)?;
    messages.iter().enumerate().try_for_each(|(i, one)| message(i, one))?;
    arguments(messages, limits)
}

/// Bounds the JSON in the arguments of earlier calls, which templates get as values.
fn arguments(messages: &[Message], limits: &Limits) -> Result<(), ApiError> {
    let mut left = limits.json_values;
    for (i, message) in messages.iter().enumerate() {
        for (j, call) in message.tool_calls.iter().flatten().enumerate() {
            let text = call.function.arguments.as_bytes();
            left -= count(text, u64::MAX, left, true).map_err(|_| {
                let name = format!("messages[{i}].tool_calls[{j}].function.arguments");
                ApiError::invalid(name, ShapeError::TooManyValues(limits.json_values).to_string())
            })?;
        }
    }
    Ok(())
}

fn message(i: usize, message: &Message) -> Result<(), ApiError> {
    let role = message.role.as_str();
    if !matches!(role, "system" | "developer" | "user" | "assistant" | "tool") {
        let text =
            format!("{role:?} is not a role: use system, developer, user, assistant or tool");
        return Err(ApiError::invalid(format!("messages[{i}].role"), text));
    }
    if let Some(Content::Parts(parts)) = &message.content {
        for (j, part) in parts.iter().enumerate() {
            let name = |field: &str| format!("messages[{i}].content[{j}].{field}");
            if part.kind != "text" {
                let text = format!("{} is not supported; this model reads text only", part.kind);
                return Err(ApiError::invalid(name("type"), text));
            }
            if part.text.is_none() {
                return Err(ApiError::invalid(name("text"), "a text part needs a text"));
            }
        }
    }
    for (j, call) in message.tool_calls.iter().flatten().enumerate() {
        if call.kind != "function" {
            let name = format!("messages[{i}].tool_calls[{j}].type");
            return Err(ApiError::invalid(name, "the type of a tool call must be function"));
        }
    }
    Ok(())
}

/// Checks the tools.
pub(crate) fn tools(tools: &[Tool], limits: &Limits) -> Result<(), ApiError> {
    at_most("tools", "tools", tools.len(), limits.tools)?;
    let mut size = 0;
    for (i, tool) in tools.iter().enumerate() {
        if tool.kind != "function" {
            let text =
                format!("{:?} is not supported: the type of a tool must be function", tool.kind);
            return Err(ApiError::invalid(format!("tools[{i}].type"), text));
        }
        let name = &tool.function.name;
        let most = limits.tool_name_bytes;
        if name.is_empty() || name.len() as u64 > most {
            let text = format!("the name of a function must have 1 to {most} bytes");
            return Err(ApiError::invalid(format!("tools[{i}].function.name"), text));
        }
        if let Some(schema) = &tool.function.parameters {
            schema_size(&format!("tools[{i}].function.parameters"), schema, limits)?;
        }
        size += json_size(tool);
    }
    if size > limits.tools_bytes {
        let text =
            format!("the tools have {size} bytes; at most {} are allowed", limits.tools_bytes);
        return Err(ApiError::invalid("tools", text));
    }
    Ok(())
}

fn tool_choice(choice: Option<&ToolChoice>, tools: &[Tool]) -> Result<(), ApiError> {
    match choice {
        None => Ok(()),
        Some(ToolChoice::Word(word)) => match word.as_str() {
            "none" | "auto" => Ok(()),
            "required" if !tools.is_empty() => Ok(()),
            "required" => Err(ApiError::invalid(
                "tool_choice",
                "tool_choice is required, but there are no tools",
            )),
            other => {
                let text = format!("{other:?} is not none, auto, required or a function");
                Err(ApiError::invalid("tool_choice", text))
            }
        },
        Some(ToolChoice::Named(named)) => {
            let name = &named.function.name;
            if named.kind == "function" && tools.iter().any(|t| &t.function.name == name) {
                return Ok(());
            }
            let text = format!("{name:?} is not one of the tools");
            Err(ApiError::invalid("tool_choice.function.name", text))
        }
    }
}

/// Bytes of a value as JSON.
fn json_size(value: &impl Serialize) -> u64 {
    serde_json::to_vec(value).map_or(0, |text| text.len() as u64)
}

/// Refuses more candidates at a position than the limit allows.
pub(crate) fn check_top(top: Option<u32>, limits: &Limits) -> Result<(), ApiError> {
    if top.is_some_and(|top| u64::from(top) > limits.top_logprobs) {
        let text = format!("top_logprobs must be between 0 and {}", limits.top_logprobs);
        return Err(ApiError::invalid("top_logprobs", text));
    }
    Ok(())
}
