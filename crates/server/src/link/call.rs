//! The requests of one HTTP call: replies in order, and cancellation on drop.

use super::Message;
use engine::request::{Output, RequestId};
use std::sync::mpsc;
use std::task::{Context, Poll};
use tokio::sync::mpsc as tokio_mpsc;

/// A reply from the engine's thread.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// An output of the engine for one of the call's requests.
    Output(Output),
    /// The engine failed or the server aborted the request; nothing else follows for `id`.
    Lost {
        /// The request.
        id: RequestId,
        /// The reason.
        why: String,
    },
}

/// The requests of a call. Dropping it cancels those that have not finished.
pub struct Call {
    inbox: tokio_mpsc::Receiver<Reply>,
    first: u64,
    count: u64,
    messages: Option<mpsc::Sender<Message>>,
}

impl Call {
    pub(super) fn new(
        inbox: tokio_mpsc::Receiver<Reply>,
        first: u64,
        count: u64,
        messages: mpsc::Sender<Message>,
    ) -> Self {
        Self { inbox, first, count, messages: Some(messages) }
    }

    /// The engine's ids of its requests.
    #[cfg(feature = "grpc")]
    pub(crate) fn ids(&self) -> std::ops::Range<u64> {
        self.first..self.first + self.count
    }

    /// The position of a request in the submitted list.
    pub fn position(&self, id: RequestId) -> usize {
        id.0.wrapping_sub(self.first) as usize
    }

    /// The next reply; `None` if the engine's thread cancelled the call because the client was too
    /// slow, or if all its requests have finished.
    pub async fn next(&mut self) -> Option<Reply> {
        self.inbox.recv().await
    }

    /// Like [`Call::next`], several at once, for a body that is polled.
    pub(crate) fn poll_many(&mut self, cx: &mut Context<'_>, into: &mut Vec<Reply>) -> Poll<usize> {
        self.inbox.poll_recv_many(cx, into, 64)
    }

    /// Cancels one request of the call, by its position.
    pub fn cancel(&self, position: usize) {
        self.send_cancel(vec![RequestId(self.first + position as u64)]);
    }

    /// Marks the call as complete, so that dropping it cancels nothing.
    pub fn done(&mut self) {
        self.messages = None;
    }

    fn send_cancel(&self, ids: Vec<RequestId>) {
        if let Some(messages) = &self.messages {
            // A closed channel means that the engine's thread has ended, with all requests.
            let _ = messages.send(Message::Cancel(ids));
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.send_cancel((self.first..self.first + self.count).map(RequestId).collect());
    }
}
