//! What happens when an embedding request comes in.

use super::convert::{inputs, pooling, vector};
use super::types::{Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage};
use super::validate::validate;
use crate::app::App;
use crate::error::ApiError;
use crate::http::read_json;
use axum::Json;
use axum::extract::{Request, State};
use std::sync::Arc;

/// Answers one embedding request, input by input, so that streams get their steps in between.
pub async fn handle(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<EmbeddingResponse>, ApiError> {
    app.check_room()?;
    let request: EmbeddingRequest = read_json(&app, request).await?;
    validate(&request, &app.model, &app.limits)?;
    let pooling = pooling(&request);
    let (mut data, mut tokens) = (Vec::new(), 0);
    for (input, index) in inputs(&app, &request).await?.into_iter().zip(0..) {
        tokens += input.len() as u64;
        let made = app.link.embed(input, pooling).await.map_err(|r| app.refused(r))?;
        let made = match made {
            None => {
                let text = "the loaded model gives no embeddings";
                return Err(ApiError::not_supported(text));
            }
            Some(Err(why)) => return Err(ApiError::internal(why)),
            Some(Ok(made)) => made,
        };
        let embedding = vector(&request, made);
        data.push(Embedding { object: "embedding".into(), index, embedding });
    }
    Ok(Json(EmbeddingResponse {
        object: "list".into(),
        data,
        model: app.model.name.clone(),
        usage: EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens },
    }))
}
