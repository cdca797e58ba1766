//! The `usage` object.

use crate::answer::Usage;
use crate::describe::api_type;

api_type! {
    /// Token counts of a request.
    pub struct UsageBody {
        /// Tokens of the prompt.
        pub prompt_tokens: u64,
        /// Tokens of the answers.
        pub completion_tokens: u64,
        /// The sum of both.
        pub total_tokens: u64,
        /// Details of the prompt tokens.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub prompt_tokens_details: Option<PromptDetails>,
        /// Details of the answer tokens.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub completion_tokens_details: Option<CompletionDetails>,
    }
}

api_type! {
    /// Details of the prompt tokens.
    pub struct PromptDetails {
        /// Tokens found in the prefix tree.
        pub cached_tokens: u64,
    }
}

api_type! {
    /// Details of the answer tokens.
    pub struct CompletionDetails {
        /// Tokens of reasoning.
        pub reasoning_tokens: u64,
        /// Drafts that became part of the answer.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub accepted_prediction_tokens: Option<u64>,
        /// Drafts that did not.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub rejected_prediction_tokens: Option<u64>,
    }
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        // Without drafts nothing is said about them.
        let some = |count: u64| (usage.drafted > 0).then_some(count);
        Self {
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            total_tokens: usage.prompt + usage.completion,
            prompt_tokens_details: Some(PromptDetails { cached_tokens: usage.cached }),
            completion_tokens_details: Some(CompletionDetails {
                reasoning_tokens: usage.reasoning,
                accepted_prediction_tokens: some(usage.accepted),
                rejected_prediction_tokens: some(usage.drafted - usage.accepted),
            }),
        }
    }
}
