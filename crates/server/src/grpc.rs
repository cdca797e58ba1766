//! vLLM's gRPC services on the same engine: `vllm.Inference` and `vllm.Control` as the crate `vllm-proto` has them, and
//! gRPC's health check. Routers such as Dynamo's sidecar use them instead of HTTP.
//!
//! Connections, keys, limits and draining are those of HTTP: [`router`] is served by the same code. A request becomes a
//! completion ([`convert`]); its tokens come back as they are made, with text ([`generate`]).

mod control;
mod convert;
mod generate;
mod health;
mod running;
mod status;

use crate::app::App;
use crate::http::{Counted, receive};
use crate::kv_events::KvEvents;
use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, StatusCode, Version};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use control::Control;
use generate::Inference;
use health::Health;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tonic::service::Routes;
use tonic_health::pb::health_server::HealthServer;
use vllm_proto::control_server::ControlServer;
use vllm_proto::inference_server::InferenceServer;

/// What the services say about this server.
pub(crate) struct Described {
    /// A folder with the tokenizer, or the model's name.
    pub(crate) model_id: String,
    /// Where changes of the prefix cache are published: as bound.
    pub(crate) kv_events: Option<KvEvents>,
}

/// The host name or address by which the client reached this server.
#[derive(Clone)]
struct Reached(Option<String>);

/// When the client gives up.
#[derive(Clone, Copy)]
struct Patience(Option<Duration>);

/// All services.
pub(crate) fn router(app: Arc<App>, described: Described) -> Router {
    let most = usize::try_from(app.limits.body_bytes).unwrap_or(usize::MAX);
    let described = Arc::new(described);
    let inference = Inference::new(app.clone(), described.clone());
    let control = Control::new(app.clone(), described, inference.running());
    let routes = Routes::new(InferenceServer::new(inference).max_decoding_message_size(most))
        .add_service(ControlServer::new(control).max_decoding_message_size(most))
        .add_service(HealthServer::new(Health::new(app.clone())));
    routes.into_axum_router().layer(from_fn_with_state(app, middleware))
}

/// Runs for every call: checks the API key, receives the message within the limits, counts and logs.
async fn middleware(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_string());
    let route = route.unwrap_or_else(|| "none".into());
    let method = request.uri().path().to_string();
    let mut counted = Counted { app: app.clone(), route: route.clone(), answered: false };
    let response = answer(&app, request, next).await;
    counted.answered = true;
    let status = status::http_of(&response);
    app.metrics.answered(&route, status);
    let ms = began.elapsed().as_secs_f64() * 1e3;
    match status {
        500.. => tracing::warn!(method, status, ms, "grpc"),
        _ if is_health(&method) => tracing::debug!(method, status, ms, "grpc"),
        _ => tracing::info!(method, status, ms, "grpc"),
    }
    response
}

fn is_health(path: &str) -> bool {
    path.starts_with("/grpc.health.v1.Health/")
}

async fn answer(app: &Arc<App>, request: Request, next: Next) -> Response {
    // A web page can send HTTP/1 only, and must not get through.
    if request.version() != Version::HTTP_2 {
        return StatusCode::HTTP_VERSION_NOT_SUPPORTED.into_response();
    }
    let caller = match app.keys.check(request.headers()) {
        Err(error) if !is_health(request.uri().path()) => return status::refuse(&error),
        caller => caller.unwrap_or_default(),
    };
    let (mut head, mut body) = request.into_parts();
    let patience = match patience(&head.headers) {
        Ok(patience) => patience,
        Err(status) => return status.into_http(),
    };
    head.extensions.insert(caller);
    head.extensions.insert(patience);
    head.extensions.insert(Reached(head.uri.host().map(Into::into)));
    // Until the message is parsed and converted.
    let mut lease = app.bodies.lease();
    match receive(&mut body, &app.limits, &mut lease).await {
        Ok(bytes) => next.run(Request::from_parts(head, Body::from(bytes))).await,
        Err(error) => status::refuse(&error),
    }
}

/// The time of `grpc-timeout`: at most eight digits and a unit.
fn patience(headers: &HeaderMap) -> Result<Patience, tonic::Status> {
    let Some(value) = headers.get("grpc-timeout") else { return Ok(Patience(None)) };
    let parse = || {
        let text = value.to_str().ok()?;
        let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        let plain = (1..=8).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
        let count: u64 = digits.parse().ok().filter(|_| plain)?;
        Some(match unit {
            "H" => Duration::from_secs(3600 * count),
            "M" => Duration::from_secs(60 * count),
            "S" => Duration::from_secs(count),
            "m" => Duration::from_millis(count),
            "u" => Duration::from_micros(count),
            "n" => Duration::from_nanos(count),
            _ => return None,
        })
    };
    match parse() {
        Some(time) => Ok(Patience(Some(time))),
        None => Err(tonic::Status::invalid_argument("grpc-timeout is not a time")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().unwrap());
            patience(&headers).ok().and_then(|patience| patience.0)
        };
        assert_eq!(read("250m"), Some(Duration::from_millis(250)));
        assert_eq!(read("99999999H"), Some(Duration::from_secs(3600 * 99_999_999)));
        for wrong in ["", "5", "m", "123456789m", "+5m", "5x", "5.0S"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
        assert!(patience(&HeaderMap::new()).is_ok_and(|patience| patience.0.is_none()));
    }
}
