//! JSON types of chat.

use crate::describe::{Describe, Schemas, api_type};
use crate::openai::prompt_logprobs::PromptLogprobs;
use crate::openai::sampling::{generation_type, text_or_list};
use crate::openai::usage::UsageBody;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use std::fmt;

generation_type! {
    /// A conversation to continue.
    pub struct ChatRequest {
        /// The conversation so far.
        pub messages: Vec<Message> = {"minItems": 1},
        /// The model; optional, must be the served one.
        pub model: Option<String>,
        /// The most tokens to generate; the newer name of `max_tokens`.
        pub max_completion_tokens: Option<u32> = {"minimum": 1},
        /// Whether to return the log-probabilities of the answer's tokens.
        pub logprobs: Option<bool>,
        /// The number of alternatives per token; more than 0 implies `logprobs`.
        pub top_logprobs: Option<u32> = {"minimum": 0, "maximum": "limit top_logprobs"},
        /// Functions the model may call.
        pub tools: Option<Vec<Tool>> = {"maxItems": "limit tools"},
        /// Whether the model may, must, or must not call a function.
        pub tool_choice: Option<ToolChoice>,
        /// Whether one answer may have several calls.
        pub parallel_tool_calls: Option<bool>,
        /// Variables for the chat template, such as `enable_thinking`; those set by the server
        /// cannot be replaced. An extension.
        pub chat_template_kwargs: Option<Map<String, Value>> = {"maxProperties": 64},
        /// How much to reason: a variable of the chat template. `none` also sets
        /// `enable_thinking` to false.
        pub reasoning_effort: Option<String> = {
            "enum": ["none", "minimal", "low", "medium", "high", "xhigh"],
        },
        /// The most tokens of reasoning: after these the answer begins. With a restriction of the
        /// answer the model reasons first. An extension.
        pub thinking_token_budget: Option<u32>,
        /// Whether the prompt ends with the start of the assistant's turn; true by default. An
        /// extension.
        pub add_generation_prompt: Option<bool>,
        /// Whether the answer continues the last message instead of a new one. An extension.
        pub continue_final_message: Option<bool>,
    }
}

api_type! {
    /// One message of a conversation.
    pub struct Message {
        /// The role of the author.
        pub role: String = {"enum": ["system", "developer", "user", "assistant", "tool"]},
        /// The content: text, or a list of text parts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub content: Option<Content>,
        /// The name of the author.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// The function calls of the assistant.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tool_calls: Option<Vec<ToolCall>>,
        /// The id of the call that a tool's message answers.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tool_call_id: Option<String>,
        /// The reasoning before the answer.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub reasoning_content: Option<String>,
    }
}

/// The content of a message.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Content {
    /// Text.
    Text(String),
    /// Text in parts.
    Parts(Vec<Part>),
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text_or_list(from, "a string or a list of content parts", Self::Text, Self::Parts)
    }
}

impl Content {
    /// Bytes of text.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Parts(parts) => parts.iter().map(|part| part.text().len()).sum(),
        }
    }
}

impl Part {
    /// The text; empty if there is none.
    pub(crate) fn text(&self) -> &str {
        self.text.as_deref().unwrap_or_default()
    }
}

impl Describe for Content {
    fn describe(all: &mut Schemas) -> Value {
        json!({"anyOf": [{"type": "string"}, {"type": "array", "items": Part::describe(all)}]})
    }
}

api_type! {
    /// A part of a message.
    pub struct Part {
        /// The kind of part.
        #[serde(rename = "type")]
        pub kind: String = {"enum": ["text"]},
        /// The text.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub text: Option<String>,
    }
}

api_type! {
    /// A function call of the assistant.
    pub struct ToolCall {
        /// Its id, which the tool's message repeats as `tool_call_id`.
        pub id: String,
        /// Always `function`.
        #[serde(rename = "type")]
        pub kind: String = {"enum": ["function"]},
        /// The call.
        pub function: FunctionCall,
    }
}

api_type! {
    /// A function name with arguments.
    pub struct FunctionCall {
        /// The name of the function.
        pub name: String,
        /// Its arguments, as JSON text.
        pub arguments: String,
    }
}

api_type! {
    /// A function that the model may call.
    pub struct Tool {
        /// Always `function`.
        #[serde(rename = "type")]
        pub kind: String = {"enum": ["function"]},
        /// The function.
        pub function: Function,
    }
}

api_type! {
    /// A function's description.
    pub struct Function {
        /// Its name.
        pub name: String = {"minLength": 1, "maxLength": 256},
        /// What it does.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub description: Option<String>,
        /// The JSON schema of its arguments.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub parameters: Option<Map<String, Value>>,
        /// Whether the arguments must satisfy the schema.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub strict: Option<bool>,
    }
}

/// Whether the model may, must, or must not call a function.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum ToolChoice {
    /// `none`, `auto` or `required`.
    Word(String),
    /// The named function.
    Named(NamedTool),
}

impl<'de> Deserialize<'de> for ToolChoice {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ToolChoiceVisitor;

        impl<'de> Visitor<'de> for ToolChoiceVisitor {
            type Value = ToolChoice;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"none\", \"auto\", \"required\" or a named function")
            }

            fn visit_str<E>(self, word: &str) -> Result<ToolChoice, E> {
                Ok(ToolChoice::Word(word.into()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ToolChoice, A::Error> {
                NamedTool::deserialize(MapAccessDeserializer::new(map)).map(ToolChoice::Named)
            }
        }

        from.deserialize_any(ToolChoiceVisitor)
    }
}

impl ChatRequest {
    /// Whether the response has log-probabilities.
    pub(crate) fn wants_logprobs(&self) -> bool {
        self.logprobs.unwrap_or(self.top_logprobs.is_some_and(|top| top > 0))
    }
}

impl Describe for ToolChoice {
    fn describe(all: &mut Schemas) -> Value {
        let words = json!({"type": "string", "enum": ["none", "auto", "required"]});
        json!({"anyOf": [words, NamedTool::describe(all)]})
    }
}

api_type! {
    /// The function that must be called; one of `tools`.
    pub struct NamedTool {
        /// Always `function`.
        #[serde(rename = "type")]
        pub kind: String = {"enum": ["function"]},
        /// Its name.
        pub function: NamedFunction,
    }
}

api_type! {
    /// A function by name.
    pub struct NamedFunction {
        /// The name.
        pub name: String,
    }
}

api_type! {
    /// The answers.
    pub struct ChatResponse {
        /// The id of this response.
        pub id: String,
        /// Always `chat.completion`.
        pub object: String,
        /// The creation time, in seconds since 1970.
        pub created: u64,
        /// The model.
        pub model: String,
        /// The `n` answers.
        pub choices: Vec<ChatChoice>,
        /// Token counts.
        pub usage: UsageBody,
        /// One entry per prompt token, null for the first, if requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub prompt_logprobs: Option<PromptLogprobs>,
        /// The prompt's tokens, if requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub prompt_token_ids: Option<Vec<u32>>,
    }
}

api_type! {
    /// One answer.
    pub struct ChatChoice {
        /// The position among the `n` answers.
        pub index: u32,
        /// The answer.
        pub message: AnswerMessage,
        /// Log-probabilities, if requested.
        pub logprobs: Option<ChatLogprobs>,
        /// `stop`, `length` or `tool_calls`.
        pub finish_reason: Option<String>,
        /// The answer's tokens, if requested, with the one that ended it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub token_ids: Option<Vec<u32>>,
    }
}

api_type! {
    /// The message of the assistant.
    pub struct AnswerMessage {
        /// Always `assistant`.
        pub role: String,
        /// The text; null if there are only function calls.
        pub content: Option<String>,
        /// The reasoning before the answer.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub reasoning_content: Option<String>,
        /// Always null; present for compatibility.
        pub refusal: Option<String>,
        /// The function calls.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tool_calls: Option<Vec<ToolCall>>,
    }
}

api_type! {
    /// Log-probabilities of an answer.
    pub struct ChatLogprobs {
        /// One entry per token.
        pub content: Vec<ChatLogprob>,
    }
}

api_type! {
    /// A token's log-probability.
    pub struct ChatLogprob {
        /// The token as text.
        pub token: String,
        /// Its natural-log probability.
        pub logprob: f32,
        /// The token's bytes.
        pub bytes: Vec<u32>,
        /// The likeliest tokens at this position.
        pub top_logprobs: Vec<TopLogprob>,
    }
}

api_type! {
    /// An alternative to a token.
    pub struct TopLogprob {
        /// The token as text.
        pub token: String,
        /// Its natural-log probability.
        pub logprob: f32,
        /// The token's bytes.
        pub bytes: Vec<u32>,
    }
}

api_type! {
    /// One event of a stream.
    pub struct ChatChunk {
        /// The id of the response, the same in every chunk.
        pub id: String,
        /// Always `chat.completion.chunk`.
        pub object: String,
        /// The creation time, in seconds since 1970.
        pub created: u64,
        /// The model.
        pub model: String,
        /// New parts of the answers; empty in the chunk with the usage.
        pub choices: Vec<ChunkChoice>,
        /// Token counts, in the last chunk if requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub usage: Option<UsageBody>,
        /// The prompt's tokens, in the first chunk if requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub prompt_token_ids: Option<Vec<u32>>,
    }
}

api_type! {
    /// A new part of one answer.
    pub struct ChunkChoice {
        /// The position among the `n` answers.
        pub index: u32,
        /// The new part.
        pub delta: ChunkDelta,
        /// Log-probabilities, if requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub logprobs: Option<ChatLogprobs>,
        /// Set in the last chunk of the answer.
        pub finish_reason: Option<String>,
        /// New tokens, if requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub token_ids: Option<Vec<u32>>,
    }
}

api_type! {
    /// The new part of an answer.
    pub struct ChunkDelta {
        /// `assistant`, in the first chunk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub role: Option<String>,
        /// New text.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub content: Option<String>,
        /// New reasoning.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub reasoning_content: Option<String>,
        /// New parts of function calls.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tool_calls: Option<Vec<ToolDelta>>,
    }
}

api_type! {
    /// A new part of a function call.
    pub struct ToolDelta {
        /// The position of the call in the answer.
        pub index: u32,
        /// The id of the call, in its first chunk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub id: Option<String>,
        /// `function`, in its first chunk.
        #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
        pub kind: Option<String>,
        /// The name (first chunk only) and a new part of the arguments.
        pub function: FunctionDelta,
    }
}

api_type! {
    /// A new part of a function call.
    pub struct FunctionDelta {
        /// The name, in the first chunk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// New JSON text.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub arguments: Option<String>,
    }
}
