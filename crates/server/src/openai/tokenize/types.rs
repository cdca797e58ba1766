//! JSON types of tokenize and detokenize.

use crate::describe::api_type;
use crate::openai::chat::types::{Message, Tool};

api_type! {
    /// A text or a conversation to tokenize.
    pub struct TokenizeRequest {
        /// The model; optional, must be the served one.
        pub model: Option<String>,
        /// The text; this or `messages`.
        pub prompt: Option<String>,
        /// The conversation, used if there is no `prompt`.
        pub messages: Option<Vec<Message>> = {"minItems": 1},
        /// Tools offered in the conversation.
        pub tools: Option<Vec<Tool>> = {"maxItems": "limit tools"},
        /// Whether to append the start of the assistant's turn; true by default.
        pub add_generation_prompt: Option<bool>,
        /// Whether to leave the last message open, as for an answer that continues it.
        pub continue_final_message: Option<bool>,
        /// Whether to prepend the special tokens that begin a prompt; true by default.
        pub add_special_tokens: Option<bool>,
        /// Whether to return the text of each token.
        pub return_token_strs: Option<bool>,
    }
}

api_type! {
    /// The tokens.
    pub struct TokenizeResponse {
        /// Token ids.
        pub tokens: Vec<u32>,
        /// The number of tokens.
        pub count: u64,
        /// The most tokens of prompt and answer together.
        pub max_model_len: u64,
        /// The text of each token, if requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub token_strs: Option<Vec<String>>,
    }
}

api_type! {
    /// Tokens to convert to text.
    pub struct DetokenizeRequest {
        /// The model; optional, must be the served one.
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

api_type! {
    /// What is known about the tokenizer.
    pub struct TokenizerInfo {
        /// Always `dacapo`.
        pub tokenizer_class: String,
        /// The number of tokens.
        pub vocab_size: u64,
        /// The most tokens of prompt and answer together.
        pub model_max_length: u64,
        /// The token that ends an answer.
        pub eos_token: Option<String>,
        /// The token that begins a prompt, if there is one.
        pub bos_token: Option<String>,
        /// All tokens that end an answer.
        pub eos_token_ids: Vec<u32>,
        /// The source of the chat template, if it is known.
        pub chat_template: Option<String>,
    }
}
