//! Connections: accept, limit, serve and drain.

use super::preface::Reread;
use super::two;
use super::upgrade;
use super::write_timeout::WriteTimeout;
use crate::app::App;
use crate::config::Limits;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::timeout;

const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n\
    content-length: 109\r\nretry-after: 1\r\nconnection: close\r\n\r\n\
    {\"error\":{\"message\":\"too many connections\",\"type\":\"server_error\",\"param\":null,\
    \"code\":\"too_many_connections\"}}";

/// How serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// All requests finished before the deadline.
    Drained,
    /// The deadline passed; the remaining requests were aborted with an error.
    Cut,
}

/// Serves until `stop` resolves, then drains: fails health checks for a while if so configured, then accepts no new connections or requests and lets
/// running requests finish until the deadline.
pub(crate) async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    router: Router,
    limits: Limits,
    stop: impl Future<Output = ()>,
) -> Exit {
    let permits = Arc::new(Semaphore::new(limits.connections as usize));
    let streams = Arc::new(Semaphore::new(limits.connections as usize));
    let (closing, closed) = watch::channel(false);
    // Every connection holds a sender; the receiver ends when the last one is dropped.
    let (alive, mut all_gone) = mpsc::channel::<()>(1);
    let mut stop = pin!(async {
        stop.await;
        app.leaving.store(true, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(limits.leave_ms)).await;
    });
    loop {
        let stream = tokio::select! {
            biased;
            () = &mut stop => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(e) => {
                    pause_after(&e).await;
                    continue;
                }
            },
        };
        // Without it a token, which is a small packet, would wait for the next one. The error is
        // ignored, because a closed socket fails at its first read.
        let _ = stream.set_nodelay(true);
        match permits.clone().try_acquire_owned() {
            Ok(permit) => {
                let held = (permit, alive.clone());
                let (router, limits) = (router.clone(), limits.clone());
                let one = connection(stream, router, limits, streams.clone(), closed.clone());
                tokio::spawn(async move {
                    one.await;
                    drop(held);
                });
            }
            Err(_) => drop(tokio::spawn(refuse(stream))),
        }
    }
    drop(listener);
    app.draining.store(true, Ordering::Relaxed);
    tracing::info!(inflight = app.link.inflight(), "draining");
    let _ = closing.send(true);
    drop(alive);
    let deadline = Duration::from_millis(limits.drain_ms);
    if timeout(deadline, all_gone.recv()).await.is_ok() {
        return Exit::Drained;
    }
    tracing::warn!(inflight = app.link.inflight(), "the deadline for draining has passed");
    app.link.abort_all("the server is shutting down");
    // Time for the final events to reach the clients.
    let _ = timeout(Duration::from_secs(1), all_gone.recv()).await;
    Exit::Cut
}

async fn connection(
    stream: TcpStream,
    router: Router,
    limits: Limits,
    streams: Arc<Semaphore>,
    mut closed: watch::Receiver<bool>,
) {
    let mut closing = pin!(async {
        // An error means that the sender is dropped: close as well.
        let _ = closed.wait_for(|closing| *closing).await;
    });
    let stream = WriteTimeout::new(stream, Duration::from_millis(limits.write_ms));
    let begin = async {
        match Reread::new(stream).await? {
            (stream, true) => Ok((stream, true)),
            (stream, false) => upgrade::accept(stream, &limits).await,
        }
    };
    let begin = timeout(Duration::from_millis(limits.header_ms), begin);
    let begun = tokio::select! {
        begun = begin => begun,
        () = &mut closing => return,
    };
    match begun {
        Ok(Ok((stream, true))) => two::serve(stream, router, &limits, streams, closing).await,
        Ok(Ok((stream, false))) => serve_one(stream, router, &limits, closing).await,
        // The client left or did not send a request in time.
        Ok(Err(_)) | Err(_) => {}
    }
}

/// Serves a connection with HTTP/1.
async fn serve_one<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    router: Router,
    limits: &Limits,
    closing: impl Future<Output = ()>,
) {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_millis(limits.header_ms))
        .max_buf_size(limits.header_bytes as usize)
        .max_headers(limits.headers as usize)
        .keep_alive(true);
    let service = TowerToHyperService::new(router);
    let mut conn = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = &mut conn => ended,
        () = closing => {
            conn.as_mut().graceful_shutdown();
            conn.await
        }
    };
    if let Err(e) = ended {
        tracing::debug!(%e, "connection closed with an error");
    }
}

async fn refuse(mut stream: TcpStream) {
    let _ = timeout(Duration::from_secs(1), stream.write_all(FULL)).await;
}

/// Pauses if the process is out of sockets, so that accepting does not spin. A reset or aborted
/// connection needs no pause.
async fn pause_after(error: &io::Error) {
    tracing::warn!(%error, "accepting a connection failed");
    let own =
        matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset);
    if !own {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_canned_response_has_the_right_length() {
        let text = std::str::from_utf8(super::FULL).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{}", body.len());
        serde_json::from_str::<serde_json::Value>(body).unwrap();
    }
}
