//! Errors in OpenAI's format: `{"error": {message, type, param, code}}` and a status.

use crate::describe::api_type;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use text::TextError;

api_type! {
    /// The error.
    pub struct ErrorBody {
        /// A description of the error.
        pub message: String,
        /// The class of error.
        #[serde(rename = "type")]
        pub kind: String,
        /// The request field that caused the error.
        pub param: Option<String>,
        /// The error code.
        pub code: Option<String>,
    }
}

api_type! {
    /// The body of every error response.
    pub struct ErrorResponse {
        /// The error.
        pub error: ErrorBody,
    }
}

/// An error response.
#[derive(Clone, Debug)]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// OpenAI's `code`.
    pub code: Option<&'static str>,
    /// The request field that caused the error.
    pub param: Option<String>,
    /// A description of the error.
    pub message: String,
    /// Seconds for the `Retry-After` header.
    pub retry_after: Option<u32>,
}

/// The longest message or field name in characters; both may quote input of any length.
const MAX_CHARS: usize = 300;

/// Truncates a long text.
fn short(text: String) -> String {
    match text.char_indices().nth(MAX_CHARS) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let message = short(message.into());
        Self { status, kind, code: None, param: None, message, retry_after: None }
    }

    /// 400: a field is invalid.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let param = param.into();
        let mut e = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        e.param = (!param.is_empty()).then_some(short(param));
        e
    }

    /// 400: the text has too many tokens; the exact number is unknown.
    pub(crate) fn too_many(param: &str, message: impl Into<String>) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    /// 400: the text of the request field `param` cannot be tokenized or is too long.
    pub(crate) fn text(error: TextError, param: &str) -> Self {
        match error {
            TextError::TooManyBytes { bytes, most } => Self::too_many(
                param,
                format!(
                    "the prompt has {bytes} bytes, which is more than {most} tokens can hold; at \
                     most {most} tokens are allowed"
                ),
            ),
            TextError::TooLong { most } => Self::too_many(
                param,
                format!("the prompt has too many tokens; at most {most} are allowed"),
            ),
            other => Self::invalid(param, other.to_string()),
        }
    }

    /// 400: the prompt is longer than the context.
    pub fn too_long(param: &str, found: u64, allowed: u64) -> Self {
        let text = format!("the prompt has {found} tokens; at most {allowed} fit in the context");
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, text) }
    }

    /// 401: the API key is missing or wrong.
    pub fn unauthorized(message: &str) -> Self {
        let mut e = Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message);
        e.code = Some("invalid_api_key");
        e
    }

    /// 403: a web page of another origin may not do this.
    pub(crate) fn foreign_page() -> Self {
        let text = "pages of this origin may not do that; start the server with --allow-origin";
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", text)
    }

    /// 404: the request names another model.
    pub(crate) fn no_model(asked: &str, served: &str) -> Self {
        let text = format!("the model {asked:?} does not exist; this server has {served:?}");
        let mut e = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", text);
        e.code = Some("model_not_found");
        e.param = Some("model".into());
        e
    }

    /// 404: something that the request names does not exist.
    pub(crate) fn not_found(param: &str, message: impl Into<String>) -> Self {
        let mut e = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message);
        e.param = Some(param.into());
        e
    }

    /// 404: no such route.
    pub(crate) fn no_route(path: &str) -> Self {
        let text = format!("{path} does not exist; see /openapi.json for the routes");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", text)
    }

    /// 405: the route has other methods.
    pub fn method(method: &str) -> Self {
        let text = format!("the method {method} is not allowed on this route");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", text)
    }

    /// 408: the body did not arrive in time.
    pub fn timeout(ms: u64) -> Self {
        let text = format!("the body did not arrive within {ms} ms");
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", text)
    }

    /// 413: the body is too large.
    pub(crate) fn body_too_large(limit: u64) -> Self {
        let text = format!("the body is larger than {limit} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", text)
    }

    /// 415: the body is not declared as JSON.
    pub(crate) fn not_json() -> Self {
        let text = "send the body as JSON, with the header content-type: application/json";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", text)
    }

    /// 415: the body is compressed.
    pub(crate) fn encoded() -> Self {
        let text = "send the body uncompressed, without a content-encoding header";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", text)
    }

    /// 421: the name in the `Host` header is not accepted.
    pub(crate) fn misdirected(host: &str) -> Self {
        let text = format!(
            "the host name {host:?} is not accepted; use an IP address or localhost, or start the \
             server with --allowed-host"
        );
        Self::new(StatusCode::MISDIRECTED_REQUEST, "invalid_request_error", text)
    }

    /// 431: the request has too many headers.
    pub(crate) fn headers(limit: usize) -> Self {
        let text = format!("the request has more than {limit} headers");
        Self::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "invalid_request_error", text)
    }

    /// 503: too many streams are open on all connections together.
    pub(crate) fn streams() -> Self {
        let mut e = Self::unavailable("too many connections");
        e.code = Some("too_many_connections");
        e
    }

    /// 429: a limit is reached; the client should retry.
    pub(crate) fn too_much(message: impl Into<String>) -> Self {
        let mut e = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        e.code = Some("rate_limit_exceeded");
        e.retry_after = Some(1);
        e
    }

    /// 429: too many requests are in flight; the client should retry.
    pub fn busy(inflight: u64) -> Self {
        Self::too_much(format!(
            "{inflight} requests are in flight, which is the limit; retry later"
        ))
    }

    /// 500: an internal error.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 501: the loaded model or backend does not support it.
    pub(crate) fn not_supported(message: impl Into<String>) -> Self {
        let mut e = Self::new(StatusCode::NOT_IMPLEMENTED, "not_supported_error", message);
        e.code = Some("not_supported");
        e
    }

    /// 501: the loaded model has no embeddings.
    pub(crate) fn no_embeddings() -> Self {
        Self::not_supported("the loaded model does not support embeddings")
    }

    /// 501: the loaded model generates no text.
    pub(crate) fn no_generation() -> Self {
        Self::not_supported("the loaded model makes vectors of texts; it does not generate text")
    }

    /// 503: the engine is not running, or the server is shutting down.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        let mut e = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        e.code = Some("unavailable");
        e.retry_after = Some(1);
        e
    }

    /// The JSON body.
    pub fn body(&self) -> ErrorResponse {
        ErrorResponse {
            error: ErrorBody {
                message: self.message.clone(),
                kind: self.kind.into(),
                param: self.param.clone(),
                code: self.code.map(Into::into),
            },
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        // For the middleware, which writes it in the format of the route's API.
        response.extensions_mut().insert(self);
        response
    }
}
