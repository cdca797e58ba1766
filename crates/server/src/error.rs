//! Errors as OpenAI's clients expect them: `{"error": {message, type, param, code}}` and a status.

use crate::describe::api_type;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

api_type! {
    /// What went wrong.
    pub struct ErrorBody {
        /// In words.
        pub message: String,
        /// The class of error.
        #[serde(rename = "type")]
        pub kind: String,
        /// The field at fault.
        pub param: Option<String>,
        /// The error's name, for programs.
        pub code: Option<String>,
    }
}

api_type! {
    /// The body of every answer that is not a success.
    pub struct ErrorResponse {
        /// What went wrong.
        pub error: ErrorBody,
    }
}

/// An error on its way to a client.
#[derive(Clone, Debug)]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// OpenAI's `code`.
    pub code: Option<&'static str>,
    /// The field at fault.
    pub param: Option<String>,
    /// In words.
    pub message: String,
    /// Seconds, as a hint to come back.
    pub retry_after: Option<u32>,
}

/// Characters of a message or of a field's name that a client is told: what it sent may be part of
/// it, at any length.
const SHOWN: usize = 300;

/// The beginning of a text that is too long to repeat.
fn short(text: String) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let message = short(message.into());
        Self { status, kind, code: None, param: None, message, retry_after: None }
    }

    /// 400: a field is wrong.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let param = param.into();
        let mut e = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        e.param = (!param.is_empty()).then_some(short(param));
        e
    }

    /// 400: the text became more tokens than fit, however many there are.
    pub fn too_many(param: &str, message: impl Into<String>) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    /// 400: the prompt does not fit.
    pub fn too_long(param: &str, found: u64, allowed: u64) -> Self {
        let text = format!("the prompt has {found} tokens; at most {allowed} fit in the context");
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, text) }
    }

    /// 401: no key, or a wrong one.
    pub fn unauthorized(message: &str) -> Self {
        let mut e = Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message);
        e.code = Some("invalid_api_key");
        e
    }

    /// 404: another model is served here.
    pub fn no_model(asked: &str, served: &str) -> Self {
        let text = format!("the model {asked:?} is not served here; this is {served:?}");
        let mut e = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", text);
        e.code = Some("model_not_found");
        e.param = Some("model".into());
        e
    }

    /// 404: no such address.
    pub fn no_route(path: &str) -> Self {
        let text = format!("there is nothing at {path}; see /openapi.json for what there is");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", text)
    }

    /// 405: the address takes another method.
    pub fn method(method: &str) -> Self {
        let text = format!("{method} is not understood at this address");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", text)
    }

    /// 408: the body did not arrive in time.
    pub fn timeout(ms: u64) -> Self {
        let text = format!("the body did not arrive within {ms} ms");
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", text)
    }

    /// 413: the body is over the limit.
    pub fn body_too_large(limit: u64) -> Self {
        let text = format!("the body is larger than {limit} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", text)
    }

    /// 415: not JSON.
    pub fn not_json() -> Self {
        let text = "send the body as JSON, with the header content-type: application/json";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", text)
    }

    /// 415: compressed.
    pub fn encoded() -> Self {
        let text = "send the body as it is, without a content-encoding";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", text)
    }

    /// 421: this name is not served.
    pub fn misdirected(host: &str) -> Self {
        let text = format!(
            "the name {host:?} is not served here; use an IP address or localhost, or start the \
             server with --allowed-host"
        );
        Self::new(StatusCode::MISDIRECTED_REQUEST, "invalid_request_error", text)
    }

    /// 429: as many bytes are being worked on as may be; come back.
    pub fn too_much(message: impl Into<String>) -> Self {
        let mut e = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        e.code = Some("rate_limit_exceeded");
        e.retry_after = Some(1);
        e
    }

    /// 429: full; come back.
    pub fn busy(inflight: u64) -> Self {
        Self::too_much(format!("{inflight} requests are in flight, which is the limit; try again"))
    }

    /// 500: ours to mend.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 501: the loaded backend cannot.
    pub fn not_supported(message: impl Into<String>) -> Self {
        let mut e = Self::new(StatusCode::NOT_IMPLEMENTED, "not_supported_error", message);
        e.code = Some("not_supported");
        e
    }

    /// 501: the loaded model makes no vectors.
    pub fn no_embeddings() -> Self {
        Self::not_supported("the loaded model gives no embeddings")
    }

    /// 503: the engine is down, starting, or the server is going away.
    pub fn unavailable(message: impl Into<String>) -> Self {
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
        response
    }
}
