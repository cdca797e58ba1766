//! `Upgrade: h2c`: a connection that begins in HTTP/1 and goes on in HTTP/2 (RFC 7540, 3.2).
//!
//! The first request of the connection becomes stream 1. The client is told 101, sends the preface of
//! HTTP/2 and its settings, and the HTTP/2 server gets these with the headers of the request behind
//! them, as if the client had sent them: every limit of HTTP/2 holds for it.
//!
//! A proxy that forwards the upgrade does not see the requests that follow. So an offer counts only if
//! it is exactly as clients write it (`upgrade/offer.rs`); all others are answered in HTTP/1, as the
//! RFC permits.

mod offer;

pub use offer::{First, Look, Offer};

use super::preface::{PREFACE, Reread};
use crate::config::Limits;
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const SWITCHING: &[u8] =
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n";
/// Bytes of the settings in a frame or header: each takes six, and six are defined.
const SETTINGS_BYTES: usize = 6 * 64;
/// The frame type of settings.
const SETTINGS: u8 = 4;

/// Reads the first request of a connection; returns whether it goes on in HTTP/2.
pub(super) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: Reread<S>,
    limits: &Limits,
) -> io::Result<(Reread<S>, bool)> {
    let mut offer = Offer::new(limits);
    let first = loop {
        match offer.read(stream.first()) {
            Look::No => return Ok((stream, false)),
            Look::Upgrade(first) => break first,
            Look::More => {}
        }
        if stream.read_more().await? == 0 {
            return Ok((stream, false));
        }
    };
    // The offer was all that came.
    let mut stream = stream.into_inner();
    stream.write_all(SWITCHING).await?;
    stream.flush().await?;
    let settings = read_settings(&mut stream).await?;
    let mut bytes = PREFACE.to_vec();
    first.write(&settings, &mut bytes);
    Ok((Reread::with(bytes, stream), true))
}

/// The settings that follow the client's preface.
async fn read_settings<S: AsyncRead + Unpin>(stream: &mut S) -> io::Result<Vec<u8>> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "no HTTP/2 after the upgrade");
    let mut head = [0; PREFACE.len() + 9];
    stream.read_exact(&mut head).await?;
    let Some([0, high, low, SETTINGS, 0, 0, 0, 0, 0]) = head.strip_prefix(PREFACE) else {
        return Err(invalid());
    };
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    if length > SETTINGS_BYTES || !length.is_multiple_of(6) {
        return Err(invalid());
    }
    let mut settings = vec![0; length];
    stream.read_exact(&mut settings).await?;
    Ok(settings)
}
