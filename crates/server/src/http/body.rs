//! A request's body as JSON: bounded in size and time, and with errors that name the field.

use crate::app::App;
use crate::error::ApiError;
use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use http_body::Body as _;
use serde::de::DeserializeOwned;
use std::pin::Pin;
use std::time::Duration;

/// Reads the whole body and makes a `T` of it.
pub(crate) async fn read_json<T: DeserializeOwned>(
    app: &App,
    request: Request,
) -> Result<T, ApiError> {
    // A page of another origin can post without asking only if it does not claim to send JSON.
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
    let kind = kind.unwrap_or("").split(';').next().unwrap_or("").trim();
    let json = kind.eq_ignore_ascii_case("application/json") || kind.ends_with("+json");
    if !json {
        return Err(ApiError::not_json());
    }
    let limit = app.limits.body_bytes;
    let body = request.into_body();
    if body.size_hint().lower() > limit {
        return Err(ApiError::body_too_large(limit));
    }
    let time = Duration::from_millis(app.limits.body_ms);
    let bytes = tokio::time::timeout(time, collect(body, limit)).await;
    parse(&bytes.map_err(|_| ApiError::timeout(app.limits.body_ms))??)
}

async fn collect(mut body: Body, limit: u64) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::with_capacity(body.size_hint().lower().min(limit) as usize);
    loop {
        let frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
        match frame {
            None => return Ok(bytes),
            Some(Err(_)) => return Err(ApiError::invalid("", "the body broke off")),
            Some(Ok(frame)) => {
                let Ok(data) = frame.into_data() else { continue };
                if (bytes.len() + data.len()) as u64 > limit {
                    return Err(ApiError::body_too_large(limit));
                }
                bytes.extend_from_slice(&data);
            }
        }
    }
}

/// Parses JSON; an error names the field and what was expected there.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|e| {
        let path = e.path().to_string();
        let path = if path == "." { String::new() } else { path };
        let message = match path.as_str() {
            "" => format!("the body is not understood: {}", e.inner()),
            path => format!("{path}: {}", e.inner()),
        };
        ApiError::invalid(path, message)
    })?;
    match reader.end() {
        Ok(()) => Ok(value),
        Err(e) => Err(ApiError::invalid("", format!("the body is not understood: {e}"))),
    }
}
