//! The objects of responses: the response itself and its output items.

use super::types::{
    InputDetails, OutputDetails, ResponsesRequest, ResponsesResponse, ResponsesUsage, TextConfig,
    TextFormat,
};
use crate::answer::{Part, Usage};
use crate::app::App;
use crate::openai::chat::handler::chat_logprob;
use crate::openai::{new_id, unix_time};
use engine::request::TokenLogprob;
use serde_json::{Value, json};
use text::TextModel;

/// A response in progress, without output.
pub(crate) fn begun(app: &App, request: ResponsesRequest) -> ResponsesResponse {
    let text = TextFormat {
        kind: "text".into(),
        name: None,
        description: None,
        schema: None,
        strict: None,
    };
    ResponsesResponse {
        id: new_id("resp"),
        object: "response".into(),
        created_at: unix_time(),
        status: "in_progress".into(),
        error: None,
        incomplete_details: None,
        instructions: request.instructions,
        max_output_tokens: request.max_output_tokens,
        model: app.model.name.clone(),
        output: Vec::new(),
        parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
        previous_response_id: request.previous_response_id,
        reasoning: request.reasoning,
        store: request.store.unwrap_or(true),
        temperature: Some(request.temperature.unwrap_or(app.model.defaults.temperature)),
        text: TextConfig { format: request.text.and_then(|t| t.format).or(Some(text)) },
        tool_choice: request.tool_choice.unwrap_or_else(|| "auto".into()),
        tools: request.tools.unwrap_or_default(),
        top_p: Some(request.top_p.unwrap_or(app.model.defaults.top_p)),
        truncation: "disabled".into(),
        usage: None,
        metadata: request.metadata.unwrap_or_default(),
    }
}

/// Sets the status of a response that has ended.
pub(crate) fn ended(response: &mut ResponsesResponse, reason: &str, usage: Usage) {
    let cut = reason == "length";
    response.status = if cut { "incomplete" } else { "completed" }.into();
    response.incomplete_details = cut.then(|| json!({"reason": "max_output_tokens"}));
    response.usage = Some(ResponsesUsage {
        input_tokens: usage.prompt,
        input_tokens_details: InputDetails { cached_tokens: usage.cached, cache_write_tokens: 0 },
        output_tokens: usage.completion,
        output_tokens_details: OutputDetails { reasoning_tokens: usage.reasoning },
        total_tokens: usage.prompt + usage.completion,
    });
}

/// The content part of a text.
pub(crate) fn text_part(text: &str, logprobs: Vec<Value>) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

/// The log-probabilities of tokens.
pub(crate) fn logprobs(list: &[TokenLogprob], text: &dyn TextModel) -> Vec<Value> {
    list.iter().map(|entry| json!(chat_logprob(entry, text))).collect()
}

/// An output item. `status`: `in_progress`, `completed` or `incomplete`.
pub(crate) fn item(part: &Part, id: &str, status: &str, logprobs: Vec<Value>) -> Value {
    match part {
        Part::Text(text) => json!({
            "type": "message", "id": id, "role": "assistant", "status": status,
            "content": [text_part(text, logprobs)],
        }),
        Part::Reasoning(text) => json!({
            "type": "reasoning", "id": id, "summary": [], "status": status,
            "content": [{"type": "reasoning_text", "text": text}],
        }),
        Part::Call(call, name, arguments) => json!({
            "type": "function_call", "id": id, "call_id": call, "name": name,
            "arguments": arguments, "status": status,
        }),
    }
}

/// A new id for the item of a part.
pub(crate) fn item_id(part: &Part) -> String {
    new_id(match part {
        Part::Text(_) => "msg",
        Part::Reasoning(_) => "rs",
        Part::Call(..) => "fc",
    })
}
