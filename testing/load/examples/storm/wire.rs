//! Sends one hostile request on its own connection and classifies the outcome.

use crate::hostile::Hostile;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// The time limit of a response.
const TIMEOUT: Duration = Duration::from_secs(300);

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ended {
    /// A response with this status.
    Status(u16),
    /// The client disconnected as planned.
    Left,
    /// No response.
    Silence,
    /// No end within the time limit.
    Never,
    /// A stream that ended with a server error.
    Broken,
}

/// The outcome of a request.
pub(crate) struct Outcome {
    pub(crate) ended: Ended,
    pub(crate) took: Duration,
    /// The beginning of the response body, for reports.
    pub(crate) body: String,
}

/// Sends a request and waits for the response.
pub(crate) async fn send(address: SocketAddr, request: &Hostile) -> Outcome {
    let began = Instant::now();
    let mut answer = Vec::new();
    let ended = match timeout(TIMEOUT, exchange(address, request, &mut answer)).await {
        Err(_) => Ended::Never,
        Ok(ended) => ended,
    };
    let body = answer.windows(4).position(|w| w == b"\r\n\r\n").map_or(0, |at| at + 4);
    let text = String::from_utf8_lossy(&answer[body..]);
    let shown = |c: char| if c.is_control() { ' ' } else { c };
    let body = text.chars().map(shown).take(300).collect();
    Outcome { ended, took: began.elapsed(), body }
}

async fn exchange(address: SocketAddr, request: &Hostile, answer: &mut Vec<u8>) -> Ended {
    let Ok(mut stream) = TcpStream::connect(address).await else { return Ended::Silence };
    let (mut read, mut write) = stream.split();
    if let Some(end) = request.leaves_after {
        let _ = write.write_all(&request.bytes[..end.min(request.bytes.len())]).await;
        if request.kind == "leaving" {
            let _ = timeout(Duration::from_millis(20), read.read_u8()).await;
            return Ended::Left;
        }
        let _ = write.shutdown().await;
    }
    let sending = async {
        if request.leaves_after.is_none() {
            // A server may respond before it has read the whole body.
            let _ = write.write_all(&request.bytes).await;
            if !request.due {
                let _ = write.shutdown().await;
            }
        }
    };
    // After a reset or close, the bytes received before it count.
    let receiving = async {
        let mut piece = vec![0; 64 * 1024];
        while let Ok(n) = read.read(&mut piece).await {
            if n == 0 {
                break;
            }
            answer.extend_from_slice(&piece[..n]);
            answer.truncate(64 << 20);
        }
    };
    tokio::join!(sending, receiving);
    let status = answer.strip_prefix(b"HTTP/1.1 ").and_then(|rest| rest.get(..3));
    let status = status.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    match status {
        None => Ended::Silence,
        Some(200) if broken(answer) => Ended::Broken,
        Some(status) => Ended::Status(status),
    }
}

/// Whether a stream ended with a server error, other than the server being unavailable.
fn broken(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let error = text.find("data: {\"error\"").map(|at| &text[at..]);
    error.is_some_and(|error| {
        error.contains("\"server_error\"") && !error.contains("\"unavailable\"")
    })
}
