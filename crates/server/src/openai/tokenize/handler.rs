//! Handles tokenize and detokenize requests.

use super::types::{
    DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse, TokenizerInfo,
};
use super::{convert, validate};
use crate::app::App;
use crate::error::ApiError;
use crate::http::read_json;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// Text to tokens.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let work = |app: &App, request: TokenizeRequest| {
        validate::tokenize(&request, &app.model, &app.limits)?;
        let text = &*app.model.text;
        let most = usize::try_from(app.limits.tokenize_tokens).unwrap_or(usize::MAX);
        let param = if request.prompt.is_some() { "prompt" } else { "messages" };
        let tokens = convert::tokens(&request, &app.model, most);
        let tokens = tokens.map_err(|e| ApiError::text(e, param))?;
        let shown = |token: &u32| {
            let bytes = text.token_bytes(*token).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let strings = request.return_token_strs == Some(true);
        write(&TokenizeResponse {
            count: tokens.len() as u64,
            max_model_len: app.model.context,
            token_strs: strings.then(|| tokens.iter().map(shown).collect()),
            tokens,
        })
    };
    read_json(&app, request, work).await
}

/// Tokens to text.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let work = |app: &App, request: DetokenizeRequest| {
        validate::detokenize(&request, &app.model, &app.limits)?;
        let most = app.limits.answer_bytes;
        let within = usize::try_from(most).unwrap_or(usize::MAX);
        let prompt = app.model.text.decode_within(&request.tokens, within).ok_or_else(|| {
            ApiError::invalid("tokens", format!("the text is longer than {most} bytes"))
        })?;
        write(&DetokenizeResponse { prompt })
    };
    read_json(&app, request, work).await
}

/// What is known about the tokenizer: lm-eval and others read it to tokenize remotely.
pub(crate) async fn info(State(app): State<Arc<App>>) -> Json<TokenizerInfo> {
    let text = &*app.model.text;
    let shown = |token: &u32| {
        let bytes = text.token_bytes(*token).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let stops = text.stop_tokens();
    Json(TokenizerInfo {
        tokenizer_class: "dacapo".into(),
        vocab_size: text.vocab().into(),
        model_max_length: app.model.context,
        eos_token: stops.first().map(shown),
        bos_token: text.encode("", true, 8).ok().and_then(|tokens| tokens.first().map(shown)),
        eos_token_ids: stops.to_vec(),
        chat_template: text.template().map(Into::into),
    })
}

fn write(answer: &impl serde::Serialize) -> Result<Response, ApiError> {
    Ok(axum::Json(answer).into_response())
}
