//! JSON types of rerank, score and classify.

use crate::describe::{Describe, Schemas, api_type};
use crate::openai::embeddings::types::EmbeddingUsage;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// One text or several.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Texts {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

impl Texts {
    /// All of them.
    pub(crate) fn list(&self) -> &[String] {
        match self {
            Texts::One(text) => std::slice::from_ref(text),
            Texts::Many(texts) => texts,
        }
    }
}

impl Describe for Texts {
    fn describe(_: &mut Schemas) -> Value {
        json!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
    }
}

/// A document: its text, or an object with its text.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Document {
    /// The text.
    Text(String),
    /// An object.
    Object {
        /// The text.
        text: String,
    },
}

impl Document {
    /// Its text.
    pub(crate) fn text(&self) -> &str {
        match self {
            Document::Text(text) | Document::Object { text } => text,
        }
    }
}

impl Describe for Document {
    fn describe(_: &mut Schemas) -> Value {
        let text = json!({"type": "string"});
        let object =
            json!({"type": "object", "properties": {"text": text.clone()}, "required": ["text"]});
        json!({"anyOf": [text, object]})
    }
}

api_type! {
    /// Documents to order by how well they answer a query.
    pub struct RerankRequest {
        /// The model; optional, must be the served one.
        pub model: Option<String>,
        /// The query.
        pub query: String,
        /// The documents.
        pub documents: Vec<Document> = {"minItems": 1},
        /// Return only this many, the best ones.
        pub top_n: Option<u32> = {"minimum": 1},
        /// Whether to return the documents' texts; false by default.
        pub return_documents: Option<bool>,
        /// What a document is judged by, for models that take an instruction. An extension.
        pub instruction: Option<String>,
    }
}

api_type! {
    /// The documents, best first.
    pub struct RerankResponse {
        /// The id of the request.
        pub id: String,
        /// The model.
        pub model: String,
        /// Token counts.
        pub usage: EmbeddingUsage,
        /// One for each document, best first.
        pub results: Vec<Ranked>,
    }
}

api_type! {
    /// A document's place.
    pub struct Ranked {
        /// Its position in the request.
        pub index: u32,
        /// How well it answers the query.
        pub relevance_score: f32,
        /// Its text, if requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub document: Option<Document>,
    }
}

api_type! {
    /// Pairs of texts to score.
    pub struct ScoreRequest {
        /// The model; optional, must be the served one.
        pub model: Option<String>,
        /// The first text of each pair; one text goes with all of `text_2`.
        pub text_1: Texts,
        /// The second text of each pair.
        pub text_2: Texts,
        /// What a pair is judged by, for models that take an instruction. An extension.
        pub instruction: Option<String>,
    }
}

api_type! {
    /// The scores.
    pub struct ScoreResponse {
        /// The id of the request.
        pub id: String,
        /// Always `list`.
        pub object: String,
        /// Seconds since 1970.
        pub created: u64,
        /// The model.
        pub model: String,
        /// One for each pair, in order.
        pub data: Vec<Scored>,
        /// Token counts.
        pub usage: EmbeddingUsage,
    }
}

api_type! {
    /// The score of a pair.
    pub struct Scored {
        /// The position of the pair.
        pub index: u32,
        /// Always `score`.
        pub object: String,
        /// The score.
        pub score: f32,
    }
}

api_type! {
    /// Texts to classify.
    pub struct ClassifyRequest {
        /// The model; optional, must be the served one.
        pub model: Option<String>,
        /// A text or a list of texts.
        pub input: Texts,
        /// Keep only this many tokens of each text; -1 keeps as many as fit. An extension.
        pub truncate_prompt_tokens: Option<i64> = {"minimum": -1},
    }
}

api_type! {
    /// The classes.
    pub struct ClassifyResponse {
        /// The id of the request.
        pub id: String,
        /// Always `list`.
        pub object: String,
        /// Seconds since 1970.
        pub created: u64,
        /// The model.
        pub model: String,
        /// One for each text, in order.
        pub data: Vec<Classified>,
        /// Token counts.
        pub usage: EmbeddingUsage,
    }
}

api_type! {
    /// The class of a text.
    pub struct Classified {
        /// The position of the text.
        pub index: u32,
        /// The likeliest label.
        pub label: String,
        /// The probability of each label.
        pub probs: Vec<f32>,
        /// The number of labels.
        pub num_classes: u32,
    }
}
