//! Handles Ollama's chat and generate requests.

use super::convert::{Generate, chat, generate};
use super::types::{OllamaChatRequest, OllamaGenerateRequest};
use super::write::{Lines, Shape};
use crate::answer::collect;
use crate::app::App;
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::http::{read_json, sse};
use crate::openai::chat::convert::{Prepared, convert};
use crate::openai::chat::handler::begin;
use crate::openai::chat::types::ChatRequest;
use crate::openai::chat::validate::{check_top, validate};
use crate::openai::completions;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// What a request becomes: nothing to answer, or a call.
type Asked = Option<(Prepared, bool, bool)>;

/// Answers one chat request, as one response or as lines.
pub(crate) async fn chat_route(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::of(&request);
    let work = move |app: &App, request: OllamaChatRequest| {
        check_top(request.top_logprobs, &app.limits)?;
        let empty = request.messages.as_ref().is_none_or(Vec::is_empty);
        let request = chat(request)?;
        prepare(app, &request, empty, caller)
    };
    let asked = read_json(&app, request, work).await?;
    answer(app, asked, Shape::Chat).await
}

/// Answers one request for a text, as one response or as lines.
pub(crate) async fn generate_route(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::of(&request);
    let work = move |app: &App, request: OllamaGenerateRequest| {
        check_top(request.top_logprobs, &app.limits)?;
        let empty = request.prompt.as_ref().is_none_or(String::is_empty);
        match generate(request)? {
            Generate::Chat(request) => prepare(app, &request, empty, caller),
            Generate::Raw(request) => {
                completions::validate::validate(&request, &app.model, &app.limits)?;
                if empty {
                    return Ok(None);
                }
                let (streamed, logprobs) =
                    (request.stream == Some(true), request.logprobs.is_some());
                let made =
                    completions::convert::convert(&app.model, &app.limits, *request, caller)?;
                let completions::convert::Prepared { requests, setup, grammar, .. } = made;
                Ok(Some((Prepared { requests, setup, grammar }, streamed, logprobs)))
            }
        }
    };
    let asked = read_json(&app, request, work).await?;
    answer(app, asked, Shape::Generate).await
}

fn prepare(
    app: &App,
    request: &ChatRequest,
    empty: bool,
    caller: Caller,
) -> Result<Asked, ApiError> {
    validate(request, &app.model, &app.limits)?;
    if empty {
        // Ollama's clients load a model this way; this one is loaded.
        return Ok(None);
    }
    let prepared = convert(&app.model, &app.limits, request, caller)?;
    Ok(Some((prepared, request.stream == Some(true), request.wants_logprobs())))
}

async fn answer(app: Arc<App>, asked: Asked, shape: Shape) -> Result<Response, ApiError> {
    let Some((prepared, streamed, logprobs)) = asked else {
        return Ok(Json(Lines::new(&app, shape, false).loaded()).into_response());
    };
    let mut lines = Lines::new(&app, shape, logprobs);
    let mut run = begin(&app, prepared, streamed).await?;
    if streamed {
        return sse::respond(run, lines, &app.limits).await;
    }
    let whole = collect(&app, &mut run).await?;
    lines.prompt_done(whole.prompt_done);
    Ok(Json(lines.whole(&whole, run.usage)).into_response())
}
