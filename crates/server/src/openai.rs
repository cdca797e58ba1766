//! The OpenAI API. Every route is a folder of `types` (the JSON types), `validate` (checks),
//! `convert` (to engine requests) and `handler` (the HTTP handler).

pub mod chat;
pub mod completions;
pub mod embeddings;
mod fields;
pub mod models;
pub mod prompt_logprobs;
pub mod responses;
pub mod sampling;
pub mod score;
pub mod structured;
pub(crate) mod tokenize;
mod truncate;
pub mod usage;
pub(crate) mod whole;

use crate::app::Model;
use crate::config::Limits;
use crate::error::ApiError;
use crate::http::{Refused, RequestBody, parse};
use crate::ollama::convert::Generate;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

impl RequestBody for chat::types::ChatRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = true;
    const REFUSED: &'static [Refused] = fields::GENERATION;
    const NO_EFFECT: &'static [&'static str] = fields::NO_EFFECT;
}

impl RequestBody for completions::types::CompletionRequest {
    const TOKEN_IDS: bool = true;
    const NEEDS_ENGINE: bool = true;
    const REFUSED: &'static [Refused] = fields::GENERATION;
    const NO_EFFECT: &'static [&'static str] = fields::NO_EFFECT;
}

impl RequestBody for embeddings::types::EmbeddingRequest {
    const TOKEN_IDS: bool = true;
    const NEEDS_ENGINE: bool = true;
}

impl RequestBody for score::types::RerankRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = true;
}

impl RequestBody for score::types::ScoreRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = true;
}

impl RequestBody for score::types::ClassifyRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = true;
}

impl RequestBody for tokenize::types::TokenizeRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = false;
}

impl RequestBody for tokenize::types::DetokenizeRequest {
    const TOKEN_IDS: bool = true;
    const NEEDS_ENGINE: bool = false;
}

/// Parses and validates a body as its route would, for fuzzing and for checking stored requests. A
/// path without a body is an error.
pub fn check(path: &str, body: &[u8], model: &Model, limits: &Limits) -> Result<(), ApiError> {
    match path {
        "/v1/chat/completions" => {
            chat::validate::validate(&parse(body, limits)?.value, model, limits)
        }
        "/v1/completions" => {
            completions::validate::validate(&parse(body, limits)?.value, model, limits)
        }
        "/v1/embeddings" => {
            embeddings::validate::validate(&parse(body, limits)?.value, model, limits)
        }
        "/v1/rerank" => score::validate::rerank(&parse(body, limits)?.value, model, limits),
        "/v1/score" => score::validate::score(&parse(body, limits)?.value, model, limits),
        "/v1/classify" => score::validate::classify(&parse(body, limits)?.value, model, limits),
        "/v1/responses" => {
            let request = parse::<responses::types::ResponsesRequest>(body, limits)?.value;
            let messages = responses::convert::messages(&request.input)?;
            let request = responses::convert::chat(&request, messages)?;
            chat::validate::validate(&request, model, limits)
        }
        "/v1/messages" => {
            let request = crate::anthropic::convert::chat(parse(body, limits)?.value)?;
            chat::validate::validate(&request, model, limits)
        }
        "/v1/messages/count_tokens" => {
            let request = crate::anthropic::convert::counted(parse(body, limits)?.value)?;
            chat::validate::validate(&request, model, limits)
        }
        "/api/chat" => {
            let request = crate::ollama::convert::chat(parse(body, limits)?.value)?;
            chat::validate::validate(&request, model, limits)
        }
        "/api/generate" => match crate::ollama::convert::generate(parse(body, limits)?.value)? {
            Generate::Chat(request) => chat::validate::validate(&request, model, limits),
            Generate::Raw(request) => completions::validate::validate(&request, model, limits),
        },
        "/api/embed" => {
            let request = crate::ollama::embed::convert(model, limits, parse(body, limits)?.value)?;
            embeddings::validate::validate(&request, model, limits)
        }
        "/tokenize" => tokenize::validate::tokenize(&parse(body, limits)?.value, model, limits),
        "/detokenize" => tokenize::validate::detokenize(&parse(body, limits)?.value, model, limits),
        other => Err(ApiError::no_route(other)),
    }
}

/// A random number; not for secrets.
pub(crate) fn random() -> u64 {
    // The standard library seeds `RandomState` from the operating system.
    RandomState::new().build_hasher().finish()
}

/// A new unique id such as `chatcmpl-…`.
pub(crate) fn new_id(kind: &str) -> String {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let process = PROCESS.get_or_init(random);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{kind}-{process:016x}{count:08x}")
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |t| t.as_secs())
}
