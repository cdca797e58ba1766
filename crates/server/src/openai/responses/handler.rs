//! Handles requests for responses.

use super::convert::{answered, chat, messages};
use super::store::Stored;
use super::stream::ResponseEvents;
use super::types::{DeletedResponse, ResponsesRequest, ResponsesResponse};
use super::write;
use crate::answer::{Part, collect};
use crate::app::App;
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::http::{read_json, sse, write_json};
use crate::openai::chat::convert::convert;
use crate::openai::chat::handler::begin;
use crate::openai::chat::validate::validate;
use axum::Json;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use serde_json::Value;
use std::sync::Arc;

/// Answers one request, as one response or as a stream.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::of(&request);
    let work = move |app: &App, request: ResponsesRequest| {
        let mut said = match &request.previous_response_id {
            None => Vec::new(),
            Some(id) => earlier(app, caller, id)?.messages.clone(),
        };
        said.extend(messages(&request.input)?);
        let asked = chat(&request, said.clone())?;
        validate(&asked, &app.model, &app.limits)?;
        let prepared = convert(&app.model, &app.limits, &asked, caller)?;
        let streamed = request.stream == Some(true);
        let response = write::begun(app, request);
        let conversation = Conversation { owner: caller.tenant(None), said };
        Ok((prepared, streamed, response, conversation, asked.wants_logprobs()))
    };
    let (prepared, streamed, mut response, conversation, logprobs) =
        read_json(&app, request, work).await?;
    let mut run = begin(&app, prepared, streamed).await?;
    if streamed {
        let events = ResponseEvents::new(app.clone(), response, conversation, logprobs);
        return sse::respond(run, events, &app.limits).await;
    }
    let whole = collect(&app, &mut run).await?;
    let cut = whole.reason == "length";
    let count = whole.parts.len();
    let mut scores = match logprobs {
        true => write::logprobs(&whole.logprobs, &*app.model.text),
        false => Vec::new(),
    };
    for (i, part) in whole.parts.iter().enumerate() {
        let status = if cut && i + 1 == count { "incomplete" } else { "completed" };
        let own = match part {
            Part::Text(_) => std::mem::take(&mut scores),
            Part::Reasoning(_) | Part::Call(..) => Vec::new(),
        };
        response.output.push(write::item(part, &write::item_id(part), status, own));
    }
    write::ended(&mut response, whole.reason, run.usage);
    conversation.keep(&app, &response, &whole.parts);
    write_json(&app, whole.text().len(), response).await
}

/// The conversation that a response continues.
pub(super) struct Conversation {
    owner: u64,
    said: Vec<Value>,
}

impl Conversation {
    /// Keeps a response that has ended, if it is to be kept.
    pub(super) fn keep(mut self, app: &App, response: &ResponsesResponse, parts: &[Part]) {
        if !response.store {
            return;
        }
        self.said.push(answered(parts));
        let (messages, owner) = (self.said, self.owner);
        let value = serde_json::to_value(response).unwrap_or_default();
        // Values take several times the memory of their text.
        let size = |value: &Value| value.to_string().len() as u64 * 4;
        let bytes = size(&value) + messages.iter().map(size).sum::<u64>();
        let stored = Stored { owner, messages, response: value, bytes };
        app.responses.put(response.id.clone(), stored);
    }
}

fn earlier(app: &App, caller: Caller, id: &str) -> Result<Arc<Stored>, ApiError> {
    app.responses.get(caller.tenant(None), id).ok_or_else(|| no_response(id))
}

fn no_response(id: &str) -> ApiError {
    ApiError::not_found(
        "previous_response_id",
        format!("there is no response {id:?}: it was not stored, or it is too old"),
    )
}

/// A kept response.
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(earlier(&app, Caller::of(&request), &id)?.response.clone()))
}

/// Deletes a kept response.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<DeletedResponse>, ApiError> {
    match app.responses.delete(Caller::of(&request).tenant(None), &id) {
        true => Ok(Json(DeletedResponse { id, object: "response".into(), deleted: true })),
        false => Err(no_response(&id)),
    }
}
