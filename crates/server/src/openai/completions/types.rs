//! What completions look like on the wire.

use crate::describe::{Describe, Schemas, api_type, token_id};
use crate::openai::sampling::generation_type;
use crate::openai::usage::UsageBody;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

generation_type! {
    /// Text to be continued.
    pub struct CompletionRequest {
        /// The text: a string, token ids, or a list of either.
        pub prompt: Prompt,
        /// The model; if given, the one that is served.
        pub model: Option<String>,
        /// Report log-probabilities of the tokens, with this many alternatives.
        pub logprobs: Option<u32> = {"minimum": 0, "maximum": 20},
        /// Put the prompt before the answer.
        pub echo: Option<bool>,
        /// Text that should follow the answer; not supported.
        pub suffix: Option<String> = {"maxLength": 0},
    }
}

/// One prompt or several, as text or as token ids.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a string, a list of token ids, or a list of either")]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Several texts.
    Texts(Vec<String>),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Several lists of token ids.
    TokenLists(Vec<Vec<u32>>),
}

impl Describe for Prompt {
    fn describe(_: &mut Schemas) -> Value {
        let text = json!({"type": "string", "minLength": 1});
        let tokens = json!({"type": "array", "items": token_id(), "minItems": 1});
        json!({"anyOf": [
            text,
            {"type": "array", "items": text, "minItems": 1, "maxItems": 256},
            tokens,
            {"type": "array", "items": tokens, "minItems": 1, "maxItems": 256},
        ]})
    }
}

api_type! {
    /// The answers.
    pub struct CompletionResponse {
        /// This answer's name.
        pub id: String,
        /// Always `text_completion`.
        pub object: String,
        /// When it was made, in seconds since 1970.
        pub created: u64,
        /// The model.
        pub model: String,
        /// `n` for each prompt, in the order of the prompts.
        pub choices: Vec<CompletionChoice>,
        /// Tokens that it cost; in a stream only in the last chunk, when asked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub usage: Option<UsageBody>,
    }
}

api_type! {
    /// One answer, or more of it in a stream.
    pub struct CompletionChoice {
        /// Its place among all answers.
        pub index: u32,
        /// The text.
        pub text: String,
        /// When asked for.
        pub logprobs: Option<CompletionLogprobs>,
        /// `stop` or `length`; null while a stream goes on.
        pub finish_reason: Option<String>,
    }
}

api_type! {
    /// Log-probabilities, as four lists of one length.
    pub struct CompletionLogprobs {
        /// The tokens as text.
        pub tokens: Vec<String>,
        /// Their natural-log probabilities; null for a prompt's first.
        pub token_logprobs: Vec<Option<f32>>,
        /// The likeliest tokens at each place.
        pub top_logprobs: Vec<Option<Map<String, Value>>>,
        /// Where in the text each token begins, in characters.
        pub text_offset: Vec<u64>,
    }
}
