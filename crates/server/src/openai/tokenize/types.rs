//! What tokenizing looks like on the wire.

use crate::describe::api_type;
use crate::openai::chat::types::{Message, Tool};

api_type! {
    /// Text, or a conversation, to be made tokens.
    pub struct TokenizeRequest {
        /// The model; if given, the one that is served.
        pub model: Option<String>,
        /// The text; this or `messages`.
        pub prompt: Option<String>,
        /// The conversation, used where there is no `prompt`.
        pub messages: Option<Vec<Message>> = {"minItems": 1},
        /// Tools offered in the conversation.
        pub tools: Option<Vec<Tool>> = {"maxItems": "limit tools"},
        /// Whether the assistant's turn is opened; it is unless told otherwise.
        pub add_generation_prompt: Option<bool>,
        /// Whether the tokens that begin a prompt are put before the text; they are unless told
        /// otherwise.
        pub add_special_tokens: Option<bool>,
        /// Also say what each token stands for.
        pub return_token_strs: Option<bool>,
    }
}

api_type! {
    /// The tokens.
    pub struct TokenizeResponse {
        /// Token ids.
        pub tokens: Vec<u32>,
        /// How many.
        pub count: u64,
        /// The most tokens of prompt and answer together.
        pub max_model_len: u64,
        /// What each token stands for, when asked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub token_strs: Option<Vec<String>>,
    }
}

api_type! {
    /// Tokens to be made text.
    pub struct DetokenizeRequest {
        /// The model; if given, the one that is served.
        pub model: Option<String>,
        /// Token ids.
        pub tokens: Vec<u32> = {"items": (crate::describe::token_id())},
    }
}

api_type! {
    /// The text.
    pub struct DetokenizeResponse {
        /// The text.
        pub prompt: String,
    }
}
