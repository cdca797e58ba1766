//! Reads request bodies as JSON: bounded in size, time and shape, parsed on a worker thread if
//! large, with errors that name the field.

use super::fields::{Ignored, Refused, unknown};
use super::shape::check_body;
use crate::app::App;
use crate::budget::Lease;
use crate::config::Limits;
use crate::describe::{Describe, Fields, Schemas, fill};
use crate::error::ApiError;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use http_body::{Body as _, Frame};
use serde::de::DeserializeOwned;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// The most bytes read of a refused body.
const DISCARD_BYTES: usize = 16 << 20;
/// The longest time spent reading a refused body.
const DISCARD_TIME: Duration = Duration::from_millis(500);

/// The body type of a route.
pub(crate) trait RequestBody: DeserializeOwned + Describe + Fields + Send + 'static {
    /// Whether the body may have lists of token ids; then numbers do not count as values.
    const TOKEN_IDS: bool;
    /// Whether the route needs the engine; then it is refused before the body is read if the engine
    /// cannot accept requests.
    const NEEDS_ENGINE: bool;
    /// Fields that are refused unless they have no effect.
    const REFUSED: &'static [Refused] = &[];
    /// Fields that are accepted and never have an effect.
    const NO_EFFECT: &'static [&'static str] = &[];
}

/// Reads the body, parses it as `T` and runs `work` on it. A large body is processed on a worker
/// thread and counts against the body budget until `work` returns.
pub(crate) async fn read_json<T: RequestBody, R: Send + 'static>(
    app: &Arc<App>,
    request: Request,
    work: impl FnOnce(&App, T) -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    let (head, mut body) = request.into_parts();
    let mut lease = app.bodies.lease();
    let received = match T::NEEDS_ENGINE {
        true => app.check_room(),
        false => Ok(()),
    };
    let received = match received.and_then(|()| check_headers(&head.headers)) {
        Ok(()) => receive(&mut body, &app.limits, &mut lease).await,
        Err(e) => Err(e),
    };
    let bytes = match received {
        Ok(bytes) => bytes,
        Err(e) => {
            drop(lease);
            discard(body).await;
            return Err(e);
        }
    };
    let ignored = head.extensions.get::<Arc<Ignored>>().cloned();
    let (shared, length) = (app.clone(), bytes.len());
    let job = move || {
        let _until_done = lease;
        let Parsed { value, ignored: names } = parse(&bytes, &shared.limits)?;
        if let Some(ignored) = ignored {
            ignored.set(names);
        }
        drop(bytes);
        work(&shared, value)
    };
    app.compute(length, job).await?
}

fn check_headers(headers: &HeaderMap) -> Result<(), ApiError> {
    // A web page of another origin cannot post JSON without a CORS preflight.
    let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
    let kind = kind.unwrap_or("").split(';').next().unwrap_or("").trim();
    if !kind.eq_ignore_ascii_case("application/json") && !kind.ends_with("+json") {
        return Err(ApiError::not_json());
    }
    match headers.get(header::CONTENT_ENCODING) {
        Some(coding) if !coding.as_bytes().eq_ignore_ascii_case(b"identity") => {
            Err(ApiError::encoded())
        }
        _ => Ok(()),
    }
}

/// Receives the body within the time limit. A declared length is used only to refuse the body
/// early.
pub(crate) async fn receive(
    body: &mut Body,
    limits: &Limits,
    lease: &mut Lease,
) -> Result<Vec<u8>, ApiError> {
    if body.size_hint().lower() > limits.body_bytes {
        return Err(ApiError::body_too_large(limits.body_bytes));
    }
    let time = Duration::from_millis(limits.body_ms);
    let bytes = tokio::time::timeout(time, collect(body, limits, lease)).await;
    bytes.map_err(|_| ApiError::timeout(limits.body_ms))?
}

async fn collect(body: &mut Body, limits: &Limits, lease: &mut Lease) -> Result<Vec<u8>, ApiError> {
    let limit = limits.body_bytes;
    let timeout = Duration::from_millis(limits.body_wait_ms);
    let mut bytes = Vec::new();
    while let Some(frame) = next_frame(body).await {
        let Ok(frame) = frame else {
            return Err(ApiError::invalid("", "the connection closed before the end of the body"));
        };
        let Ok(data) = frame.into_data() else { continue };
        if (bytes.len() + data.len()) as u64 > limit {
            return Err(ApiError::body_too_large(limit));
        }
        if !lease.grow(data.len() as u64, timeout).await {
            let budget = limits.body_budget_bytes;
            return Err(ApiError::too_much(format!(
                "bodies of {budget} bytes are being processed, which is the limit; retry later"
            )));
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

async fn next_frame(body: &mut Body) -> Option<Result<Frame<Bytes>, axum::Error>> {
    std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await
}

/// Reads the rest of a refused body for a short time, because a client that is still sending when
/// the connection closes never reads the error.
async fn discard(mut body: Body) {
    let all = async {
        let mut bytes = 0;
        while let Some(Ok(frame)) = next_frame(&mut body).await {
            bytes += frame.data_ref().map_or(0, Bytes::len);
            if bytes > DISCARD_BYTES {
                break;
            }
        }
    };
    let _ = tokio::time::timeout(DISCARD_TIME, all).await;
}

/// A parsed body.
pub(crate) struct Parsed<T> {
    /// Its content.
    pub(crate) value: T,
    /// The names of fields that were ignored.
    pub(crate) ignored: Vec<String>,
}

/// Parses JSON; an error names the field and what was expected there.
pub(crate) fn parse<T: RequestBody>(bytes: &[u8], limits: &Limits) -> Result<Parsed<T>, ApiError> {
    check_body(bytes, limits, !T::TOKEN_IDS)
        .map_err(|error| ApiError::invalid("", error.to_string()))?;
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value: T = serde_path_to_error::deserialize(&mut reader).map_err(|e| {
        let path = e.path().to_string();
        let error = e.inner();
        if error.is_syntax() || error.is_eof() {
            return not_json(error);
        }
        match path.as_str() {
            "." => ApiError::invalid("", place(error)),
            path => {
                let text = range::<T>(path, error, limits);
                let text = text.unwrap_or_else(|| format!("{path}: {}", place(error)));
                ApiError::invalid(path, text)
            }
        }
    })?;
    reader.end().map_err(|error| not_json(&error))?;
    Ok(Parsed { value, ignored: unknown::<T>(bytes)? })
}

fn not_json(error: &serde_json::Error) -> ApiError {
    ApiError::invalid("", format!("the body is not JSON: {}", place(error)))
}

/// The message of an error; in a body of one line, its place is a column.
fn place(error: &serde_json::Error) -> String {
    error.to_string().replace(" at line 1 column ", " at column ")
}

/// The message for a number that is no number or out of range: the range of its field.
fn range<T: RequestBody>(path: &str, error: &serde_json::Error, limits: &Limits) -> Option<String> {
    let text = error.to_string();
    let (found, expected) = text.strip_prefix("invalid ")?.split_once(", expected ")?;
    let (_, found) = found.split_once(": ")?;
    let expected = expected.split(' ').next()?;
    let kind = match expected {
        "u32" | "u64" | "i64" => "an integer",
        "f32" | "f64" => "a number",
        _ => return None,
    };
    let mut all = Schemas::default();
    let reference = T::describe(&mut all);
    let name = reference["$ref"].as_str()?.rsplit('/').next()?;
    let mut field = all.0.get(name)?["properties"].get(path)?.clone();
    fill(&mut field, u32::MAX, None, limits);
    let inner = field["anyOf"].get(0).unwrap_or(&field);
    let (least, most) = (inner.get("minimum")?, inner.get("maximum")?);
    let found = found.trim_start_matches("integer ").trim_start_matches("floating point ");
    let found = found.trim_matches('`');
    Some(format!("{path} must be {kind} between {least} and {most}, not {found}"))
}
