//! What a chat request may contain.

use super::types::{ChatRequest, Content, Message, Tool, ToolChoice};
use crate::app::Model;
use crate::config::Limits;
use crate::error::ApiError;
use crate::openai::sampling::at_most;
use serde_json::{Map, Value};

/// Checks every field; the error names the first that is wrong.
pub fn validate(request: &ChatRequest, model: &Model, limits: &Limits) -> Result<(), ApiError> {
    model.check_name(request.model.as_deref())?;
    request.shared().validate(limits, model.text.vocab())?;
    if request.max_completion_tokens == Some(0) {
        let text = "max_completion_tokens must be at least 1";
        return Err(ApiError::invalid("max_completion_tokens", text));
    }
    if request.top_logprobs.is_some_and(|top| u64::from(top) > limits.top_logprobs) {
        let text = format!("top_logprobs must be between 0 and {}", limits.top_logprobs);
        return Err(ApiError::invalid("top_logprobs", text));
    }
    conversation(&request.messages, limits)?;
    let offered = request.tools.as_deref().unwrap_or_default();
    tools(offered, limits)?;
    tool_choice(request.tool_choice.as_ref(), offered)?;
    response_format(request, limits)
}

/// Checks messages alone.
pub(crate) fn conversation(messages: &[Message], limits: &Limits) -> Result<(), ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages must not be empty"));
    }
    at_most("messages", "messages", messages.len(), limits.messages)?;
    messages.iter().enumerate().try_for_each(|(i, one)| message(i, one))
}

fn message(i: usize, message: &Message) -> Result<(), ApiError> {
    let role = message.role.as_str();
    if !matches!(role, "system" | "developer" | "user" | "assistant" | "tool") {
        let text =
            format!("{role:?} is no role; roles are system, developer, user, assistant and tool");
        return Err(ApiError::invalid(format!("messages[{i}].role"), text));
    }
    if let Some(Content::Parts(parts)) = &message.content {
        for (j, part) in parts.iter().enumerate() {
            if part.kind != "text" {
                let name = format!("messages[{i}].content[{j}].type");
                let text = format!("{:?} is not understood: this model reads text", part.kind);
                return Err(ApiError::invalid(name, text));
            }
        }
    }
    for (j, call) in message.tool_calls.iter().flatten().enumerate() {
        if call.kind != "function" {
            let name = format!("messages[{i}].tool_calls[{j}].type");
            return Err(ApiError::invalid(name, "only functions can be called"));
        }
    }
    Ok(())
}

/// Checks tools alone.
pub(crate) fn tools(tools: &[Tool], limits: &Limits) -> Result<(), ApiError> {
    at_most("tools", "tools", tools.len(), limits.tools)?;
    for (i, tool) in tools.iter().enumerate() {
        if tool.kind != "function" {
            let text = format!("{:?} is no kind of tool; only functions are", tool.kind);
            return Err(ApiError::invalid(format!("tools[{i}].type"), text));
        }
        let name = &tool.function.name;
        if name.is_empty() || name.len() > 256 {
            let text = "a function's name has 1 to 256 bytes";
            return Err(ApiError::invalid(format!("tools[{i}].function.name"), text));
        }
        if let Some(schema) = &tool.function.parameters {
            schema_size(&format!("tools[{i}].function.parameters"), schema, limits)?;
        }
    }
    Ok(())
}

fn tool_choice(choice: Option<&ToolChoice>, tools: &[Tool]) -> Result<(), ApiError> {
    match choice {
        None => Ok(()),
        Some(ToolChoice::Word(word)) => match word.as_str() {
            "none" | "auto" => Ok(()),
            "required" if !tools.is_empty() => Ok(()),
            "required" => Err(ApiError::invalid("tool_choice", "there are no tools to require")),
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

fn response_format(request: &ChatRequest, limits: &Limits) -> Result<(), ApiError> {
    let Some(format) = &request.response_format else { return Ok(()) };
    match format.kind.as_str() {
        "text" | "json_object" => Ok(()),
        "json_schema" => {
            let Some(named) = &format.json_schema else {
                let text = "json_schema needs a schema: {\"name\": …, \"schema\": {…}}";
                return Err(ApiError::invalid("response_format.json_schema", text));
            };
            schema_size("response_format.json_schema.schema", &named.schema, limits)
        }
        other => {
            let text = format!("{other:?} is not text, json_object or json_schema");
            Err(ApiError::invalid("response_format.type", text))
        }
    }
}

fn schema_size(name: &str, schema: &Map<String, Value>, limits: &Limits) -> Result<(), ApiError> {
    let size = serde_json::to_vec(schema).map_or(0, |text| text.len() as u64);
    if size > limits.schema_bytes {
        let text = format!("the schema has {size} bytes; at most {}", limits.schema_bytes);
        return Err(ApiError::invalid(name, text));
    }
    Ok(())
}
