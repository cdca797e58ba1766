//! Tells HTTP/1 and HTTP/2 apart by the first bytes of a connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// What a client that speaks HTTP/2 sends first. No HTTP/1 request begins with it.
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Bytes read at once.
const CHUNK: usize = 2048;

/// A stream whose first bytes were read and are read again.
pub(super) struct Reread<S> {
    first: Vec<u8>,
    /// How much of `first` was read again.
    at: usize,
    stream: S,
}

impl<S> Reread<S> {
    /// A stream that begins with these bytes.
    pub(super) fn with(first: Vec<u8>, stream: S) -> Self {
        Self { first, at: 0, stream }
    }

    /// The first bytes.
    pub(super) fn first(&self) -> &[u8] {
        &self.first
    }

    /// The stream after its first bytes.
    pub(super) fn into_inner(self) -> S {
        self.stream
    }
}

impl<S: AsyncRead + Unpin> Reread<S> {
    /// Reads until the protocol is known; returns whether it is HTTP/2.
    pub(super) async fn new(stream: S) -> io::Result<(Self, bool)> {
        let mut this = Self::with(Vec::new(), stream);
        while PREFACE.starts_with(&this.first) && this.first.len() < PREFACE.len() {
            if this.read_more().await? == 0 {
                break;
            }
        }
        let two = this.first.starts_with(PREFACE);
        Ok((this, two))
    }

    /// Adds to the first bytes; returns how many.
    pub(super) async fn read_more(&mut self) -> io::Result<usize> {
        self.first.reserve(CHUNK);
        self.stream.read_buf(&mut self.first).await
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Reread<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.at == self.first.len() {
            (self.first, self.at) = (Vec::new(), 0);
            return Pin::new(&mut self.stream).poll_read(cx, into);
        }
        let end = self.first.len().min(self.at + into.remaining());
        into.put_slice(&self.first[self.at..end]);
        self.at = end;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Reread<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_bytes_decide_and_are_read_again() {
        let mut long = PREFACE.to_vec();
        long.extend_from_slice(&[7; 100]);
        for (sent, expected) in [
            (&long[..], true),
            (&PREFACE[..], true),
            (b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", false),
            (b"PRI * HTTP/1.1\r\n\r\n", false),
            (b"PRI", false),
            (b"", false),
        ] {
            // One byte at a time, and all at once.
            let slow = chunks(sent, 1);
            let quick = chunks(sent, sent.len().max(1));
            for stream in [slow, quick] {
                let (mut stream, two) = Reread::new(stream).await.unwrap();
                assert_eq!(two, expected, "{sent:?}");
                let mut found = Vec::new();
                stream.read_to_end(&mut found).await.unwrap();
                assert_eq!(found, sent);
            }
        }
    }

    /// A stream that returns at most `size` bytes per read.
    fn chunks(bytes: &[u8], size: usize) -> impl AsyncRead + Unpin {
        struct Chunks(std::collections::VecDeque<u8>, usize);
        impl AsyncRead for Chunks {
            fn poll_read(
                mut self: Pin<&mut Self>,
                _: &mut Context<'_>,
                into: &mut ReadBuf<'_>,
            ) -> Poll<io::Result<()>> {
                let most = self.1.min(into.remaining()).min(self.0.len());
                let part: Vec<u8> = self.0.drain(..most).collect();
                into.put_slice(&part);
                Poll::Ready(Ok(()))
            }
        }
        Chunks(bytes.iter().copied().collect(), size)
    }
}
