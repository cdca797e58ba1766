//! HTTP/2 connections: of clients that begin with it ("prior knowledge"), and upgraded ones.

use super::streams::{StreamBody, Streams};
use crate::config::Limits;
use crate::error::ApiError;
use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;

/// Bytes that a client may send on a connection, and on each stream, before they are read; the
/// least that the protocol allows for a connection.
const WINDOW: u32 = 65_535;
/// Bytes of a response that are buffered for a stream.
const SEND_BUFFER: usize = 64 * 1024;
/// The longest wait for an idle client to agree to close when the server stops.
const CLOSE_TIME: Duration = Duration::from_secs(2);

/// Serves a connection until it ends, is idle for too long or its client does not read. `closing`
/// resolves when the server stops; open streams may finish then.
pub(super) async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    router: Router,
    limits: &Limits,
    permits: Arc<Semaphore>,
    closing: impl Future<Output = ()>,
) {
    let streams = Streams::new();
    let (headers, all) = (limits.headers as usize, streams.clone());
    let service = Streamed { router: TowerToHyperService::new(router), permits, headers, all };
    let [idle, write] = [limits.header_ms, limits.write_ms].map(Duration::from_millis);
    let header_bytes = u32::try_from(limits.header_bytes).unwrap_or(u32::MAX);
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_header_list_size(header_bytes)
        .max_concurrent_streams(u32::try_from(limits.streams).unwrap_or(u32::MAX))
        .initial_connection_window_size(WINDOW)
        .initial_stream_window_size(WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(Duration::from_millis(limits.ping_ms))
        .keep_alive_timeout(write);
    let mut conn = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut closing = pin!(closing);
    let mut stopped: Option<Instant> = None;
    let mut tick = tokio::time::interval(
        (idle.min(write) / 4).clamp(Duration::from_millis(10), Duration::from_secs(1)),
    );
    let mut leaving = false;
    loop {
        tokio::select! {
            ended = &mut conn => {
                if let Err(e) = ended {
                    tracing::debug!(%e, "connection closed with an error");
                }
                return;
            }
            () = &mut closing, if stopped.is_none() => {
                stopped = Some(Instant::now());
                conn.as_mut().graceful_shutdown();
            }
            _ = tick.tick() => {
                let unused = streams.idle().unwrap_or_default();
                if unused > idle && !leaving {
                    leaving = true;
                    conn.as_mut().graceful_shutdown();
                }
                let gone = stopped.is_some_and(|at| unused.min(at.elapsed()) > CLOSE_TIME);
                if gone || unused > idle + write || streams.stalled(write) {
                    tracing::debug!("connection closed: the client is idle or does not read");
                    return;
                }
            }
        }
    }
}

/// Counts streams and limits them over all connections.
struct Streamed {
    router: TowerToHyperService<Router>,
    permits: Arc<Semaphore>,
    /// The most headers of a request.
    headers: usize,
    all: Arc<Streams>,
}

impl Service<Request<Incoming>> for Streamed {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let refused =
            |error: ApiError| Box::pin(async { Ok(error.into_response()) }) as Self::Future;
        if request.headers().len() > self.headers {
            return refused(ApiError::headers(self.headers));
        }
        let Ok(permit) = self.permits.clone().try_acquire_owned() else {
            return refused(ApiError::streams());
        };
        let stream = self.all.open(permit);
        let answer = self.router.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            Ok(answer.map(|body| Body::new(StreamBody { body, rest: Bytes::new(), stream })))
        })
    }
}
