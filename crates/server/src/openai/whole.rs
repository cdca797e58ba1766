//! Answers that are gathered before they are sent, and what they may take.

use crate::app::App;
use crate::budget::Lease;
use crate::error::ApiError;
use engine::request::TokenLogprob;

/// What one reported log-probability takes, about: its token as text and as a list of bytes.
const LOGPROB_BYTES: usize = 128;

/// Counts an answer as it is gathered, against its own limit and the budget of all.
pub(crate) struct Gathering {
    lease: Lease,
    bytes: u64,
    most: u64,
    error: Option<ApiError>,
}

impl Gathering {
    pub(crate) fn new(app: &App) -> Self {
        Self { lease: app.answers.lease(), bytes: 0, most: app.limits.answer_bytes, error: None }
    }

    /// So much more text and so many log-probabilities.
    pub(crate) fn add(&mut self, text: usize, logprobs: &[TokenLogprob]) {
        let entries: usize = logprobs.iter().map(|entry| 1 + entry.top.len()).sum();
        let more = (text + entries * LOGPROB_BYTES) as u64;
        self.bytes += more;
        if self.error.is_some() {
        } else if self.bytes > self.most {
            let text = format!(
                "the answer is larger than {} bytes; ask for fewer tokens, choices or \
                 log-probabilities, or for a stream",
                self.most
            );
            self.error = Some(ApiError::invalid("", text));
        } else if !self.lease.try_grow(more) {
            let text = "the answers being gathered are as large as they may be; try again";
            self.error = Some(ApiError::unavailable(text));
        }
    }

    /// The error, once there was too much.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        self.error.clone().map_or(Ok(()), Err)
    }

    /// Bytes so far, about.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes as usize
    }
}
