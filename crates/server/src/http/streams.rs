//! The streams of an HTTP/2 connection: how many are open, and whether the client reads them.
//!
//! The write timeout of the socket is not enough here: a client that reads its socket and grants no
//! flow-control window keeps a response in memory without stalling a write.

use axum::body::Body;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::OwnedSemaphorePermit;

/// The most bytes of a body handed over at once, so that a slow client is seen to make progress.
const PIECE: usize = 16 * 1024;

/// The open streams of a connection.
pub(super) struct Streams(Mutex<State>);

struct State {
    next: u64,
    /// For each open stream the time since which its client has not taken what it was given.
    open: HashMap<u64, Option<Instant>>,
    /// The time since which no stream is open, if none is.
    idle: Instant,
}

impl Streams {
    pub(super) fn new() -> Arc<Self> {
        let state = State { next: 0, open: HashMap::new(), idle: Instant::now() };
        Arc::new(Self(Mutex::new(state)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Opens a stream, which counts until it is dropped.
    pub(super) fn open(self: &Arc<Self>, permit: OwnedSemaphorePermit) -> Stream {
        let mut state = self.lock();
        let id = state.next;
        state.next += 1;
        state.open.insert(id, None);
        Stream { all: self.clone(), id, _permit: permit }
    }

    /// How long no stream has been open; `None` if one is.
    pub(super) fn idle(&self) -> Option<Duration> {
        let state = self.lock();
        state.open.is_empty().then(|| state.idle.elapsed())
    }

    /// Whether the client of a stream has not read for that long.
    pub(super) fn stalled(&self, time: Duration) -> bool {
        self.lock().open.values().flatten().any(|since| since.elapsed() > time)
    }
}

/// An open stream.
pub(super) struct Stream {
    all: Arc<Streams>,
    id: u64,
    _permit: OwnedSemaphorePermit,
}

impl Stream {
    fn given(&self, since: Option<Instant>) {
        self.all.lock().open.insert(self.id, since);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let mut state = self.all.lock();
        state.open.remove(&self.id);
        state.idle = Instant::now();
    }
}

/// The body of a response on a stream. The connection asks for a piece only when the client has
/// granted window for the one before.
pub(super) struct StreamBody {
    pub(super) body: Body,
    /// What is left of a large piece.
    pub(super) rest: Bytes,
    pub(super) stream: Stream,
}

impl HttpBody for StreamBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.stream.given(None);
        if self.rest.is_empty() {
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
                other => return other,
            }
        }
        self.stream.given(Some(Instant::now()));
        let length = self.rest.len().min(PIECE);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = self.body.size_hint();
        let rest = self.rest.len() as u64;
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + rest);
        }
        hint.set_lower(hint.lower() + rest);
        hint
    }
}
