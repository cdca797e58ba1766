//! Handles embedding requests.

use super::convert::{convert, shorten, vector};
use super::types::{Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage};
use super::validate::validate;
use crate::answer::rejected;
use crate::app::App;
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::http::{read_json, write_json};
use crate::link::{Call, Consumer, Reply};
use axum::extract::{Request, State};
use axum::response::Response;
use engine::request::{Finish, Output, Request as EngineRequest};
use std::sync::Arc;

/// Answers one embedding request. Its inputs may run in the same steps as each other and as
/// streams.
pub(crate) async fn handle(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::of(&request);
    let work = move |app: &App, request: EmbeddingRequest| {
        let coded = request.encoding_format.as_deref() == Some("base64");
        Ok((prepare(app, &request, caller)?, coded, request.dimensions))
    };
    let (requests, coded, dimensions) = read_json(&app, request, work).await?;
    let (mut vectors, tokens) = compute(&app, requests).await?;
    vectors.iter_mut().for_each(|vector| shorten(vector, dimensions));
    let bytes = bytes(&vectors);
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

/// Checks and converts a request of this API or another.
pub(crate) fn prepare(
    app: &App,
    request: &EmbeddingRequest,
    caller: Caller,
) -> Result<Vec<EngineRequest>, ApiError> {
    validate(request, &app.model, &app.limits)?;
    if app.model.embedding.is_none() {
        return Err(ApiError::no_embeddings());
    }
    convert(&app.model, &app.limits, request, caller)
}

/// The vectors of a call, in order, and the number of its tokens.
pub(crate) async fn compute(
    app: &App,
    requests: Vec<EngineRequest>,
) -> Result<(Vec<Vec<f32>>, u64), ApiError> {
    let tokens = requests.iter().map(|request| request.prompt.len() as u64).sum();
    let count = requests.len();
    let call = app.submit(requests, None, Consumer::Server).await?;
    Ok((collect(call, count).await?, tokens))
}

/// Approximate bytes of vectors as JSON.
pub(crate) fn bytes(vectors: &[Vec<f32>]) -> usize {
    vectors.iter().map(|vector| vector.len() * NUMBER_BYTES).sum()
}

/// Approximate bytes of a number in JSON.
const NUMBER_BYTES: usize = 12;

/// The vectors of a call, in the order of its requests.
async fn collect(mut call: Call, count: usize) -> Result<Vec<Vec<f32>>, ApiError> {
    let mut vectors = vec![Vec::new(); count];
    let mut open = count;
    while open > 0 {
        let lost = || ApiError::internal("internal error: the engine returned no embedding");
        match call.next().await.ok_or_else(lost)? {
            Reply::Lost { why, .. } => return Err(ApiError::unavailable(why)),
            Reply::Output(Output::Rejected { reason, .. }) => return Err(rejected(reason)),
            Reply::Output(Output::Embedded { id, vector }) => vectors[call.position(id)] = vector,
            Reply::Output(Output::Finished { finish: Finish::Failed(why), .. }) => {
                return Err(ApiError::internal(format!("the request failed on the device: {why}")));
            }
            Reply::Output(Output::Finished { id, .. }) => {
                if vectors[call.position(id)].is_empty() {
                    return Err(ApiError::unavailable("the request was cancelled or timed out"));
                }
                open -= 1;
            }
            Reply::Output(Output::Prefilled { .. } | Output::Token { .. }) => {}
        }
    }
    call.done();
    Ok(vectors)
}
