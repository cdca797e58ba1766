//! One HTTP call's view of the engine: replies in order, and cancellation when it is dropped.

use super::Message;
use engine::request::{Output, RequestId};
use std::sync::mpsc;
use std::task::{Context, Poll};
use tokio::sync::mpsc as tokio_mpsc;

/// What the engine's thread says to a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// The engine's own words about one of the call's requests.
    Output(Output),
    /// The engine is gone, or ended the request from its side: nothing else follows for `id`.
    Lost {
        /// Which request.
        id: RequestId,
        /// Why.
        why: String,
    },
}

/// A call's requests in flight. Dropping it cancels those that have not ended.
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

    /// The place of a request in the list that was submitted.
    pub fn position(&self, id: RequestId) -> usize {
        id.0.wrapping_sub(self.first) as usize
    }

    /// The next reply; `None` when the engine's thread gave this call up because its reader was
    /// too slow, or when all its requests have ended.
    pub async fn next(&mut self) -> Option<Reply> {
        self.inbox.recv().await
    }

    /// As [`Call::next`], several at once, for a body that is polled.
    pub fn poll_many(&mut self, cx: &mut Context<'_>, into: &mut Vec<Reply>) -> Poll<usize> {
        self.inbox.poll_recv_many(cx, into, 64)
    }

    /// Cancels one request of the call, by its place in the list.
    pub fn cancel(&self, position: usize) {
        self.send_cancel(vec![RequestId(self.first + position as u64)]);
    }

    /// The call has heard all there is; dropping it cancels nothing.
    pub fn done(&mut self) {
        self.messages = None;
    }

    fn send_cancel(&self, ids: Vec<RequestId>) {
        if let Some(messages) = &self.messages {
            // A closed channel means that the engine's thread has ended and everything with it.
            let _ = messages.send(Message::Cancel(ids));
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.send_cancel((self.first..self.first + self.count).map(RequestId).collect());
    }
}
