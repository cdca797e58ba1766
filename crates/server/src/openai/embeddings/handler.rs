//! What happens when an embedding request comes in.

use super::convert::{convert, vector};
use super::types::{Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage};
use super::validate::validate;
use crate::answer::rejected;
use crate::app::App;
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::http::{read_json, write_json};
use crate::link::{Call, Reader, Reply};
use axum::extract::{Request, State};
use axum::response::Response;
use engine::request::{Finish, Output};
use std::sync::Arc;

/// Answers one embedding request. Its inputs share steps with each other and with streams.
pub async fn handle(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let caller = Caller::of(&request);
    let work = move |app: &App, request: EmbeddingRequest| {
        validate(&request, &app.model, &app.limits)?;
        if app.model.embedding.is_none() {
            return Err(ApiError::no_embeddings());
        }
        let coded = request.encoding_format.as_deref() == Some("base64");
        Ok((convert(&app.model, &request, caller)?, coded))
    };
    let (requests, coded) = read_json(&app, request, work).await?;
    let tokens = requests.iter().map(|request| request.prompt.len() as u64).sum();
    let count = requests.len();
    let vectors = gather(app.submit(requests, Reader::Server)?, count).await?;
    let bytes = vectors.iter().map(|vector| vector.len() * NUMBER_BYTES).sum();
    let one = move |(made, index): (Vec<f32>, u32)| Embedding {
        object: "embedding".into(),
        index,
        embedding: vector(coded, made),
    };
    let response = EmbeddingResponse {
        object: "list".into(),
        data: vectors.into_iter().zip(0..).map(one).collect(),
        model: app.model.name.clone(),
        usage: EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens },
    };
    write_json(&app, bytes, response).await
}

/// A number of a vector as JSON, about.
const NUMBER_BYTES: usize = 12;

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
