//! What happens when text is to become tokens, or tokens text.

use super::types::{DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse};
use super::{convert, validate};
use crate::app::App;
use crate::error::ApiError;
use crate::http::read_json;
use axum::Json;
use axum::extract::{Request, State};
use std::sync::Arc;

/// Text to tokens.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<TokenizeResponse>, ApiError> {
    let request: TokenizeRequest = read_json(&app, request).await?;
    validate::tokenize(&request, &app.model, &app.limits)?;
    let strings = request.return_token_strs == Some(true);
    let text = app.model.text.clone();
    let work = move || convert::tokens(&request, &*text);
    // The size is not known before rendering: treat it as long.
    let tokens = app.compute(usize::MAX, work).await?;
    let tokens = tokens.map_err(|e| ApiError::invalid("messages", e.to_string()))?;
    let shown = |token: &u32| {
        let bytes = app.model.text.token_bytes(*token).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Ok(Json(TokenizeResponse {
        count: tokens.len() as u64,
        max_model_len: app.model.context,
        token_strs: strings.then(|| tokens.iter().map(shown).collect()),
        tokens,
    }))
}

/// Tokens to text.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<DetokenizeResponse>, ApiError> {
    let request: DetokenizeRequest = read_json(&app, request).await?;
    validate::detokenize(&request, &app.model)?;
    let text = app.model.text.clone();
    let work = move || text.decode(&request.tokens);
    Ok(Json(DetokenizeResponse { prompt: app.compute(usize::MAX, work).await? }))
}
