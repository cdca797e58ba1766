//! What embeddings look like on the wire.

use crate::describe::{Describe, Schemas, api_type};
use crate::openai::completions::types::Prompt;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

api_type! {
    /// Texts to be made vectors.
    pub struct EmbeddingRequest {
        /// A string, token ids, or a list of either.
        pub input: Prompt,
        /// The model; if given, the one that is served.
        pub model: Option<String>,
        /// Numbers, or their bytes in base64.
        pub encoding_format: Option<String> = {"enum": ["float", "base64"]},
        /// The vector's width; only the model's own.
        pub dimensions: Option<u32> = {"enum": (crate::describe::VOCAB)},
        /// How token vectors become one. An extension.
        pub pooling: Option<String> = {"enum": ["mean", "last"]},
        /// Who is asking; kept for nobody.
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
        /// Tokens that it cost.
        pub usage: EmbeddingUsage,
    }
}

api_type! {
    /// One vector.
    pub struct Embedding {
        /// Always `embedding`.
        pub object: String,
        /// Which input.
        pub index: u32,
        /// The vector.
        pub embedding: Vector,
    }
}

/// A vector, as asked for.
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
    /// Tokens that the embeddings cost.
    pub struct EmbeddingUsage {
        /// Of the inputs.
        pub prompt_tokens: u64,
        /// The same.
        pub total_tokens: u64,
    }
}
