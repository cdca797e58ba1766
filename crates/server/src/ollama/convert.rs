//! Converts Ollama's requests to chats and completions.

use super::types::{OllamaChatRequest, OllamaGenerateRequest, OllamaMessage, OllamaTool, Options};
use crate::error::ApiError;
use crate::openai::chat::types::ChatRequest;
use crate::openai::completions::types::CompletionRequest;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// A model's name without the tag that Ollama's clients add.
pub(crate) fn model_name(name: Option<String>) -> Option<String> {
    name.map(|name| name.strip_suffix(":latest").unwrap_or(&name).to_string())
}

fn typed<T: DeserializeOwned>(body: Map<String, Value>) -> Result<T, ApiError> {
    serde_json::from_value(Value::Object(body))
        .map_err(|e| ApiError::internal(format!("internal error: converting the request: {e}")))
}

/// The fields that all requests share.
struct Common {
    model: Option<String>,
    format: Option<Value>,
    options: Option<Options>,
    think: Option<Value>,
}

impl Common {
    fn body(self) -> Result<Map<String, Value>, ApiError> {
        let mut body = Map::new();
        body.insert("model".into(), json!(model_name(self.model)));
        // An empty string is Ollama's way to say that there is none.
        match self.format.filter(|format| *format != json!("")) {
            None => {}
            Some(Value::String(word)) if word == "json" => {
                body.insert("response_format".into(), json!({"type": "json_object"}));
            }
            Some(Value::Object(schema)) => {
                let schema = json!({"type": "json_schema", "json_schema": {"schema": schema}});
                body.insert("response_format".into(), schema);
            }
            Some(_) => {
                return Err(ApiError::invalid(
                    "format",
                    "format must be \"json\" or a JSON schema",
                ));
            }
        }
        match self.think {
            None | Some(Value::Null) => {}
            Some(Value::Bool(on)) => {
                body.insert("chat_template_kwargs".into(), json!({"enable_thinking": on}));
            }
            Some(Value::String(effort)) => {
                body.insert("reasoning_effort".into(), effort.into());
            }
            Some(_) => {
                return Err(ApiError::invalid("think", "think must be a boolean, or a word"));
            }
        }
        if let Some(options) = self.options {
            add_options(options, &mut body)?;
        }
        Ok(body)
    }
}

fn add_options(options: Options, body: &mut Map<String, Value>) -> Result<(), ApiError> {
    for (name, value, neutral) in [
        ("options.mirostat", options.mirostat, 0.0),
        ("options.typical_p", options.typical_p, 1.0),
        ("options.tfs_z", options.tfs_z, 1.0),
    ] {
        if value.is_some_and(|value| value != neutral) {
            return Err(ApiError::invalid(name, format!("{name} is not supported")));
        }
    }
    for (name, value) in [
        ("options.temperature", options.temperature),
        ("options.top_p", options.top_p),
        ("options.min_p", options.min_p),
        ("options.repeat_penalty", options.repeat_penalty),
        ("options.frequency_penalty", options.frequency_penalty),
        ("options.presence_penalty", options.presence_penalty),
    ] {
        // JSON has no such numbers: they would become null below.
        if value.is_some_and(|value| !value.is_finite()) {
            return Err(ApiError::invalid(name, format!("{name} is too large")));
        }
    }
    // A negative number means that only the context is the limit.
    let most = options.num_predict.filter(|most| *most >= 0).map(|most| most.min(u32::MAX.into()));
    for (name, value) in [
        ("max_tokens", json!(most)),
        ("temperature", json!(options.temperature)),
        ("top_k", json!(options.top_k)),
        ("top_p", json!(options.top_p)),
        ("min_p", json!(options.min_p)),
        ("repetition_penalty", json!(options.repeat_penalty)),
        ("frequency_penalty", json!(options.frequency_penalty)),
        ("presence_penalty", json!(options.presence_penalty)),
        ("seed", json!(options.seed)),
        ("stop", json!(options.stop)),
    ] {
        body.insert(name.into(), value);
    }
    Ok(())
}

/// Stands for the text of a request without one, which only loads the model: the rest of it is checked like any other.
const NOTHING: &str = ".";

/// The chat request that means the same.
pub(crate) fn chat(request: OllamaChatRequest) -> Result<ChatRequest, ApiError> {
    let OllamaChatRequest {
        model,
        messages,
        tools,
        format,
        options,
        stream,
        think,
        logprobs,
        top_logprobs,
    } = request;
    let mut body = Common { model, format, options, think }.body()?;
    let mut messages = chat_messages(messages.unwrap_or_default())?;
    if messages.is_empty() {
        messages.push(json!({"role": "user", "content": NOTHING}));
    }
    body.insert("messages".into(), messages.into());
    if let Some(tools) = tools {
        body.insert("tools".into(), tools.into_iter().map(tool).collect());
    }
    body.insert("stream".into(), stream.unwrap_or(true).into());
    body.insert("logprobs".into(), json!(logprobs));
    body.insert("top_logprobs".into(), json!(top_logprobs));
    typed(body)
}

/// Messages with ids for calls: a tool's message answers the calls before it in their order, or the
/// one with its name.
fn chat_messages(messages: Vec<OllamaMessage>) -> Result<Vec<Value>, ApiError> {
    let mut waiting: Vec<(String, String)> = Vec::new();
    let mut out = Vec::with_capacity(messages.len());
    let mut count = 0;
    for (i, message) in messages.into_iter().enumerate() {
        if message.images.as_ref().is_some_and(|images| !images.is_empty()) {
            let text = "images are not supported; this model reads text only";
            return Err(ApiError::invalid(format!("messages[{i}].images"), text));
        }
        let mut made = Map::new();
        if message.role == "tool" && !waiting.is_empty() {
            let named = |call: &(String, String)| Some(&call.0) == message.tool_name.as_ref();
            let at = waiting.iter().position(named).unwrap_or(0);
            made.insert("tool_call_id".into(), waiting.remove(at).1.into());
        }
        if let Some(calls) = message.tool_calls {
            let call = |call: super::types::OllamaCall| {
                count += 1;
                let id = format!("call-{count}");
                waiting.push((call.function.name.clone(), id.clone()));
                let arguments =
                    Value::Object(call.function.arguments.unwrap_or_default()).to_string();
                json!({"id": id, "type": "function", "function": {
                    "name": call.function.name, "arguments": arguments,
                }})
            };
            made.insert("tool_calls".into(), calls.into_iter().map(call).collect());
        }
        made.insert("role".into(), message.role.into());
        made.insert("content".into(), message.content.unwrap_or_default().into());
        made.insert("reasoning_content".into(), json!(message.thinking));
        out.push(Value::Object(made));
    }
    Ok(out)
}

fn tool(tool: OllamaTool) -> Value {
    json!({"type": tool.kind.unwrap_or_else(|| "function".into()), "function": {
        "name": tool.function.name,
        "description": tool.function.description,
        "parameters": tool.function.parameters,
    }})
}

/// What a request for a text becomes.
pub(crate) enum Generate {
    /// A conversation of one message.
    Chat(Box<ChatRequest>),
    /// A text without a template.
    Raw(Box<CompletionRequest>),
}

/// The request that means the same.
pub(crate) fn generate(request: OllamaGenerateRequest) -> Result<Generate, ApiError> {
    let OllamaGenerateRequest {
        model,
        prompt,
        system,
        raw,
        format,
        options,
        stream,
        think,
        logprobs,
        top_logprobs,
    } = request;
    let mut body = Common { model, format, options, think }.body()?;
    body.insert("stream".into(), stream.unwrap_or(true).into());
    let prompt = prompt.filter(|text| !text.is_empty()).unwrap_or_else(|| NOTHING.into());
    if raw == Some(true) {
        body.insert("prompt".into(), prompt.into());
        // Without a limit of its own the answer ends at the context's.
        body.entry("max_tokens").and_modify(unlimited).or_insert(u32::MAX.into());
        let top = (logprobs == Some(true)).then_some(top_logprobs.unwrap_or(0));
        body.insert("logprobs".into(), json!(top));
        return Ok(Generate::Raw(Box::new(typed(body)?)));
    }
    let system = system.map(|text| json!({"role": "system", "content": text}));
    let user = json!({"role": "user", "content": prompt});
    let messages: Vec<Value> = system.into_iter().chain([user]).collect();
    body.insert("messages".into(), messages.into());
    body.insert("logprobs".into(), json!(logprobs));
    body.insert("top_logprobs".into(), json!(top_logprobs));
    Ok(Generate::Chat(Box::new(typed(body)?)))
}

fn unlimited(most: &mut Value) {
    if most.is_null() {
        *most = u32::MAX.into();
    }
}
