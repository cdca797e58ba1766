//! `/api/embed`.

use super::convert::model_name;
use super::types::{OllamaEmbedRequest, OllamaEmbedResponse, Texts};
use crate::app::{App, Model};
use crate::config::Limits;
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::http::{read_json, write_json};
use crate::openai::completions::convert::tokenize;
use crate::openai::completions::types::Prompt;
use crate::openai::embeddings::handler::{bytes, compute, prepare};
use crate::openai::embeddings::types::EmbeddingRequest;
use axum::extract::{Request, State};
use axum::response::Response;
use std::sync::Arc;
use std::time::Instant;

/// Answers one embedding request.
pub(crate) async fn handle(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let began = Instant::now();
    let caller = Caller::of(&request);
    let work = move |app: &App, request: OllamaEmbedRequest| {
        prepare(app, &convert(&app.model, &app.limits, request)?, caller)
    };
    let requests = read_json(&app, request, work).await?;
    let (embeddings, prompt_eval_count) = compute(&app, requests).await?;
    let bytes = bytes(&embeddings);
    let response = OllamaEmbedResponse {
        model: app.model.name.clone(),
        embeddings,
        total_duration: began.elapsed().as_nanos() as u64,
        load_duration: 0,
        prompt_eval_count,
    };
    write_json(&app, bytes, response).await
}

/// The embedding request that means the same. Texts are cut to the context unless that is refused.
pub(crate) fn convert(
    model: &Model,
    limits: &Limits,
    request: OllamaEmbedRequest,
) -> Result<EmbeddingRequest, ApiError> {
    let texts = match request.input {
        Texts::One(text) => Prompt::Text(text),
        Texts::Many(texts) => Prompt::Texts(texts),
    };
    let input = match request.truncate {
        Some(false) => texts,
        _ => {
            let most = usize::try_from(limits.tokenize_tokens).unwrap_or(usize::MAX);
            let mut lists = tokenize(model, "input", texts, most)?;
            let most = model.most_prompt();
            for list in lists.iter_mut().filter(|list| list.len() > most) {
                let closing = list.split_off(list.len() - model.text.closing());
                list.truncate(most - closing.len());
                list.extend(closing);
            }
            Prompt::TokenLists(lists)
        }
    };
    Ok(EmbeddingRequest {
        input,
        model: model_name(request.model),
        encoding_format: None,
        dimensions: request.dimensions,
        pooling: None,
        truncate_prompt_tokens: None,
        user: None,
    })
}
