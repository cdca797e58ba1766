//! Log-probabilities of prompt tokens, in vLLM's format.

use crate::describe::api_type;
use crate::openai::chat::handler::finite;
use engine::request::{Token, TokenLogprob};
use std::collections::BTreeMap;
use text::TextModel;

/// One entry per token of the prompt: null for the first, else the token and the likeliest ones at
/// its place, by token id.
pub type PromptLogprobs = Vec<Option<BTreeMap<String, PromptLogprob>>>;

api_type! {
    /// The log-probability of a token at a place in the prompt.
    pub struct PromptLogprob {
        /// Its natural-log probability.
        pub logprob: f32,
        /// Its place among the likeliest, from 1; null if it is not one of those reported.
        pub rank: Option<u32>,
        /// The token as text.
        pub decoded_token: String,
    }
}

/// The entries of a prompt, with `top` alternatives each.
pub(crate) fn prompt_logprobs(
    scores: &[TokenLogprob],
    top: u32,
    text: &dyn TextModel,
) -> PromptLogprobs {
    let one = |token: Token, logprob: f32, rank: Option<u32>| {
        let bytes = text.token_bytes(token).unwrap_or_default();
        let decoded_token = String::from_utf8_lossy(&bytes).into_owned();
        (token.to_string(), PromptLogprob { logprob: finite(logprob), rank, decoded_token })
    };
    let entry = |score: &TokenLogprob| {
        let rank = (1..).zip(&score.top).find(|(_, likely)| likely.0 == score.token);
        let chosen = one(score.token, score.logprob, rank.map(|(rank, _)| rank));
        let likely = (1..).zip(&score.top).take(top as usize);
        let likely = likely.map(|(rank, (token, logprob))| one(*token, *logprob, Some(rank)));
        Some(likely.chain([chosen]).collect())
    };
    std::iter::once(None).chain(scores.iter().map(entry)).collect()
}
