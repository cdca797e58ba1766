//! HTTP: routes, middleware (API keys, request ids, metrics, logging) and connections.

pub(crate) mod auth;
mod base64;
mod body;
pub(crate) mod conn;
pub(crate) mod cors;
mod fields;
mod health;
pub mod host;
mod preface;
pub(crate) mod shape;
pub(crate) mod sse;
mod streams;
mod two;
pub mod upgrade;
mod write_timeout;

pub(crate) use body::{RequestBody, parse, read_json, receive};
pub(crate) use fields::Refused;

use crate::admin;
use crate::anthropic;
use crate::app::App;
use crate::error::ApiError;
use crate::fleet;
use crate::link::VERSION;
use crate::ollama;
use crate::openai::{chat, completions, embeddings, models, new_id, responses, score, tokenize};
use crate::{live, openapi, page};
use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use fields::Ignored;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tracing::Instrument;

/// All routes, with the shared state.
pub(crate) fn router(app: Arc<App>) -> Router {
    let operator = if app.admin { admin::routes(&app) } else { Router::new() };
    let routes = Router::new()
        .merge(operator)
        .route("/v1/chat/completions", post(chat::handler::handle))
        .route("/v1/completions", post(completions::handler::handle))
        .route("/v1/embeddings", post(embeddings::handler::handle))
        .route("/v1/rerank", post(score::handler::rerank))
        .route("/v2/rerank", post(score::handler::rerank))
        .route("/rerank", post(score::handler::rerank))
        .route("/v1/score", post(score::handler::score))
        .route("/score", post(score::handler::score))
        .route("/v1/classify", post(score::handler::classify))
        .route("/classify", post(score::handler::classify))
        .route("/v1/responses", post(responses::handler::create))
        .route(
            "/v1/responses/{id}",
            get(responses::handler::retrieve).delete(responses::handler::delete),
        )
        .route("/v1/messages", post(anthropic::handler::messages))
        .route("/v1/messages/count_tokens", post(anthropic::handler::count_tokens))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .route("/api/chat", post(ollama::handler::chat_route))
        .route("/api/generate", post(ollama::handler::generate_route))
        .route("/api/embed", post(ollama::embed::handle))
        .route("/api/tags", get(ollama::tags::list))
        .route("/tokenizer_info", get(tokenize::handler::info))
        .route("/ping", get(health::ready).post(health::ready))
        .route("/tokenize", post(tokenize::handler::tokenize))
        .route("/detokenize", post(tokenize::handler::detokenize))
        .route("/health", get(health::ready))
        .route("/health/live", get(health::live))
        .route("/health/ready", get(health::ready))
        .route("/metrics", get(metrics))
        .route("/get_server_info", get(fleet::server_info))
        .route("/get_model_info", get(fleet::model_info))
        .route("/v1/loads", get(fleet::loads))
        .route("/get_load", get(fleet::old_loads))
        .route("/openapi.json", get(openapi::serve))
        .route("/live", get(live::stream))
        .route("/live/graph", get(live::graph))
        .route("/live/plan", get(live::plan))
        .route("/", get(page::index))
        .route("/{file}", get(page::file))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method);
    routes.layer(from_fn_with_state(app.clone(), middleware)).with_state(app)
}

async fn no_route(uri: Uri) -> ApiError {
    ApiError::no_route(uri.path())
}

async fn no_method(method: Method) -> ApiError {
    ApiError::method(method.as_str())
}

async fn metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let text = app.metrics.text(&app.link, app.ready().is_ok());
    let text =
        text.map_err(|_| ApiError::internal("internal error: encoding the metrics failed"))?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// A JSON response of about `bytes` bytes; a large one is encoded on a worker thread.
pub(crate) async fn write_json<T: serde::Serialize + Send + 'static>(
    app: &App,
    bytes: usize,
    answer: T,
) -> Result<Response, ApiError> {
    let text = app.compute(bytes, move || serde_json::to_vec(&answer)).await?;
    let text =
        text.map_err(|_| ApiError::internal("internal error: encoding the response failed"))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}

/// The API that a path belongs to; it decides the format of errors.
enum Api {
    OpenAi,
    Anthropic,
    Ollama,
}

fn api_of(path: &str) -> Api {
    if path == "/v1/messages" || path.starts_with("/v1/messages/") {
        Api::Anthropic
    } else if path.starts_with("/api/") {
        Api::Ollama
    } else {
        Api::OpenAi
    }
}

/// Runs for every request: sets its id, checks host name and API key, counts and logs it.
async fn middleware(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = request_id(&request);
    let method = request.method().clone();
    let path = request.uri().path().to_string();
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_string());
    let route = route.unwrap_or_else(|| "none".into());
    let open = route.starts_with("/health") || route == "/ping";
    let name = id.to_str().unwrap_or("").to_string();
    let span = tracing::info_span!("request", id = name);
    let ignored = Arc::new(Ignored::default());
    request.extensions_mut().insert(ignored.clone());
    let origin = app.origins.of(&request);
    let preflight = origin.as_ref().and_then(|_| cors::preflight(&request));
    let version = Arc::new(AtomicU64::new(app.link.weight_version()));
    let mut counted = Counted { app: app.clone(), route: route.clone(), answered: false };
    let mut response = match (app.hosts.check(&request), preflight) {
        (Err(e), _) => e.into_response(),
        (Ok(()), Some(preflight)) => preflight,
        (Ok(()), None) => match app.keys.check(request.headers()) {
            Err(e) if !open => auth::refuse(&request, e),
            caller => {
                request.extensions_mut().insert(caller.unwrap_or_default());
                let run = next.run(request).instrument(span);
                VERSION.scope(version.clone(), run).await
            }
        },
    };
    counted.answered = true;
    if let Some(error) = response.extensions().get::<ApiError>() {
        let body = match api_of(&path) {
            Api::OpenAi => None,
            Api::Anthropic => Some(anthropic::error::body(error)),
            Api::Ollama => Some(ollama::error::body(error)),
        };
        if let Some(body) = body {
            response.headers_mut().remove(header::CONTENT_LENGTH);
            *response.body_mut() = Body::from(body.to_string());
        }
    }
    let status = response.status().as_u16();
    app.metrics.answered(&route, status);
    let ms = began.elapsed().as_secs_f64() * 1e3;
    if status >= 500 {
        tracing::warn!(id = name, %method, route, status, ms);
    } else if open || route == "/metrics" {
        tracing::debug!(id = name, %method, route, status, ms);
    } else {
        tracing::info!(id = name, %method, route, status, ms);
    }
    let headers = response.headers_mut();
    headers.insert("x-request-id", id);
    headers.insert("x-weight-version", HeaderValue::from(version.load(Ordering::Relaxed)));
    if let Some(origin) = origin {
        cors::allow(origin, headers);
    }
    if let Some((count, names)) = ignored.list() {
        app.metrics.ignored(&route, count);
        if let Ok(names) = HeaderValue::try_from(names) {
            headers.insert("x-ignored-fields", names);
        }
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// The status that is counted for a request whose client left before the response began.
const CLIENT_LEFT: u16 = 499;

/// Counts a request that is dropped before it is answered.
pub(crate) struct Counted {
    /// Where it is counted.
    pub(crate) app: Arc<App>,
    /// Its route.
    pub(crate) route: String,
    /// Whether it was answered, and counted by that.
    pub(crate) answered: bool,
}

impl Drop for Counted {
    fn drop(&mut self) {
        if !self.answered {
            self.app.metrics.answered(&self.route, CLIENT_LEFT);
        }
    }
}

/// The id from `x-request-id` if it is short plain ASCII, else a new one.
fn request_id(request: &Request) -> HeaderValue {
    let given = request.headers().get("x-request-id").filter(|id| {
        let plain = |b: &u8| b.is_ascii_alphanumeric() || b"-_.:".contains(b);
        (1..=128).contains(&id.len()) && id.as_bytes().iter().all(plain)
    });
    match given {
        Some(id) => id.clone(),
        None => HeaderValue::try_from(new_id("req")).unwrap_or(HeaderValue::from_static("req")),
    }
}
