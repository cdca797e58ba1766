//! JSON types of Ollama's API.

use crate::describe::{Describe, Schemas, api_type};
use crate::http::{Refused, RequestBody};
use crate::openai::sampling::{Stop, text_or_list};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

api_type! {
    /// A conversation to continue.
    pub struct OllamaChatRequest {
        /// The model; must be the served one, `:latest` may follow.
        pub model: Option<String>,
        /// The conversation so far.
        pub messages: Option<Vec<OllamaMessage>>,
        /// Functions the model may call.
        pub tools: Option<Vec<OllamaTool>> = {"maxItems": "limit tools"},
        /// `json`, or the schema of the answer.
        pub format: Option<Value> = {"type": ["string", "object"]},
        /// Sampling parameters and stop conditions.
        pub options: Option<Options>,
        /// Send the answer while it is generated; true by default.
        pub stream: Option<bool>,
        /// Whether the model reasons first: a boolean, or how much.
        pub think: Option<Value> = {"type": ["boolean", "string"]},
        /// Whether to return the log-probabilities of the answer's tokens.
        pub logprobs: Option<bool>,
        /// The number of alternatives per token.
        pub top_logprobs: Option<u32> = {"minimum": 0, "maximum": "limit top_logprobs"},
    }
}

impl RequestBody for OllamaChatRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = true;
    const NO_EFFECT: &'static [&'static str] = &["keep_alive"];
}

api_type! {
    /// A text to continue or a question to answer.
    pub struct OllamaGenerateRequest {
        /// The model; must be the served one, `:latest` may follow.
        pub model: Option<String>,
        /// The text.
        pub prompt: Option<String>,
        /// The system prompt.
        pub system: Option<String>,
        /// Whether the text is used as it is, without the chat template.
        pub raw: Option<bool>,
        /// `json`, or the schema of the answer.
        pub format: Option<Value> = {"type": ["string", "object"]},
        /// Sampling parameters and stop conditions.
        pub options: Option<Options>,
        /// Send the answer while it is generated; true by default.
        pub stream: Option<bool>,
        /// Whether the model reasons first: a boolean, or how much.
        pub think: Option<Value> = {"type": ["boolean", "string"]},
        /// Whether to return the log-probabilities of the answer's tokens.
        pub logprobs: Option<bool>,
        /// The number of alternatives per token.
        pub top_logprobs: Option<u32> = {"minimum": 0, "maximum": "limit top_logprobs"},
    }
}

const fn refused(name: &'static str, instead: &'static str) -> Refused {
    Refused { name, neutral: "null", instead }
}

impl RequestBody for OllamaGenerateRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = true;
    const REFUSED: &'static [Refused] = &[
        refused("context", "use /api/chat"),
        refused("images", "this model reads text only"),
        refused("suffix", "this model cannot fill in the middle"),
        refused("template", "the model's own template is used; see raw"),
    ];
    const NO_EFFECT: &'static [&'static str] = &["keep_alive"];
}

api_type! {
    /// One message of a conversation.
    pub struct OllamaMessage {
        /// The role of the author.
        pub role: String = {"enum": ["system", "user", "assistant", "tool"]},
        /// The text.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub content: Option<String>,
        /// The reasoning before the answer.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub thinking: Option<String>,
        /// Not supported.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub images: Option<Vec<String>> = {"maxItems": 0},
        /// The function calls of the assistant.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tool_calls: Option<Vec<OllamaCall>>,
        /// The name of the function whose result a tool's message is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tool_name: Option<String>,
    }
}

api_type! {
    /// A function call.
    pub struct OllamaCall {
        /// The call.
        pub function: OllamaFunctionCall,
    }
}

api_type! {
    /// A function name with arguments.
    pub struct OllamaFunctionCall {
        /// The name of the function.
        pub name: String,
        /// Its arguments.
        pub arguments: Option<Map<String, Value>>,
    }
}

api_type! {
    /// A function that the model may call.
    pub struct OllamaTool {
        /// `function`, which is the default.
        #[serde(rename = "type")]
        pub kind: Option<String> = {"enum": ["function"]},
        /// The function.
        pub function: OllamaFunction,
    }
}

api_type! {
    /// A function's description.
    pub struct OllamaFunction {
        /// Its name.
        pub name: String = {"minLength": 1, "maxLength": 256},
        /// What it does.
        pub description: Option<String>,
        /// The JSON schema of its arguments.
        pub parameters: Option<Map<String, Value>>,
    }
}

api_type! {
    /// Sampling parameters and stop conditions. Options of memory and threads have no effect: they
    /// are the server's.
    pub struct Options {
        /// The most tokens to generate; a negative number is as many as fit.
        pub num_predict: Option<i64>,
        /// 0 always picks the likeliest token; larger values are more random.
        pub temperature: Option<f32> = {"minimum": 0, "maximum": 2},
        /// Keep this many of the likeliest tokens; 0 keeps all.
        pub top_k: Option<i64>,
        /// Keep the smallest set of tokens with at least this probability.
        pub top_p: Option<f32> = {"minimum": 0, "maximum": 1},
        /// Drop tokens less likely than this share of the likeliest.
        pub min_p: Option<f32> = {"minimum": 0, "maximum": 1},
        /// Divide the logits of tokens seen before; 1 is off.
        pub repeat_penalty: Option<f32>,
        /// Subtracted for each earlier occurrence in the answer.
        pub frequency_penalty: Option<f32>,
        /// Subtracted once for a token that occurred in the answer.
        pub presence_penalty: Option<f32>,
        /// The seed for sampling.
        pub seed: Option<i64>,
        /// Strings that end the answer and are not part of it.
        pub stop: Option<Stop>,
        /// Not supported unless 0.
        pub mirostat: Option<f32>,
        /// Not supported unless 1.
        pub typical_p: Option<f32>,
        /// Not supported unless 1.
        pub tfs_z: Option<f32>,
    }
}

api_type! {
    /// The answer of a chat; in a stream, a part of it.
    pub struct OllamaChatResponse {
        /// The model.
        pub model: String,
        /// The time, as RFC 3339.
        pub created_at: String,
        /// The message, or its new part.
        pub message: OllamaMessage,
        /// Whether the answer is complete.
        pub done: bool,
    }
}

api_type! {
    /// The answer to a prompt; in a stream, a part of it.
    pub struct OllamaGenerateResponse {
        /// The model.
        pub model: String,
        /// The time, as RFC 3339.
        pub created_at: String,
        /// The text, or its new part.
        pub response: String,
        /// Whether the answer is complete.
        pub done: bool,
    }
}

api_type! {
    /// Texts to embed.
    pub struct OllamaEmbedRequest {
        /// The model; must be the served one, `:latest` may follow.
        pub model: Option<String>,
        /// A text or several.
        pub input: Texts,
        /// Whether the end of an input that is too long is dropped; true by default.
        pub truncate: Option<bool>,
        /// The width of the vectors; must be that of the model.
        pub dimensions: Option<u32>,
    }
}

impl RequestBody for OllamaEmbedRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = true;
    const NO_EFFECT: &'static [&'static str] = &["keep_alive", "options"];
}

/// A text or several.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Texts {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text_or_list(from, "a string or a list of strings", Self::One, Self::Many)
    }
}

impl Describe for Texts {
    fn describe(_: &mut Schemas) -> Value {
        let many =
            json!({"type": "array", "items": {"type": "string"}, "maxItems": "limit inputs"});
        json!({"anyOf": [{"type": "string"}, many]})
    }
}

api_type! {
    /// The vectors.
    pub struct OllamaEmbedResponse {
        /// The model.
        pub model: String,
        /// One for each input, in order.
        pub embeddings: Vec<Vec<f32>>,
        /// Nanoseconds.
        pub total_duration: u64,
        /// Always 0: the model is loaded.
        pub load_duration: u64,
        /// Tokens of the inputs.
        pub prompt_eval_count: u64,
    }
}

api_type! {
    /// The served models.
    pub struct TagList {
        /// The models.
        pub models: Vec<Tag>,
    }
}

api_type! {
    /// A served model.
    pub struct Tag {
        /// Its name.
        pub name: String,
        /// Its name.
        pub model: String,
        /// When the server started, as RFC 3339.
        pub modified_at: String,
        /// Always 0.
        pub size: u64,
        /// Always empty.
        pub digest: String,
        /// What is known about it.
        pub details: Map<String, Value>,
    }
}
