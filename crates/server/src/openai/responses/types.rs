//! JSON types of responses.

use crate::describe::{Describe, Schemas, api_type};
use crate::http::{Refused, RequestBody};
use crate::openai::sampling::text_or_list;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

api_type! {
    /// A conversation to continue.
    pub struct ResponsesRequest {
        /// The model; optional, must be the served one.
        pub model: Option<String>,
        /// The new part of the conversation: text of the user, or a list of items.
        pub input: Input,
        /// The system prompt; that of an earlier response does not apply.
        pub instructions: Option<String>,
        /// The response that this one continues.
        pub previous_response_id: Option<String>,
        /// Whether the response is kept for `previous_response_id`; true by default.
        pub store: Option<bool>,
        /// The most tokens to generate.
        pub max_output_tokens: Option<u32> = {"minimum": 1},
        /// 0 always picks the likeliest token; larger values are more random.
        pub temperature: Option<f32> = {"minimum": 0, "maximum": 2},
        /// Keep the smallest set of tokens with at least this probability.
        pub top_p: Option<f32> = {"minimum": 0, "maximum": 1},
        /// The number of alternatives per token; more than 0 returns log-probabilities.
        pub top_logprobs: Option<u32> = {"minimum": 0, "maximum": "limit top_logprobs"},
        /// Additional data to return: `message.output_text.logprobs`.
        pub include: Option<Vec<String>>,
        /// Send the answer while it is generated, as server-sent events.
        pub stream: Option<bool>,
        /// Functions the model may call.
        pub tools: Option<Vec<ResponsesTool>> = {"maxItems": "limit tools"},
        /// `none`, `auto`, `required`, or `{"type": "function", "name": …}`.
        pub tool_choice: Option<Value> = {"type": ["string", "object"]},
        /// Whether one answer may have several calls.
        pub parallel_tool_calls: Option<bool>,
        /// The format of the answer.
        pub text: Option<TextConfig>,
        /// How much to reason.
        pub reasoning: Option<ReasoningConfig>,
        /// `disabled`: a prompt that is too long is an error.
        pub truncation: Option<String> = {"enum": ["disabled"]},
        /// Returned with the response.
        pub metadata: Option<Map<String, Value>>,
        /// Accepted and ignored.
        pub user: Option<String>,
    }
}

const fn refused(name: &'static str, instead: &'static str) -> Refused {
    Refused { name, neutral: "null", instead }
}

const REFUSED: &[Refused] = &[
    refused("background", "use stream"),
    refused("context_management", "send fewer items"),
    refused("conversation", "use previous_response_id"),
    refused("image", "this model writes text only"),
    refused("max_tool_calls", "the client runs the tools"),
    refused("moderation", "this server does not moderate"),
    refused("prompt", "send instructions and input"),
];

impl RequestBody for ResponsesRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = true;
    const REFUSED: &'static [Refused] = REFUSED;
    const NO_EFFECT: &'static [&'static str] = &[
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "stream_options",
    ];
}

/// Text of the user, or a list of items.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Input {
    /// Text.
    Text(String),
    /// Items.
    Items(Vec<Item>),
}

impl<'de> Deserialize<'de> for Input {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text_or_list(from, "a string or a list of items", Self::Text, Self::Items)
    }
}

impl Describe for Input {
    fn describe(all: &mut Schemas) -> Value {
        let items = json!({"type": "array", "minItems": 1, "items": Item::describe(all)});
        json!({"anyOf": [{"type": "string"}, items]})
    }
}

api_type! {
    /// An item of a conversation; its type decides which other fields it has.
    pub struct Item {
        /// The kind of item; `message` by default.
        #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
        pub kind: Option<String> = {
            "enum": ["message", "function_call", "function_call_output", "reasoning"],
        },
        /// The role of the author of a message.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub role: Option<String> = {"enum": ["system", "developer", "user", "assistant"]},
        /// The content of a message or of reasoning: text, or a list of parts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub content: Option<ItemContent>,
        /// The id of the call, of `function_call` and `function_call_output`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub call_id: Option<String>,
        /// The name of the function of `function_call`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// The arguments of `function_call`, as JSON text.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub arguments: Option<String>,
        /// The result of `function_call_output`: text, or a list of text parts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub output: Option<ItemContent>,
    }
}

/// Text, or a list of parts.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum ItemContent {
    /// Text.
    Text(String),
    /// Parts.
    Parts(Vec<ItemPart>),
}

impl<'de> Deserialize<'de> for ItemContent {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text_or_list(from, "a string or a list of content parts", Self::Text, Self::Parts)
    }
}

impl Describe for ItemContent {
    fn describe(all: &mut Schemas) -> Value {
        json!({"anyOf": [{"type": "string"}, {"type": "array", "items": ItemPart::describe(all)}]})
    }
}

api_type! {
    /// A part of an item.
    pub struct ItemPart {
        /// The kind of part.
        #[serde(rename = "type")]
        pub kind: String = {"enum": ["input_text", "output_text", "reasoning_text", "refusal"]},
        /// The text.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub text: Option<String>,
        /// The text of `refusal`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub refusal: Option<String>,
    }
}

api_type! {
    /// A function that the model may call.
    pub struct ResponsesTool {
        /// Always `function`: the other kinds run on OpenAI's servers.
        #[serde(rename = "type")]
        pub kind: String = {"enum": ["function"]},
        /// Its name.
        #[serde(default)]
        pub name: String = {"minLength": 1, "maxLength": 256},
        /// What it does.
        pub description: Option<String>,
        /// The JSON schema of its arguments.
        pub parameters: Option<Map<String, Value>>,
        /// Whether the arguments must satisfy the schema.
        pub strict: Option<bool>,
    }
}

api_type! {
    /// The format of the answer.
    pub struct TextConfig {
        /// Free text, any JSON object, or JSON that satisfies a schema.
        pub format: Option<TextFormat>,
    }
}

api_type! {
    /// The format of the answer.
    pub struct TextFormat {
        /// The kind of format.
        #[serde(rename = "type")]
        pub kind: String = {"enum": ["text", "json_object", "json_schema"]},
        /// The name of the schema.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub name: Option<String>,
        /// What the schema is for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub description: Option<String>,
        /// The schema, for `json_schema`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub schema: Option<Map<String, Value>>,
        /// Accepted and ignored: the schema is always enforced.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub strict: Option<bool>,
    }
}

api_type! {
    /// How much to reason.
    pub struct ReasoningConfig {
        /// A variable of the chat template.
        pub effort: Option<String> = {
            "enum": ["none", "minimal", "low", "medium", "high", "xhigh"],
        },
        /// Accepted and ignored: the reasoning itself is returned.
        pub summary: Option<String>,
    }
}

api_type! {
    /// A response.
    pub struct ResponsesResponse {
        /// Its id.
        pub id: String,
        /// Always `response`.
        pub object: String,
        /// The creation time, in seconds since 1970.
        pub created_at: u64,
        /// `in_progress`, `completed`, `incomplete` or `failed`.
        pub status: String,
        /// The error of a failed response.
        pub error: Option<Value>,
        /// Why it is incomplete.
        pub incomplete_details: Option<Value>,
        /// The system prompt.
        pub instructions: Option<String>,
        /// The most tokens to generate.
        pub max_output_tokens: Option<u32>,
        /// The model.
        pub model: String,
        /// The items of the answer.
        pub output: Vec<Value>,
        /// Whether one answer may have several calls.
        pub parallel_tool_calls: bool,
        /// The response that this one continues.
        pub previous_response_id: Option<String>,
        /// How much to reason.
        pub reasoning: Option<ReasoningConfig>,
        /// Whether the response is kept.
        pub store: bool,
        /// The temperature.
        pub temperature: Option<f32>,
        /// The format of the answer.
        pub text: TextConfig,
        /// Whether the model may, must, or must not call a function.
        pub tool_choice: Value,
        /// The functions offered.
        pub tools: Vec<ResponsesTool>,
        /// The probability of the tokens kept.
        pub top_p: Option<f32>,
        /// Always `disabled`.
        pub truncation: String,
        /// Token counts, once the response has ended.
        pub usage: Option<ResponsesUsage>,
        /// The metadata of the request.
        pub metadata: Map<String, Value>,
    }
}

api_type! {
    /// Token counts.
    pub struct ResponsesUsage {
        /// Tokens of the prompt.
        pub input_tokens: u64,
        /// Details of the prompt tokens.
        pub input_tokens_details: InputDetails,
        /// Tokens of the answer.
        pub output_tokens: u64,
        /// Details of the answer tokens.
        pub output_tokens_details: OutputDetails,
        /// The sum of both.
        pub total_tokens: u64,
    }
}

api_type! {
    /// Details of the prompt tokens.
    pub struct InputDetails {
        /// Tokens found in the prefix tree.
        pub cached_tokens: u64,
        /// Always 0: cached prefixes are found without being marked.
        pub cache_write_tokens: u64,
    }
}

api_type! {
    /// Details of the answer tokens.
    pub struct OutputDetails {
        /// Tokens of reasoning.
        pub reasoning_tokens: u64,
    }
}

api_type! {
    /// An event of a stream; its type decides which other fields it has.
    pub struct ResponsesEvent {
        /// The name of the event.
        #[serde(rename = "type")]
        pub kind: String,
        /// The number of the event in its stream.
        pub sequence_number: u64,
    }
}

api_type! {
    /// A deleted response.
    pub struct DeletedResponse {
        /// Its id.
        pub id: String,
        /// Always `response`.
        pub object: String,
        /// Always true.
        pub deleted: bool,
    }
}
