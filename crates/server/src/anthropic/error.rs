//! Errors in Anthropic's format: `{"type": "error", "error": {type, message}}`.

use crate::describe::api_type;
use crate::error::ApiError;
use serde_json::{Value, json};

api_type! {
    /// The error.
    pub struct AnthropicError {
        /// The class of error.
        #[serde(rename = "type")]
        pub kind: String,
        /// A description of the error.
        pub message: String,
    }
}

api_type! {
    /// The body of every error response of Anthropic's API.
    pub struct AnthropicErrorResponse {
        /// Always `error`.
        #[serde(rename = "type")]
        pub kind: String,
        /// The error.
        pub error: AnthropicError,
    }
}

/// The JSON body of an error.
pub(crate) fn body(error: &ApiError) -> Value {
    let kind = match error.status.as_u16() {
        401 => "authentication_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message}})
}
