//! All choices of one call: from the engine's replies to pieces that a route can write.

use super::{Choice, ChoiceSetup, Delta};
use crate::error::ApiError;
use crate::link::{Call, Reply};
use engine::request::{Finish, Output, Reject, Token, TokenLogprob};
use std::task::{Context, Poll};
use text::TextModel;

/// Token counts of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt: u64,
    /// Prompt tokens found in the prefix tree.
    pub cached: u64,
    /// Tokens of the answers.
    pub completion: u64,
    /// Answer tokens of reasoning.
    pub reasoning: u64,
    /// Drafts of the answers that were verified.
    pub drafted: u64,
    /// Those that were accepted.
    pub accepted: u64,
}

/// One piece of the response to a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// A prompt has been processed.
    Prompt {
        /// The position of the request in the call.
        position: usize,
        /// Tokens of the prompt.
        tokens: u32,
        /// Of these, tokens found in the prefix tree.
        cached: u32,
        /// Log-probabilities, if requested.
        logprobs: Vec<TokenLogprob>,
    },
    /// A new part of a choice, with the log-probabilities of its tokens.
    Delta {
        /// The index of the choice in the call.
        index: usize,
        /// The new part.
        delta: Delta,
        /// Log-probabilities, if requested.
        logprobs: Vec<TokenLogprob>,
        /// Its tokens, if requested.
        token_ids: Vec<Token>,
    },
    /// A choice has ended.
    End {
        /// The index of the choice in the call.
        index: usize,
        /// OpenAI's `finish_reason`.
        reason: &'static str,
        /// The stop string that ended it, if one did.
        stop: Option<String>,
        /// Log-probabilities of tokens without text.
        logprobs: Vec<TokenLogprob>,
        /// Tokens without text, if requested.
        token_ids: Vec<Token>,
    },
}

impl Piece {
    /// The log-probabilities of the piece.
    pub(crate) fn logprobs(&self) -> &[TokenLogprob] {
        match self {
            Self::Prompt { logprobs, .. }
            | Self::Delta { logprobs, .. }
            | Self::End { logprobs, .. } => logprobs,
        }
    }
}

/// How the requests of a call map to choices.
pub struct RunSetup {
    /// The number of choices of each request, in order.
    pub choices: Vec<u32>,
    /// The number of consecutive requests with the same prompt, which is counted once.
    pub per_prompt: usize,
    /// How the text is processed.
    pub choice: ChoiceSetup,
    /// Whether all tokens are reported, with their log-probabilities: also those of stop strings, and the stop token.
    pub token_ids: bool,
}

struct Slot {
    choice: Choice,
    position: usize,
    logprobs: Vec<TokenLogprob>,
    token_ids: Vec<Token>,
    calls: u32,
    calls_ended: u32,
    over: bool,
}

/// A call in progress.
pub struct Run {
    call: Call,
    slots: Vec<Slot>,
    /// Per request, the index of its first choice.
    firsts: Vec<usize>,
    per_prompt: usize,
    single_call: bool,
    token_ids: bool,
    open: usize,
    deltas: Vec<Delta>,
    /// Tokens so far.
    pub usage: Usage,
}

impl Run {
    /// Starts to follow a call.
    pub fn new(call: Call, text: &dyn TextModel, setup: RunSetup) -> Self {
        let (mut slots, mut firsts) = (Vec::new(), Vec::new());
        for (position, choices) in setup.choices.iter().enumerate() {
            firsts.push(slots.len());
            for _ in 0..*choices {
                slots.push(Slot {
                    choice: Choice::new(text.detokenizer(), setup.choice.clone()),
                    position,
                    logprobs: Vec::new(),
                    token_ids: Vec::new(),
                    calls: 0,
                    calls_ended: 0,
                    over: false,
                });
            }
        }
        let open = slots.len();
        Self {
            call,
            slots,
            firsts,
            per_prompt: setup.per_prompt.max(1),
            single_call: setup.choice.single_call,
            token_ids: setup.token_ids,
            open,
            deltas: Vec::new(),
            usage: Usage::default(),
        }
    }

    /// Whether every choice has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.open == 0
    }

    /// Waits for one reply and processes it.
    pub async fn next(&mut self, sink: &mut impl FnMut(Piece)) -> Result<(), ApiError> {
        match self.call.next().await {
            Some(reply) => self.take(reply, sink),
            None => Err(fell_behind()),
        }
    }

    /// Processes one reply; `inbox` holds those received with it, the next one last.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        inbox: &mut Vec<Reply>,
        sink: &mut impl FnMut(Piece),
    ) -> Poll<Result<(), ApiError>> {
        if inbox.is_empty() {
            match self.call.poll_many(cx, inbox) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(_) => inbox.reverse(),
            }
        }
        match inbox.pop() {
            Some(reply) => Poll::Ready(self.take(reply, sink)),
            None => Poll::Ready(Err(fell_behind())),
        }
    }

    fn take(&mut self, reply: Reply, sink: &mut impl FnMut(Piece)) -> Result<(), ApiError> {
        match reply {
            Reply::Lost { why, .. } => Err(ApiError::unavailable(why)),
            Reply::Output(Output::Rejected { reason, .. }) => Err(rejected(reason)),
            Reply::Output(Output::Prefilled {
                id,
                prompt_tokens,
                cached_tokens,
                prompt_logprobs,
            }) => {
                let position = self.call.position(id);
                if position.is_multiple_of(self.per_prompt) {
                    self.usage.prompt += u64::from(prompt_tokens);
                    self.usage.cached += u64::from(cached_tokens);
                }
                let (tokens, cached) = (prompt_tokens, cached_tokens);
                sink(Piece::Prompt { position, tokens, cached, logprobs: prompt_logprobs });
                Ok(())
            }
            // Text routes never request embeddings.
            Reply::Output(Output::Embedded { .. }) => Ok(()),
            Reply::Output(Output::Token { id, choice, token, logprob }) => {
                let index = self.firsts[self.call.position(id)] + choice as usize;
                let slot = &mut self.slots[index];
                if slot.over {
                    return Ok(());
                }
                self.usage.completion += 1;
                slot.logprobs.extend(logprob);
                slot.token_ids.extend(self.token_ids.then_some(token));
                let stopped = slot.choice.push(token, &mut self.deltas);
                self.emit(index, sink);
                let enough = self.single_call && self.slots[index].calls_ended > 0;
                if stopped || enough {
                    if !self.token_ids {
                        // The tokens held back were the stop string and are not reported.
                        self.slots[index].logprobs.clear();
                    }
                    self.call.cancel(self.slots[index].position);
                    self.end(index, "stop", sink);
                }
                Ok(())
            }
            Reply::Output(Output::Finished { id, choice, finish, stop_logprob, drafts }) => {
                let index = self.firsts[self.call.position(id)] + choice as usize;
                if self.slots[index].over {
                    return Ok(());
                }
                self.usage.drafted += u64::from(drafts.drafted);
                self.usage.accepted += u64::from(drafts.accepted);
                if self.token_ids
                    && let Finish::Stop(Some(token)) = finish
                {
                    self.slots[index].token_ids.push(token);
                    self.slots[index].logprobs.extend(stop_logprob.map(|stop| *stop));
                }
                let reason = match finish {
                    Finish::Stop(_) => "stop",
                    Finish::Length | Finish::Deadline => "length",
                    Finish::Cancelled => {
                        return Err(ApiError::unavailable(
                            "the request was cancelled or timed out",
                        ));
                    }
                    Finish::Grammar(why) => {
                        return Err(ApiError::invalid("response_format", why));
                    }
                    Finish::Failed(why) => {
                        return Err(ApiError::internal(format!(
                            "the request failed on the device: {why}"
                        )));
                    }
                };
                let cut = reason == "length";
                let stopped = self.slots[index].choice.finish(cut, &mut self.deltas);
                self.emit(index, sink);
                self.end(index, if stopped { "stop" } else { reason }, sink);
                Ok(())
            }
        }
    }

    fn emit(&mut self, index: usize, sink: &mut impl FnMut(Piece)) {
        let slot = &mut self.slots[index];
        for delta in self.deltas.drain(..) {
            slot.calls += u32::from(matches!(delta, Delta::ToolStart { .. }));
            if self.single_call && (slot.calls > 1 || slot.calls_ended > 0) {
                continue;
            }
            let ends = delta == Delta::ToolEnd;
            slot.calls_ended += u32::from(ends);
            // The end of a call has no text, so that the next piece has the log-probabilities.
            let (mut logprobs, mut token_ids) = (Vec::new(), Vec::new());
            if !ends {
                logprobs = std::mem::take(&mut slot.logprobs);
                token_ids = std::mem::take(&mut slot.token_ids);
            }
            sink(Piece::Delta { index, delta, logprobs, token_ids });
        }
    }

    fn end(&mut self, index: usize, reason: &'static str, sink: &mut impl FnMut(Piece)) {
        let slot = &mut self.slots[index];
        slot.over = true;
        self.open -= 1;
        self.usage.reasoning += u64::from(slot.choice.reasoning_tokens);
        let reason = if slot.calls > 0 && reason == "stop" { "tool_calls" } else { reason };
        let logprobs = std::mem::take(&mut slot.logprobs);
        let token_ids = std::mem::take(&mut slot.token_ids);
        let stop = slot.choice.stop_string().map(Into::into);
        sink(Piece::End { index, reason, stop, logprobs, token_ids });
        if self.open == 0 {
            self.call.done();
        }
    }
}

fn fell_behind() -> ApiError {
    let mut e = ApiError::internal("the client read too slowly and lost the stream");
    e.code = Some("slow_reader");
    e
}

/// The error response when the engine rejects a request.
pub(crate) fn rejected(reason: Reject) -> ApiError {
    match reason {
        Reject::TooLong { found, allowed } => ApiError::too_long("prompt", found, allowed),
        Reject::QueueFull { waiting } => ApiError::busy(waiting),
        Reject::BadParameter { field: "embed", .. } => ApiError::no_embeddings(),
        Reject::BadParameter { field: "grammar", .. } => {
            ApiError::invalid("response_format", reason.to_string())
        }
        Reject::BadParameter { field: "choices", problem } => ApiError::invalid(
            "n",
            format!(
                "n is too large: {problem}; lower n, or start the server with a larger --max-batch"
            ),
        ),
        Reject::BadParameter { field, .. } => ApiError::invalid(field, reason.to_string()),
        Reject::EmptyPrompt | Reject::UnknownToken(_) => {
            ApiError::invalid("prompt", reason.to_string())
        }
        Reject::NotCovered(_) => ApiError::invalid("", reason.to_string()),
        Reject::DuplicateId(_) => ApiError::internal(reason.to_string()),
    }
}
