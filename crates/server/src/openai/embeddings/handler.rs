//! What happens when an embedding request comes in.

use super::convert::{convert, vector};
use super::types::{Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage};
use super::validate::validate;
use crate::answer::rejected;
use crate::app::App;
use crate::error::ApiError;
use crate::http::read_json;
use crate::link::{Call, Reader, Reply};
use axum::Json;
use axum::extract::{Request, State};
use engine::request::{Finish, Output};
use std::sync::Arc;

/// Answers one embedding request. Its inputs share steps with each other and with streams.
pub async fn handle(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<EmbeddingResponse>, ApiError> {
    app.check_room()?;
    let request: EmbeddingRequest = read_json(&app, request).await?;
    validate(&request, &app.model, &app.limits)?;
    if app.model.embedding.is_none() {
        return Err(ApiError::no_embeddings());
    }
    let requests = convert(&app, &request).await?;
    let tokens = requests.iter().map(|request| request.prompt.len() as u64).sum();
    let count = requests.len();
    let vectors = gather(app.submit(requests, Reader::Server)?, count).await?;
    let one = |(made, index): (Vec<f32>, u32)| Embedding {
        object: "embedding".into(),
        index,
        embedding: vector(&request, made),
    };
    Ok(Json(EmbeddingResponse {
        object: "list".into(),
        data: vectors.into_iter().zip(0..).map(one).collect(),
        model: app.model.name.clone(),
        usage: EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens },
    }))
}

/// The vectors of a call, in the order of its requests.
async fn gather(mut call: Call, count: usize) -> Result<Vec<Vec<f32>>, ApiError> {
    let mut vectors = vec![Vec::new(); count];
    let mut open = count;
    while open > 0 {
        let lost = || ApiError::internal("the engine ended without a vector");
        match call.next().await.ok_or_else(lost)? {
            Reply::Lost { why, .. } => return Err(ApiError::unavailable(why)),
            Reply::Output(Output::Rejected { reason, .. }) => return Err(rejected(reason)),
            Reply::Output(Output::Embedded { id, vector }) => vectors[call.position(id)] = vector,
            Reply::Output(Output::Finished { finish: Finish::Failed(why), .. }) => {
                return Err(ApiError::internal(format!("the device failed: {why}")));
            }
            Reply::Output(Output::Finished { id, .. }) => {
                if vectors[call.position(id)].is_empty() {
                    return Err(ApiError::unavailable("the request was cancelled"));
                }
                open -= 1;
            }
            Reply::Output(Output::Prefilled { .. } | Output::Token { .. }) => {}
        }
    }
    call.done();
    Ok(vectors)
}
