//! JSON types of Anthropic's messages.

use crate::describe::{Describe, Schemas, api_type};
use crate::http::{Refused, RequestBody};
use crate::openai::sampling::text_or_list;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

api_type! {
    /// A conversation to continue.
    pub struct MessagesRequest {
        /// The model; optional, must be the served one.
        pub model: Option<String>,
        /// The most tokens to generate.
        pub max_tokens: u32 = {"minimum": 1},
        /// The conversation so far. If the last message is the assistant's, the answer continues it.
        pub messages: Vec<InputMessage> = {"minItems": 1},
        /// The system prompt: text, or a list of text blocks.
        pub system: Option<Blocks>,
        /// Strings that end the answer and are not part of it.
        pub stop_sequences: Option<Vec<String>> = {"maxItems": "limit stops"},
        /// Send the answer while it is generated, as server-sent events.
        pub stream: Option<bool>,
        /// 0 always picks the likeliest token; larger values are more random.
        pub temperature: Option<f32> = {"minimum": 0, "maximum": 1},
        /// Keep the smallest set of tokens with at least this probability.
        pub top_p: Option<f32> = {"minimum": 0, "maximum": 1},
        /// Keep this many of the likeliest tokens.
        pub top_k: Option<u32> = {"minimum": 0, "maximum": 1_000_000},
        /// Functions the model may call.
        pub tools: Option<Vec<InputTool>> = {"maxItems": "limit tools"},
        /// Whether the model may, must, or must not call a function.
        pub tool_choice: Option<InputToolChoice>,
        /// Whether the model reasons first.
        pub thinking: Option<Thinking>,
        /// The format of the answer, and how much to reason.
        pub output_config: Option<OutputConfig>,
    }
}

const REFUSED: &[Refused] = &[
    Refused { name: "container", neutral: "null", instead: "this server runs no code" },
    Refused { name: "mcp_servers", neutral: "null", instead: "send the tools themselves" },
    Refused { name: "context_management", neutral: "null", instead: "send fewer messages" },
];

/// Fields that do not change an answer.
const NO_EFFECT: &[&str] = &[
    "cache_control",
    "diagnostics",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
];

impl RequestBody for MessagesRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = true;
    const REFUSED: &'static [Refused] = REFUSED;
    const NO_EFFECT: &'static [&'static str] = NO_EFFECT;
}

api_type! {
    /// A conversation whose tokens are counted.
    pub struct CountTokensRequest {
        /// The model; optional, must be the served one.
        pub model: Option<String>,
        /// The conversation.
        pub messages: Vec<InputMessage> = {"minItems": 1},
        /// The system prompt.
        pub system: Option<Blocks>,
        /// Functions the model may call.
        pub tools: Option<Vec<InputTool>> = {"maxItems": "limit tools"},
        /// Whether the model may, must, or must not call a function.
        pub tool_choice: Option<InputToolChoice>,
        /// Whether the model reasons first.
        pub thinking: Option<Thinking>,
        /// The format of the answer, and how much to reason.
        pub output_config: Option<OutputConfig>,
    }
}

impl RequestBody for CountTokensRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = false;
    const REFUSED: &'static [Refused] = REFUSED;
    const NO_EFFECT: &'static [&'static str] = NO_EFFECT;
}

api_type! {
    /// One message of a conversation.
    pub struct InputMessage {
        /// The role of the author.
        pub role: String = {"enum": ["user", "assistant"]},
        /// The content: text, or a list of blocks.
        pub content: Blocks,
    }
}

/// Text, or a list of blocks.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Blocks {
    /// Text.
    Text(String),
    /// Blocks.
    List(Vec<Block>),
}

impl<'de> Deserialize<'de> for Blocks {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text_or_list(from, "a string or a list of content blocks", Self::Text, Self::List)
    }
}

impl Describe for Blocks {
    fn describe(all: &mut Schemas) -> Value {
        json!({"anyOf": [{"type": "string"}, {"type": "array", "items": Block::describe(all)}]})
    }
}

api_type! {
    /// A block of a message; its type decides which other fields it has.
    pub struct Block {
        /// The kind of block.
        #[serde(rename = "type")]
        pub kind: String = {
            "enum": ["text", "thinking", "redacted_thinking", "tool_use", "tool_result"],
        },
        /// The text of `text`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub text: Option<String>,
        /// The reasoning of `thinking`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub thinking: Option<String>,
        /// The id of `tool_use`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub id: Option<String>,
        /// The name of the function of `tool_use`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// The arguments of `tool_use`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub input: Option<Map<String, Value>>,
        /// The id of the call that `tool_result` answers.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tool_use_id: Option<String>,
        /// The content of `tool_result`: text, or a list of text blocks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub content: Option<Blocks>,
        /// Whether `tool_result` is an error.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub is_error: Option<bool>,
    }
}

api_type! {
    /// A function that the model may call.
    pub struct InputTool {
        /// `custom` or nothing: the other kinds run on Anthropic's servers.
        #[serde(rename = "type")]
        pub kind: Option<String> = {"enum": ["custom"]},
        /// Its name.
        pub name: String = {"minLength": 1, "maxLength": 256},
        /// What it does.
        pub description: Option<String>,
        /// The JSON schema of its arguments.
        pub input_schema: Option<Map<String, Value>>,
    }
}

api_type! {
    /// Whether the model may, must, or must not call a function.
    pub struct InputToolChoice {
        /// The kind of choice.
        #[serde(rename = "type")]
        pub kind: String = {"enum": ["auto", "any", "tool", "none"]},
        /// The name of the function, for `tool`.
        pub name: Option<String>,
        /// Whether an answer has one call at most.
        pub disable_parallel_tool_use: Option<bool>,
    }
}

api_type! {
    /// Whether the model reasons first.
    pub struct Thinking {
        /// `disabled`, or a kind of reasoning.
        #[serde(rename = "type")]
        pub kind: String = {"enum": ["enabled", "disabled", "adaptive"]},
        /// The most tokens of reasoning, for `enabled` and less than `max_tokens`: after these the
        /// answer begins.
        pub budget_tokens: Option<u32> = {"minimum": 1024},
    }
}

api_type! {
    /// The format of the answer, and how much to reason.
    pub struct OutputConfig {
        /// How much to reason.
        pub effort: Option<String> = {"enum": ["low", "medium", "high", "xhigh", "max"]},
        /// The schema of the answer.
        pub format: Option<OutputFormat>,
    }
}

api_type! {
    /// The schema of the answer.
    pub struct OutputFormat {
        /// Always `json_schema`.
        #[serde(rename = "type")]
        pub kind: String = {"enum": ["json_schema"]},
        /// The schema.
        pub schema: Map<String, Value>,
    }
}

api_type! {
    /// The answer.
    pub struct MessagesResponse {
        /// The id of this response.
        pub id: String,
        /// Always `message`.
        #[serde(rename = "type")]
        pub kind: String,
        /// Always `assistant`.
        pub role: String,
        /// The model.
        pub model: String,
        /// The blocks of the answer.
        pub content: Vec<Value> = {"items": {"type": "object", "required": ["type"]}},
        /// Why the answer ended; null at the start of a stream.
        pub stop_reason: Option<String> = {
            "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"],
        },
        /// The stop sequence that ended it.
        pub stop_sequence: Option<String>,
        /// Token counts.
        pub usage: MessagesUsage,
    }
}

api_type! {
    /// Token counts.
    pub struct MessagesUsage {
        /// Tokens of the prompt that were computed.
        pub input_tokens: u64,
        /// Always 0: cached prefixes are found without being marked.
        pub cache_creation_input_tokens: u64,
        /// Tokens of the prompt that were found in the cache.
        pub cache_read_input_tokens: u64,
        /// Tokens of the answer.
        pub output_tokens: u64,
    }
}

api_type! {
    /// The tokens of a conversation.
    pub struct CountTokensResponse {
        /// Their number.
        pub input_tokens: u64,
    }
}

api_type! {
    /// An event of a stream; its type decides which other fields it has.
    pub struct MessagesEvent {
        /// The name of the event.
        #[serde(rename = "type")]
        pub kind: String,
    }
}
