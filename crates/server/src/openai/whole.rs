//! Limits the size of responses that are collected before they are sent.

use crate::app::App;
use crate::budget::Lease;
use crate::error::ApiError;
use engine::request::TokenLogprob;

/// Approximate bytes of one reported log-probability: its token as text and as a list of bytes.
const LOGPROB_BYTES: usize = 128;

/// Counts the bytes of a response against `answer_bytes` and the shared budget.
pub(crate) struct ResponseSize {
    lease: Lease,
    bytes: u64,
    most: u64,
    error: Option<ApiError>,
}

impl ResponseSize {
    pub(crate) fn new(app: &App) -> Self {
        Self { lease: app.answers.lease(), bytes: 0, most: app.limits.answer_bytes, error: None }
    }

    /// Adds bytes of text and log-probabilities.
    pub(crate) fn add(&mut self, text: usize, logprobs: &[TokenLogprob]) {
        let entries: usize = logprobs.iter().map(|entry| 1 + entry.top.len()).sum();
        let more = (text + entries * LOGPROB_BYTES) as u64;
        self.bytes += more;
        if self.error.is_some() {
        } else if self.bytes > self.most {
            let text = format!(
                "the response is larger than {} bytes; request fewer tokens, choices or \
                 log-probabilities, or use a stream",
                self.most
            );
            self.error = Some(ApiError::invalid("", text));
        } else if !self.lease.try_grow(more) {
            let text = "the limit of answer_budget_bytes is reached; retry later or use a stream";
            self.error = Some(ApiError::unavailable(text));
        }
    }

    /// The error, once a limit was exceeded.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        self.error.clone().map_or(Ok(()), Err)
    }

    /// Approximate bytes so far.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes as usize
    }
}
