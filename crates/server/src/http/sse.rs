//! Responses as server-sent events. The body polls the engine's replies itself, without a task per
//! stream. When a client disconnects, hyper drops the body, which drops the call, which cancels the
//! request.

use crate::answer::{Piece, Run, Usage};
use crate::config::Limits;
use crate::error::ApiError;
use crate::link::Reply;
use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use http_body::Frame;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};
use tracing::Span;

/// How long the headers of a stream wait for the first reply, so that a rejection can still set the
/// status.
const FIRST_REPLY: Duration = Duration::from_millis(1000);

/// Bytes of events after which no more replies are written until these are sent.
const FRAME: usize = 64 * 1024;

/// The last event of OpenAI's streams.
pub(crate) const DONE: &[u8] = b"data: [DONE]\n\n";

/// Writes the events of one route. The defaults are OpenAI's.
pub(crate) trait Events: Send + Unpin + 'static {
    /// The type of the stream.
    const CONTENT_TYPE: &'static str = "text/event-stream";
    /// Sent where there is nothing else to send, to keep the connection open; may be empty.
    const PING: &'static [u8] = b": ping\n\n";
    /// Writes a piece as complete events.
    fn piece(&mut self, piece: Piece, out: &mut Vec<u8>);
    /// Writes the events after the last piece.
    fn end(&mut self, usage: Usage, out: &mut Vec<u8>);
    /// Writes the last events of a stream that failed.
    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        out.extend_from_slice(b"data: ");
        // Writing to a Vec cannot fail.
        let _ = serde_json::to_writer(&mut *out, &error.body());
        out.extend_from_slice(b"\n\n");
        out.extend_from_slice(DONE);
    }
}

/// Writes one named event.
pub(crate) fn event(name: &str, data: &impl serde::Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(format!("event: {name}\ndata: ").as_bytes());
    // Writing to a Vec cannot fail.
    let _ = serde_json::to_writer(&mut *out, data);
    out.extend_from_slice(b"\n\n");
}

/// Answers with a stream.
pub(crate) async fn respond<E: Events>(
    mut run: Run,
    mut events: E,
    limits: &Limits,
) -> Result<Response, ApiError> {
    let mut out = Vec::new();
    let mut sink = |piece| events.piece(piece, &mut out);
    let first = tokio::time::timeout(FIRST_REPLY, run.next(&mut sink)).await;
    match first {
        Ok(first) => first?,
        Err(_) => out.extend_from_slice(E::PING),
    }
    let ping = Duration::from_millis(limits.ping_ms);
    let body = EventBody {
        run,
        events,
        out,
        inbox: Vec::new(),
        over: false,
        ping,
        last: Instant::now(),
        silence: Box::pin(tokio::time::sleep(ping)),
        span: Span::current(),
    };
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(E::CONTENT_TYPE));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

struct EventBody<E> {
    run: Run,
    events: E,
    out: Vec<u8>,
    inbox: Vec<Reply>,
    over: bool,
    ping: Duration,
    /// When the last frame was sent.
    last: Instant,
    silence: Pin<Box<Sleep>>,
    /// The span of the request, for the log line at the end of the stream.
    span: Span,
}

impl<E> Drop for EventBody<E> {
    fn drop(&mut self) {
        let (usage, whole) = (self.run.usage, self.over);
        self.span.in_scope(|| {
            tracing::info!(whole, prompt = usage.prompt, completion = usage.completion, "streamed");
        });
    }
}

impl<E: Events> EventBody<E> {
    /// Writes available replies, up to about a frame; pending if there are none.
    fn follow(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Self { run, events, out, inbox, .. } = self;
        while !run.is_over() {
            match run.poll(cx, inbox, &mut |piece| events.piece(piece, out)) {
                Poll::Pending if out.is_empty() => return Poll::Pending,
                Poll::Pending => return Poll::Ready(()),
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => {
                    events.error(&error, out);
                    self.over = true;
                    return Poll::Ready(());
                }
            }
            // Replies received together are sent together, up to a bound.
            if inbox.is_empty() && !out.is_empty() || out.len() >= FRAME {
                break;
            }
        }
        if self.run.is_over() {
            self.events.end(self.run.usage, &mut self.out);
            self.over = true;
        }
        Poll::Ready(())
    }
}

impl<E: Events> http_body::Body for EventBody<E> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        // A reply may have no text (part of a character): continue until there is some, or no more
        // replies.
        while !this.over && this.out.is_empty() && this.follow(cx).is_ready() {}
        while this.out.is_empty() {
            if this.over {
                return Poll::Ready(None);
            }
            if this.silence.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            let now = Instant::now();
            if this.last + this.ping <= now {
                this.out.extend_from_slice(E::PING);
                this.last = now;
            }
            this.silence.as_mut().reset(this.last + this.ping);
        }
        this.last = Instant::now();
        let bytes = Bytes::from(std::mem::take(&mut this.out));
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }
}
