//! Handles rerank, score and classify requests.

use super::convert::{Pairs, pairs, scores, single};
use super::types::{
    Classified, ClassifyRequest, ClassifyResponse, Document, Ranked, RerankRequest, RerankResponse,
    ScoreRequest, ScoreResponse, Scored,
};
use super::validate;
use crate::app::{App, Scorer};
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::http::{read_json, write_json};
use crate::openai::embeddings::handler::compute;
use crate::openai::embeddings::types::EmbeddingUsage;
use crate::openai::{new_id, unix_time};
use axum::extract::{Request, State};
use axum::response::Response;
use std::sync::Arc;

/// Approximate bytes of a score in JSON.
const SCORE_BYTES: usize = 64;

/// Orders documents.
pub(crate) async fn rerank(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::of(&request);
    let work = move |app: &App, request: RerankRequest| {
        validate::rerank(&request, &app.model, &app.limits)?;
        let texts = Pairs {
            first: vec![request.query.as_str()],
            second: request.documents.iter().map(|document| document.text()).collect(),
            instruction: request.instruction.as_deref(),
            names: ["query", "documents"],
        };
        Ok((pairs(&app.model, caller, &texts)?, request))
    };
    let (requests, asked) = read_json(&app, request, work).await?;
    let (vectors, tokens) = compute(&app, requests).await?;
    let scores = scores(&app.model, &vectors, asked.documents.len())?;
    let shown = asked.return_documents == Some(true);
    let bytes = SCORE_BYTES * scores.len();
    let text = asked.documents.iter().filter(|_| shown).map(|d| d.text().len()).sum::<usize>();
    let mut results: Vec<Ranked> = (0..)
        .zip(scores)
        .zip(asked.documents)
        .map(|((index, relevance_score), document)| Ranked {
            index,
            relevance_score,
            document: shown.then(|| Document::Object { text: document.text().to_owned() }),
        })
        .collect();
    // Equal scores keep the order of the request.
    results.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
    results.truncate(asked.top_n.map_or(usize::MAX, |n| n as usize));
    let response = RerankResponse {
        id: new_id("rerank"),
        model: app.model.name.clone(),
        usage: EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens },
        results,
    };
    write_json(&app, bytes + text, response).await
}

/// Scores pairs of texts.
pub(crate) async fn score(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::of(&request);
    let work = move |app: &App, request: ScoreRequest| {
        validate::score(&request, &app.model, &app.limits)?;
        let texts = Pairs {
            first: request.text_1.list().iter().map(String::as_str).collect(),
            second: request.text_2.list().iter().map(String::as_str).collect(),
            instruction: request.instruction.as_deref(),
            names: ["text_1", "text_2"],
        };
        Ok((pairs(&app.model, caller, &texts)?, texts.second.len()))
    };
    let (requests, count) = read_json(&app, request, work).await?;
    let (vectors, tokens) = compute(&app, requests).await?;
    let scores = scores(&app.model, &vectors, count)?;
    let one = |(index, score)| Scored { index, object: "score".into(), score };
    let response = ScoreResponse {
        id: new_id("score"),
        object: "list".into(),
        created: unix_time(),
        model: app.model.name.clone(),
        data: (0..).zip(scores).map(one).collect(),
        usage: EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens },
    };
    write_json(&app, SCORE_BYTES * count, response).await
}

/// Classifies texts.
pub(crate) async fn classify(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::of(&request);
    let work = move |app: &App, request: ClassifyRequest| {
        validate::classify(&request, &app.model, &app.limits)?;
        let (truncate, limits) = (request.truncate_prompt_tokens, Some(&app.limits));
        let one = |text: &String| single(&app.model, caller, "input", text, truncate, limits);
        request.input.list().iter().map(one).collect::<Result<Vec<_>, ApiError>>()
    };
    let requests = read_json(&app, request, work).await?;
    let (vectors, tokens) = compute(&app, requests).await?;
    let Some(scorer @ Scorer::Classes { labels, .. }) = &app.model.scorer else {
        return Err(ApiError::invalid("model", "the loaded model is not a classifier"));
    };
    let bytes = vectors.len() * labels.len().max(1) * 12;
    let one = |(index, logits): (u32, &Vec<f32>)| {
        let probs = scorer.probabilities(logits);
        let best = (0..probs.len()).max_by(|a, b| probs[*a].total_cmp(&probs[*b])).unwrap_or(0);
        let label = labels.get(best).cloned().unwrap_or_default();
        Classified { index, label, num_classes: probs.len() as u32, probs }
    };
    let response = ClassifyResponse {
        id: new_id("classify"),
        object: "list".into(),
        created: unix_time(),
        model: app.model.name.clone(),
        data: (0..).zip(&vectors).map(one).collect(),
        usage: EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens },
    };
    write_json(&app, bytes, response).await
}
