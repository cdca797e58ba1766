//! What a caller asks for and what comes back: plain types shared by the offline API, the server
//! and the simulator. Nothing here knows about devices, pages or threads.

use grammar::Compiled;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Names a request for its whole life. The caller chooses it; the engine refuses a second live use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RequestId(pub u64);

/// A vocabulary index.
pub type Token = u32;

/// Time as the caller gives it, in microseconds from any fixed origin. The engine owns no clock.
pub type Micros = u64;

/// One request: `choices` independent continuations of one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Chosen by the caller, unique among live requests.
    pub id: RequestId,
    /// The prompt; at least one token.
    pub prompt: Arc<[Token]>,
    /// How to continue it.
    pub sampling: Sampling,
    /// How many continuations; 1 unless asked. They share the prompt's pages.
    pub choices: u32,
    /// Larger goes first; equal priorities are served in order of arrival.
    pub priority: i32,
    /// Past this time the request ends with [`Finish::Deadline`].
    pub deadline: Option<Micros>,
    /// The call it belongs to, by the id of the call's first request: calls take turns, requests of
    /// one call go in their order. `None` is a call of its own.
    pub call: Option<RequestId>,
    /// Requests with different salts never share cached pages.
    pub tenant: u64,
    /// The adapter that answers it; 0 is the model without one. Requests with different adapters never share cached pages,
    /// so an adapter that is loaded again needs another number.
    pub adapter: u64,
    /// Ask for log-probabilities of the prompt tokens too.
    pub prompt_logprobs: Option<u32>,
    /// Ask for the prompt's vector instead of a continuation: the request ends with
    /// [`Output::Embedded`], and nothing is sampled.
    pub embed: Option<Embed>,
}

impl Request {
    /// One continuation of a prompt, and nothing else asked.
    pub fn new(id: RequestId, prompt: impl Into<Arc<[Token]>>, sampling: Sampling) -> Request {
        Request {
            id,
            prompt: prompt.into(),
            sampling,
            choices: 1,
            priority: 0,
            deadline: None,
            call: None,
            tenant: 0,
            adapter: 0,
            prompt_logprobs: None,
            embed: None,
        }
    }
}

/// How a prompt becomes one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Embed {
    /// Which tokens count.
    pub pooling: Pooling,
    /// Whether the vector is divided by its length.
    pub unit: bool,
}

/// Which tokens' hidden states, after the model's last norm, make the vector of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The mean of all.
    Mean,
    /// The last one's.
    Last,
    /// Whatever the model's program makes of them. The only one of devices that take whole prompts
    /// ([`crate::exec::Executor::whole_prompts`]), and of those alone.
    Model,
}

/// How the next token is chosen and when to stop. `Default` is greedy with no limit but the context.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy, and so is anything below 1e-5.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set with at least this probability; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divide (or multiply, if negative) the logits of tokens already seen; 1 is off.
    pub repetition_penalty: f32,
    /// Subtract this for each earlier occurrence in the answer; 0 is off.
    pub frequency_penalty: f32,
    /// Subtract this once if the token occurred in the answer; 0 is off.
    pub presence_penalty: f32,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(Token, f32)>,
    /// Same seed, same text, whatever else is in the batch.
    pub seed: u64,
    /// Log-probabilities of the chosen token and this many alternatives (at most 20).
    pub logprobs: Option<u32>,
    /// Report those of the distribution that tokens are drawn from, after temperature, `top_k`, `top_p` and `min_p`; else those
    /// before them, after penalties and biases.
    pub sampled_logprobs: bool,
    /// At most this many new tokens.
    pub max_tokens: u32,
    /// No stop before this many.
    pub min_tokens: u32,
    /// Token ids that end the answer (not part of the text).
    pub stop_tokens: Vec<Token>,
    /// Go on past stop tokens of the model (those in `stop_tokens` were put there by the caller).
    pub ignore_eos: bool,
    /// Only tokens that fit this may be chosen; after the thought, if there is one.
    pub grammar: Option<Compiled>,
    /// The thought before the answer.
    pub thinking: Option<Thinking>,
    /// Drafts of it may be verified, where the device does that; the answer is the same.
    pub speculate: bool,
}

/// What a model thinks before it answers, between two tags.
///
/// Without a grammar the model decides whether it thinks. With one it does: the opening tag is forced
/// if the prompt has none, the thought is free, and the grammar begins after the closing tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thinking {
    /// The opening tag; empty if the prompt ends with it.
    pub open: Arc<[Token]>,
    /// The closing tag; at least one token.
    pub close: Arc<[Token]>,
    /// Most tokens between the tags: after these the closing tag is forced.
    pub budget: u32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
            sampled_logprobs: false,
            max_tokens: u32::MAX,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            ignore_eos: false,
            grammar: None,
            thinking: None,
            speculate: true,
        }
    }
}

/// What happens to the engine from outside, in the order it happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A new request.
    Submit(Box<Request>),
    /// The caller cancels a request; its pages are freed within two steps.
    Cancel(RequestId),
}

/// What the engine reports to the caller, in the order it happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// A request was refused before it was accepted; nothing else follows for it.
    Rejected {
        /// Which.
        id: RequestId,
        /// Why.
        reason: Reject,
    },
    /// The prompt has been processed.
    Prefilled {
        /// Which.
        id: RequestId,
        /// Prompt tokens in all.
        prompt_tokens: u32,
        /// Of these, found in the prefix tree.
        cached_tokens: u32,
        /// One entry per prompt token after the first, when asked for.
        prompt_logprobs: Vec<TokenLogprob>,
    },
    /// The prompt's vector, for a request that asked for it; its end follows.
    Embedded {
        /// Which.
        id: RequestId,
        /// As many numbers as the model is wide.
        vector: Vec<f32>,
    },
    /// One more token of an answer.
    Token {
        /// Which.
        id: RequestId,
        /// Which continuation, from 0.
        choice: u32,
        /// The token. A stop token is not reported here; see [`Finish::Stop`].
        token: Token,
        /// When asked for.
        logprob: Option<TokenLogprob>,
    },
    /// A continuation ended; exactly one per continuation of an accepted request.
    Finished {
        /// Which.
        id: RequestId,
        /// Which continuation, from 0.
        choice: u32,
        /// How.
        finish: Finish,
        /// Of the stop token that ended it, when asked for.
        stop_logprob: Option<Box<TokenLogprob>>,
        /// What drafts did for it.
        drafts: Drafts,
    },
}

/// Drafts of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafts {
    /// Tokens that were drafted and verified.
    pub drafted: u32,
    /// Those that were accepted.
    pub accepted: u32,
}

impl Output {
    /// The request it is about.
    pub const fn id(&self) -> RequestId {
        match self {
            Output::Rejected { id, .. }
            | Output::Prefilled { id, .. }
            | Output::Embedded { id, .. }
            | Output::Token { id, .. }
            | Output::Finished { id, .. } => *id,
        }
    }
}

/// The log-probability of a token and of the likeliest alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: Token,
    /// Its natural-log probability.
    pub logprob: f32,
    /// The likeliest tokens, best first.
    pub top: Vec<(Token, f32)>,
}

/// How an accepted continuation ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// A stop token (which one) or, for a grammar, its end (`None`). A prompt whose vector was asked
    /// for ends so too.
    Stop(Option<Token>),
    /// `max_tokens` or the context limit.
    Length,
    /// The caller cancelled.
    Cancelled,
    /// The deadline passed.
    Deadline,
    /// The device failed and the step could not be repeated.
    Failed(String),
    /// The grammar cannot be followed further: the next token would cost more steps than it may.
    Grammar(String),
}

/// Why a request was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reject {
    /// Nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// Longer than the context, or than the pages that exist.
    #[error("the prompt has {found} tokens; at most {allowed} fit")]
    TooLong {
        /// Tokens in the prompt.
        found: u64,
        /// The most that fits.
        allowed: u64,
    },
    /// A token outside the vocabulary.
    #[error("token {0} is not in the vocabulary")]
    UnknownToken(Token),
    /// The waiting list is full.
    #[error("{waiting} requests are waiting already")]
    QueueFull {
        /// How many wait.
        waiting: u64,
    },
    /// The id is in use.
    #[error("request id {0} is in use")]
    DuplicateId(u64),
    /// A sampling field outside its range.
    #[error("{field}: {problem}")]
    BadParameter {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The recorded graphs do not cover it and fallback is forbidden.
    #[error("not covered by any recorded graph: {0}")]
    NotCovered(String),
}
