//! Converts Anthropic's messages to a chat request.

use super::types::{
    Block, Blocks, CountTokensRequest, InputMessage, InputTool, InputToolChoice, MessagesRequest,
    OutputConfig, Thinking,
};
use crate::error::ApiError;
use crate::openai::chat::types::ChatRequest;
use serde_json::{Map, Value, json};

/// The parts of a request that make its prompt.
pub(crate) struct Conversation {
    messages: Vec<InputMessage>,
    system: Option<Blocks>,
    tools: Option<Vec<InputTool>>,
    tool_choice: Option<InputToolChoice>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
}

impl From<CountTokensRequest> for Conversation {
    fn from(request: CountTokensRequest) -> Self {
        let CountTokensRequest {
            model: _,
            messages,
            system,
            tools,
            tool_choice,
            thinking,
            output_config,
        } = request;
        Self { messages, system, tools, tool_choice, thinking, output_config }
    }
}

/// The chat request that means the same.
pub(crate) fn chat(request: MessagesRequest) -> Result<ChatRequest, ApiError> {
    if request.temperature.is_some_and(|t| !(0.0..=1.0).contains(&t)) {
        return Err(ApiError::invalid("temperature", "temperature must be between 0 and 1"));
    }
    if request.top_p.is_some_and(|p| !(0.0..=1.0).contains(&p)) {
        return Err(ApiError::invalid("top_p", "top_p must be between 0 and 1"));
    }
    let budget = request.thinking.as_ref().and_then(|thinking| thinking.budget_tokens);
    if budget.is_some_and(|budget| budget >= request.max_tokens) {
        let text = "max_tokens must be greater than thinking.budget_tokens";
        return Err(ApiError::invalid("max_tokens", text));
    }
    let mut body = json!({
        "model": request.model,
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
    });
    let conversation = Conversation {
        messages: request.messages,
        system: request.system,
        tools: request.tools,
        tool_choice: request.tool_choice,
        thinking: request.thinking,
        output_config: request.output_config,
    };
    conversation.add_to(&mut body)?;
    typed(body)
}

/// The chat request of a conversation without parameters.
pub(crate) fn counted(request: CountTokensRequest) -> Result<ChatRequest, ApiError> {
    let mut body = json!({"model": request.model});
    Conversation::from(request).add_to(&mut body)?;
    typed(body)
}

fn typed(body: Value) -> Result<ChatRequest, ApiError> {
    serde_json::from_value(body)
        .map_err(|e| ApiError::internal(format!("internal error: converting the request: {e}")))
}

impl Conversation {
    fn add_to(self, body: &mut Value) -> Result<(), ApiError> {
        let mut messages = Vec::new();
        if let Some(system) = &self.system {
            messages.push(json!({"role": "system", "content": text("system", system)?}));
        }
        let continued = self.messages.last().is_some_and(|last| last.role == "assistant");
        for (i, message) in self.messages.into_iter().enumerate() {
            add_message(i, message, &mut messages)?;
        }
        body["messages"] = messages.into();
        if continued {
            body["continue_final_message"] = true.into();
        }
        if let Some(tools) = self.tools {
            let tools: Result<Vec<Value>, ApiError> =
                tools.into_iter().enumerate().map(|(i, one)| tool(i, one)).collect();
            body["tools"] = tools?.into();
        }
        if let Some(choice) = self.tool_choice {
            body["tool_choice"] = tool_choice(&choice)?;
            body["parallel_tool_calls"] =
                json!(choice.disable_parallel_tool_use.map(|disabled| !disabled));
        }
        if let Some(thinking) = self.thinking {
            body["chat_template_kwargs"] = json!({"enable_thinking": check_thinking(&thinking)?});
            body["thinking_token_budget"] = json!(thinking.budget_tokens);
        }
        self.output_config.map_or(Ok(()), |config| output(config, body))
    }
}

/// The least tokens of reasoning that a request may ask for.
const LEAST_BUDGET: u32 = 1024;

/// Whether the model reasons first.
fn check_thinking(thinking: &Thinking) -> Result<bool, ApiError> {
    const BUDGET: &str = "thinking.budget_tokens";
    match (thinking.kind.as_str(), thinking.budget_tokens) {
        ("enabled", Some(LEAST_BUDGET..)) | ("adaptive", None) => Ok(true),
        ("disabled", None) => Ok(false),
        ("enabled", Some(_)) => {
            let text = format!("{BUDGET} must be at least {LEAST_BUDGET}");
            Err(ApiError::invalid(BUDGET, text))
        }
        ("enabled", None) => {
            let text = format!("thinking of type enabled needs {BUDGET}");
            Err(ApiError::invalid(BUDGET, text))
        }
        ("adaptive" | "disabled", Some(_)) => {
            let text = format!("thinking of type {} takes no budget_tokens", thinking.kind);
            Err(ApiError::invalid(BUDGET, text))
        }
        (other, _) => {
            let text = format!("{other:?} is not enabled, adaptive or disabled");
            Err(ApiError::invalid("thinking.type", text))
        }
    }
}

fn output(config: OutputConfig, body: &mut Value) -> Result<(), ApiError> {
    if let Some(effort) = config.effort {
        // Templates know no more than this.
        let effort = if effort == "max" { "xhigh".into() } else { effort };
        body["reasoning_effort"] = effort.into();
    }
    if let Some(format) = config.format {
        if format.kind != "json_schema" {
            let text = format!("{:?} is not json_schema", format.kind);
            return Err(ApiError::invalid("output_config.format.type", text));
        }
        body["response_format"] =
            json!({"type": "json_schema", "json_schema": {"schema": format.schema}});
    }
    Ok(())
}

/// The text of blocks that may only be text.
fn text(name: &str, blocks: &Blocks) -> Result<String, ApiError> {
    let list = match blocks {
        Blocks::Text(text) => return Ok(text.clone()),
        Blocks::List(list) => list,
    };
    let mut parts = Vec::with_capacity(list.len());
    for (i, block) in list.iter().enumerate() {
        parts.push(block_text(&format!("{name}[{i}]"), block)?);
    }
    Ok(parts.join("\n"))
}

fn block_text<'a>(name: &str, block: &'a Block) -> Result<&'a str, ApiError> {
    if block.kind != "text" {
        let text = format!("{} is not supported; this model reads text only", block.kind);
        return Err(ApiError::invalid(format!("{name}.type"), text));
    }
    required(name, "text", block.text.as_deref())
}

fn required<'a>(name: &str, field: &str, value: Option<&'a str>) -> Result<&'a str, ApiError> {
    let missing = || ApiError::invalid(format!("{name}.{field}"), format!("{name} needs {field}"));
    value.ok_or_else(missing)
}

/// Converts one message: results of tools are messages of their own.
fn add_message(i: usize, message: InputMessage, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let name = format!("messages[{i}]");
    let role = message.role.as_str();
    if !matches!(role, "user" | "assistant") {
        let text =
            format!("{role:?} is not a role: use user or assistant, and system for the rest");
        return Err(ApiError::invalid(format!("{name}.role"), text));
    }
    let list = match message.content {
        Blocks::Text(text) => {
            out.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Blocks::List(list) => list,
    };
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), String::new(), Vec::new());
    for (j, block) in list.into_iter().enumerate() {
        let name = format!("{name}.content[{j}]");
        match (block.kind.as_str(), role) {
            ("tool_result", "user") => {
                let id = required(&name, "tool_use_id", block.tool_use_id.as_deref())?;
                let content = block.content.as_ref();
                let content = content
                    .map_or(Ok(String::new()), |blocks| text(&format!("{name}.content"), blocks))?;
                let failed = if block.is_error == Some(true) { "Error: " } else { "" };
                let content = format!("{failed}{content}");
                out.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
            }
            ("thinking", "assistant") => {
                thoughts.push_str(required(&name, "thinking", block.thinking.as_deref())?);
            }
            // Encrypted by another server.
            ("redacted_thinking", "assistant") => {}
            ("tool_use", "assistant") => {
                let id = required(&name, "id", block.id.as_deref())?;
                let function = required(&name, "name", block.name.as_deref())?;
                let arguments = Value::Object(block.input.clone().unwrap_or_default()).to_string();
                calls.push(json!({"id": id, "type": "function", "function": {
                    "name": function, "arguments": arguments,
                }}));
            }
            _ => texts.push(block_text(&name, &block)?.to_string()),
        }
    }
    if role == "user" && texts.is_empty() {
        return Ok(());
    }
    let mut made = Map::new();
    made.insert("role".into(), role.into());
    made.insert("content".into(), texts.join("\n").into());
    if !thoughts.is_empty() {
        made.insert("reasoning_content".into(), thoughts.into());
    }
    if !calls.is_empty() {
        made.insert("tool_calls".into(), calls.into());
    }
    out.push(made.into());
    Ok(())
}

fn tool(i: usize, tool: InputTool) -> Result<Value, ApiError> {
    if tool.kind.as_deref().is_some_and(|kind| kind != "custom") {
        let kind = tool.kind.unwrap_or_default();
        let text =
            format!("{kind:?} runs on Anthropic's servers; send a tool with an input_schema");
        return Err(ApiError::invalid(format!("tools[{i}].type"), text));
    }
    Ok(json!({"type": "function", "function": {
        "name": tool.name, "description": tool.description, "parameters": tool.input_schema,
    }}))
}

fn tool_choice(choice: &InputToolChoice) -> Result<Value, ApiError> {
    Ok(match choice.kind.as_str() {
        "auto" => json!("auto"),
        "none" => json!("none"),
        "any" => json!("required"),
        "tool" => {
            let name = required("tool_choice", "name", choice.name.as_deref())?;
            json!({"type": "function", "function": {"name": name}})
        }
        other => {
            let text = format!("{other:?} is not auto, any, tool or none");
            return Err(ApiError::invalid("tool_choice.type", text));
        }
    })
}
