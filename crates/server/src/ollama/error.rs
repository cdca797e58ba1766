//! Errors in Ollama's format: `{"error": message}`.

use crate::describe::api_type;
use crate::error::ApiError;
use serde_json::{Value, json};

api_type! {
    /// The body of every error response of Ollama's API.
    pub struct OllamaError {
        /// A description of the error.
        pub error: String,
    }
}

/// The JSON body of an error.
pub(crate) fn body(error: &ApiError) -> Value {
    json!({"error": error.message})
}
