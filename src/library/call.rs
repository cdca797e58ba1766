//! A call: requests that were submitted together, and their replies.

use super::Problem;
use super::thread::{Message, Reply};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// Requests that were submitted together. Dropping it cancels what is not answered.
pub struct Call {
    ids: Range<u64>,
    prompts: Vec<Prompt>,
    inbox: Mutex<Inbox>,
    messages: mpsc::Sender<Message>,
}

/// The text of a prompt, if it was not given as text, and its tokens.
type Prompt = (Option<String>, Arc<[u32]>);

struct Inbox {
    replies: mpsc::Receiver<Reply>,
    /// Requests that have not ended.
    left: u64,
}

/// The thread that ends the process.
static EXITING: OnceLock<ThreadId> = OnceLock::new();

/// Says that this thread ends the process: others that wait for replies wait until it has ended.
pub fn exiting() {
    // Later calls change nothing.
    let _ = EXITING.set(thread::current().id());
}

/// What a call has next.
pub enum Next {
    /// A reply.
    Reply(Box<Reply>),
    /// Nothing within the time given.
    Nothing,
    /// Every request has ended.
    Ended,
}

impl Call {
    pub(super) fn new(
        first: u64,
        count: u64,
        prompts: Vec<Prompt>,
        replies: mpsc::Receiver<Reply>,
        messages: mpsc::Sender<Message>,
    ) -> Self {
        let inbox = Mutex::new(Inbox { replies, left: count });
        Self { ids: first..first + count, prompts, inbox, messages }
    }

    /// Its number, which [`super::Wake::ready`] returns.
    pub fn id(&self) -> u64 {
        self.ids.start
    }

    /// For each prompt its text, if it was not given as text, and its tokens.
    pub fn prompts(&self) -> &[Prompt] {
        &self.prompts
    }

    /// The next reply; waits at most this long.
    pub fn next(&self, time: Duration) -> Result<Next, Problem> {
        let mut inbox = self.inbox.lock().unwrap_or_else(|e| e.into_inner());
        if inbox.left == 0 {
            return Ok(Next::Ended);
        }
        let next = inbox.replies.recv_timeout(time);
        if EXITING.get().is_some_and(|one| *one != thread::current().id()) {
            // It must not return to a program that is being taken apart.
            loop {
                thread::park();
            }
        }
        match next {
            Ok(reply) => {
                inbox.left -= u64::from(reply.end.is_some());
                Ok(Next::Reply(Box::new(reply)))
            }
            Err(mpsc::RecvTimeoutError::Timeout) => Ok(Next::Nothing),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                inbox.left = 0;
                Err(Problem::stopped())
            }
        }
    }

    /// Cancels what is not answered.
    pub fn cancel(&self) {
        let mut inbox = self.inbox.lock().unwrap_or_else(|e| e.into_inner());
        if std::mem::take(&mut inbox.left) > 0 {
            // If the thread has ended, so have the requests.
            let _ = self.messages.send(Message::Cancel(self.ids.clone()));
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.cancel();
    }
}
