//! Sockets: accept, bound, serve, and close in good order.

use super::patient::Patient;
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
use tokio::io::AsyncWriteExt;
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
    /// Every request was answered.
    Drained,
    /// The deadline came first; what was left got a final event.
    Cut,
}

/// Serves until `stop` resolves, then drains: no new connections or requests, and those that run
/// have until the deadline.
pub async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    router: Router,
    stop: impl Future<Output = ()>,
) -> Exit {
    let limits = app.limits.clone();
    let places = Arc::new(Semaphore::new(limits.connections as usize));
    let (closing, closed) = watch::channel(false);
    // Every connection holds a sender; the receiver ends when the last one is gone.
    let (alive, mut all_gone) = mpsc::channel::<()>(1);
    let mut stop = pin!(stop);
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
        // A token is a small packet; it must not wait for the next one. A socket that died
        // between accept and here fails on its first read.
        let _ = stream.set_nodelay(true);
        match places.clone().try_acquire_owned() {
            Ok(place) => {
                let held = (place, alive.clone());
                let one = connection(stream, router.clone(), limits.clone(), closed.clone());
                tokio::spawn(async move {
                    one.await;
                    drop(held);
                });
            }
            Err(_) => drop(tokio::spawn(turn_away(stream))),
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
    // Long enough for the final events to reach those who read.
    let _ = timeout(Duration::from_secs(1), all_gone.recv()).await;
    Exit::Cut
}

async fn connection(
    stream: TcpStream,
    router: Router,
    limits: Limits,
    mut closed: watch::Receiver<bool>,
) {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_millis(limits.header_ms))
        .max_buf_size(limits.header_bytes as usize)
        .max_headers(limits.headers as usize)
        .keep_alive(true);
    let service = TowerToHyperService::new(router);
    let stream = Patient::new(stream, Duration::from_millis(limits.write_ms));
    let mut conn = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let asked = async {
        // An error means that the server is gone, which is a reason to close as well.
        let _ = closed.wait_for(|closing| *closing).await;
    };
    let ended = tokio::select! {
        ended = &mut conn => ended,
        () = asked => {
            conn.as_mut().graceful_shutdown();
            conn.await
        }
    };
    if let Err(e) = ended {
        tracing::debug!(%e, "a connection ended early");
    }
}

async fn turn_away(mut stream: TcpStream) {
    let _ = timeout(Duration::from_secs(1), stream.write_all(FULL)).await;
}

/// Out of sockets: waiting is all that helps. Other errors belong to the one connection.
async fn pause_after(error: &io::Error) {
    tracing::warn!(%error, "a connection was not accepted");
    let own =
        matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset);
    if !own {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_canned_answer_has_its_length() {
        let text = std::str::from_utf8(super::FULL).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{}", body.len());
        serde_json::from_str::<serde_json::Value>(body).unwrap();
    }
}
