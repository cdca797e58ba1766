//! JSON types of embeddings.

use crate::describe::{Describe, Schemas, api_type};
use crate::openai::completions::types::{Prompt, prompts};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

api_type! {
    /// Texts to embed.
    pub struct EmbeddingRequest {
        /// A string, token ids, or a list of either.
        pub input: Prompt = {"anyOf": prompts("limit inputs")},
        /// The model; optional, must be the served one.
        pub model: Option<String>,
        /// Numbers, or little-endian 32-bit floats in base64.
        pub encoding_format: Option<String> = {"enum": ["float", "base64"]},
        /// The width of the vectors: that of the model, or less for a model that only makes vectors.
        pub dimensions: Option<u32> = {"enum": (crate::describe::VOCAB)},
        /// How the token vectors are combined. An extension.
        pub pooling: Option<String> = {"enum": ["mean", "last"]},
        /// Keep only this many tokens at the end of each input; -1 keeps as many as fit. An
        /// extension.
        pub truncate_prompt_tokens: Option<i64> = {"minimum": -1},
        /// Accepted and ignored.
        pub user: Option<String>,
    }
}

api_type! {
    /// The vectors.
    pub struct EmbeddingResponse {
        /// Always `list`.
        pub object: String,
        /// One for each input, in order.
        pub data: Vec<Embedding>,
        /// The model.
        pub model: String,
        /// Token counts.
        pub usage: EmbeddingUsage,
    }
}

api_type! {
    /// One vector.
    pub struct Embedding {
        /// Always `embedding`.
        pub object: String,
        /// The position of the input.
        pub index: u32,
        /// The vector.
        pub embedding: Vector,
    }
}

/// A vector in the requested encoding.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Vector {
    /// Numbers.
    Float(Vec<f32>),
    /// Little-endian 32-bit floats, in base64.
    Base64(String),
}

impl Describe for Vector {
    fn describe(_: &mut Schemas) -> Value {
        json!({"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]})
    }
}

api_type! {
    /// Token counts of an embedding request.
    pub struct EmbeddingUsage {
        /// Tokens of the inputs.
        pub prompt_tokens: u64,
        /// Equal to `prompt_tokens`.
        pub total_tokens: u64,
    }
}
