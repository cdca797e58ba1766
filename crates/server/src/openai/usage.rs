//! The `usage` object.

use crate::answer::Usage;
use crate::describe::api_type;

api_type! {
    /// Tokens that a request cost.
    pub struct UsageBody {
        /// Tokens of the prompt.
        pub prompt_tokens: u64,
        /// Tokens of the answers.
        pub completion_tokens: u64,
        /// Both.
        pub total_tokens: u64,
        /// More about the prompt.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub prompt_tokens_details: Option<PromptDetails>,
        /// More about the answers.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub completion_tokens_details: Option<CompletionDetails>,
    }
}

api_type! {
    /// More about the tokens of the prompt.
    pub struct PromptDetails {
        /// Found in the prefix tree.
        pub cached_tokens: u64,
    }
}

api_type! {
    /// More about the tokens of the answers.
    pub struct CompletionDetails {
        /// Spent thinking.
        pub reasoning_tokens: u64,
    }
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            total_tokens: usage.prompt + usage.completion,
            prompt_tokens_details: Some(PromptDetails { cached_tokens: usage.cached }),
            completion_tokens_details: Some(CompletionDetails {
                reasoning_tokens: usage.reasoning,
            }),
        }
    }
}
