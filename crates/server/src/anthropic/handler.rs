//! Handles Anthropic's message requests.

use super::convert::{chat, counted};
use super::stream::MessageEvents;
use super::types::{
    CountTokensRequest, CountTokensResponse, MessagesRequest, MessagesResponse, MessagesUsage,
};
use crate::answer::{Part, Usage, arguments, collect};
use crate::app::App;
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::http::{read_json, sse, write_json};
use crate::openai::chat::convert::{convert, tokens};
use crate::openai::chat::handler::begin;
use crate::openai::chat::validate::validate;
use crate::openai::new_id;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// Answers one request, as one response or as a stream.
pub(crate) async fn messages(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::of(&request);
    let work = move |app: &App, request: MessagesRequest| {
        let request = chat(request)?;
        validate(&request, &app.model, &app.limits)?;
        let streamed = request.stream == Some(true);
        Ok((convert(&app.model, &app.limits, &request, caller)?, streamed))
    };
    let (prepared, streamed) = read_json(&app, request, work).await?;
    let mut run = begin(&app, prepared, streamed).await?;
    if streamed {
        return sse::respond(run, MessageEvents::new(&app), &app.limits).await;
    }
    let whole = collect(&app, &mut run).await?;
    let bytes = whole.parts.len() * 64 + whole.text().len();
    let content = whole.parts.iter().map(block).collect();
    let response = MessagesResponse {
        stop_reason: Some(stop_reason(whole.reason, whole.stop.as_deref()).into()),
        stop_sequence: whole.stop,
        usage: run.usage.into(),
        ..empty(&app, content)
    };
    write_json(&app, bytes, response).await
}

/// Counts the tokens of a conversation.
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let work = |app: &App, request: CountTokensRequest| {
        let request = counted(request)?;
        validate(&request, &app.model, &app.limits)?;
        let input_tokens = tokens(&app.model, &app.limits, &request)? as u64;
        Ok(axum::Json(CountTokensResponse { input_tokens }).into_response())
    };
    read_json(&app, request, work).await
}

/// A message without an end.
pub(super) fn empty(app: &App, content: Vec<Value>) -> MessagesResponse {
    MessagesResponse {
        id: new_id("msg"),
        kind: "message".into(),
        role: "assistant".into(),
        model: app.model.name.clone(),
        content,
        stop_reason: None,
        stop_sequence: None,
        usage: Usage::default().into(),
    }
}

fn block(part: &Part) -> Value {
    match part {
        Part::Text(text) => json!({"type": "text", "text": text, "citations": null}),
        Part::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Part::Call(id, name, text) => json!({
            "type": "tool_use", "id": id, "name": name, "input": arguments(text),
        }),
    }
}

/// Anthropic's word for the end of an answer.
pub(super) fn stop_reason(reason: &str, stop: Option<&str>) -> &'static str {
    match (reason, stop) {
        ("tool_calls", _) => "tool_use",
        ("length", _) => "max_tokens",
        (_, Some(_)) => "stop_sequence",
        (_, None) => "end_turn",
    }
}

impl From<Usage> for MessagesUsage {
    fn from(usage: Usage) -> Self {
        Self {
            input_tokens: usage.prompt - usage.cached,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached,
            output_tokens: usage.completion,
        }
    }
}
