//! The OpenAI API. Every route is a folder of `types` (the JSON types), `validate` (checks),
//! `convert` (to engine requests) and `handler` (the HTTP handler).

pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod models;
pub mod sampling;
pub(crate) mod tokenize;
pub mod usage;
mod whole;

use crate::app::Model;
use crate::config::Limits;
use crate::error::ApiError;
use crate::http::{RequestBody, parse};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

impl RequestBody for chat::types::ChatRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = true;
}

impl RequestBody for completions::types::CompletionRequest {
    const TOKEN_IDS: bool = true;
    const NEEDS_ENGINE: bool = true;
}

impl RequestBody for embeddings::types::EmbeddingRequest {
    const TOKEN_IDS: bool = true;
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
        "/v1/chat/completions" => chat::validate::validate(&parse(body, limits)?, model, limits),
        "/v1/completions" => completions::validate::validate(&parse(body, limits)?, model, limits),
        "/v1/embeddings" => embeddings::validate::validate(&parse(body, limits)?, model, limits),
        "/tokenize" => tokenize::validate::tokenize(&parse(body, limits)?, model, limits),
        "/detokenize" => tokenize::validate::detokenize(&parse(body, limits)?, model, limits),
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
