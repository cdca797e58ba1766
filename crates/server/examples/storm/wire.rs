//! One hostile request on a connection of its own, and what became of it.

use crate::hostile::Hostile;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long any answer may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ended {
    /// With this status.
    Status(u16),
    /// The client left, as it was meant to.
    Left,
    /// Without a word.
    Silence,
    /// It did not end in time.
    Never,
    /// A stream that began well and ended with an error of the server's.
    Broken,
}

/// What came back.
pub(crate) struct Outcome {
    pub(crate) ended: Ended,
    pub(crate) took: Duration,
    /// The beginning of the answer, for those who look into a failure.
    pub(crate) words: String,
}

/// Sends a request and waits for its answer.
pub(crate) async fn send(address: SocketAddr, request: &Hostile) -> Outcome {
    let began = Instant::now();
    let mut answer = Vec::new();
    let ended = match timeout(PATIENCE, exchange(address, request, &mut answer)).await {
        Err(_) => Ended::Never,
        Ok(ended) => ended,
    };
    let body = answer.windows(4).position(|w| w == b"\r\n\r\n").map_or(0, |at| at + 4);
    let words = String::from_utf8_lossy(&answer[body..]);
    let shown = |c: char| if c.is_control() { ' ' } else { c };
    let words = words.chars().map(shown).take(300).collect();
    Outcome { ended, took: began.elapsed(), words }
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
            // A server may answer before it has read all.
            let _ = write.write_all(&request.bytes).await;
            if !request.due {
                let _ = write.shutdown().await;
            }
        }
    };
    // Reset or closed: what came before counts.
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

/// Whether a stream ended with an error that is the server's own: not that it is busy or that the request
/// was wrong after all.
fn broken(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let error = text.find("data: {\"error\"").map(|at| &text[at..]);
    error.is_some_and(|error| {
        error.contains("\"server_error\"") && !error.contains("\"unavailable\"")
    })
}
