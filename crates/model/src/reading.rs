//! A text read by a model without an engine: its tokens are fed in order, and the logits after each can be read.

use crate::executor::GraphExecutor;
use crate::observe::PromptLogits;
use engine::exec::{ExecError, Executor, Geometry, Join, Page, Row, Seat, SeatParams, Step};
use engine::request::Token;

/// Why a text could not be read on.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The step failed.
    #[error(transparent)]
    Step(#[from] ExecError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// More tokens than the model was loaded for.
    #[error("the model was loaded for {room} tokens, and the text has {tokens}")]
    TooLong {
        /// Tokens it holds.
        room: u32,
        /// Tokens it was to hold.
        tokens: u32,
    },
    /// The step has no plan that gives logits of every token.
    #[error("no step with logits of every token: feed tokens first")]
    NoLogits,
}

/// One text in a model's KV pages. It takes the executor's pages from the first one on, so an engine must not use the
/// executor at the same time.
#[derive(Debug)]
pub struct Reading<'a> {
    executor: &'a mut GraphExecutor,
    number: u64,
    /// Tokens that were fed.
    len: u32,
    /// Tokens of the last step.
    last: u32,
    /// Whether the seat has its length and parameters.
    seated: bool,
    /// Entries of the seat's page table.
    pages: u32,
    /// What was fed.
    fed: Vec<Token>,
}

const SEAT: Seat = Seat(0);

impl<'a> Reading<'a> {
    /// An empty text.
    pub fn new(executor: &'a mut GraphExecutor) -> Reading<'a> {
        let (number, len, last, seated, pages, fed) = (0, 0, 0, false, 0, Vec::new());
        Reading { executor, number, len, last, seated, pages, fed }
    }

    /// Most tokens of one [`Reading::feed`].
    pub fn most(&self) -> u32 {
        self.executor.coverage().prefill_tokens
    }

    /// Most tokens of a text.
    pub fn room(&self) -> u32 {
        let geometry = self.executor.geometry();
        let held = geometry.pages.saturating_sub(1) / geometry.kept.width();
        geometry.pages_per_seat.min(held) * geometry.page_size
    }

    /// Continues behind the first `len` tokens: the others are forgotten. 0 begins a new text.
    ///
    /// # Panics
    /// If fewer were fed.
    pub fn rewind(&mut self, len: u32) {
        assert!(len <= self.len, "{} tokens were fed", self.len);
        (self.len, self.last, self.seated, self.pages) = (len, 0, false, 0);
        self.fed.truncate(len as usize);
    }

    /// Feeds the next tokens, at least one and at most [`Reading::most`].
    pub fn feed(&mut self, tokens: &[Token]) -> Result<(), ReadError> {
        let count = tokens.len() as u32;
        let (room, end) = (self.room(), self.len + count);
        if end > room {
            return Err(ReadError::TooLong { room, tokens: end });
        }
        if !self.seated && self.len > 0 && self.executor.carries_state() {
            // Recurrent layers have forgotten the state behind these tokens.
            let before = std::mem::take(&mut self.fed);
            self.len = 0;
            before.chunks(self.most() as usize).try_for_each(|some| self.feed_next(some))?;
        }
        self.feed_next(tokens)
    }

    fn feed_next(&mut self, tokens: &[Token]) -> Result<(), ReadError> {
        let count = tokens.len() as u32;
        let end = self.len + count;
        self.number += 1;
        let params = SeatParams::greedy();
        let join = Join { seat: SEAT, len: self.len, last_token: 0, params, history: Vec::new() };
        let Geometry { page_size, kept, .. } = self.executor.geometry();
        let needed = end.div_ceil(page_size);
        // Page 0 is for padding.
        let entries = |index| kept.entries(SEAT, index, Page(1 + index * kept.width()));
        let step = Step {
            number: self.number,
            rows: vec![Row::feed(SEAT, self.len, tokens.to_vec())],
            joins: if self.seated { Vec::new() } else { vec![join] },
            pages: (self.pages..needed).flat_map(entries).collect(),
            ..Step::default()
        };
        self.executor.launch(&step)?;
        if let Some(result) = self.executor.poll(true)? {
            self.executor.recycle(result);
        }
        (self.len, self.last, self.seated, self.pages) = (end, count, true, needed);
        self.fed.extend_from_slice(tokens);
        Ok(())
    }

    /// Feeds any number of tokens.
    pub fn feed_all(&mut self, tokens: &[Token]) -> Result<(), ReadError> {
        let most = self.most() as usize;
        tokens.chunks(most).try_for_each(|some| self.feed(some))
    }

    /// The logits after each token of the last [`Reading::feed`].
    pub fn logits(&self) -> Result<PromptLogits<'_>, ReadError> {
        if self.last == 0 {
            return Err(ReadError::NoLogits);
        }
        self.executor.prompt_logits(self.last)?.ok_or(ReadError::NoLogits)
    }
}
