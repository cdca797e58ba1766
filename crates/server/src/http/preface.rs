//! Tells HTTP/1 and HTTP/2 apart by the first bytes of a connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// What a client that speaks HTTP/2 sends first. No HTTP/1 request begins with it.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A stream whose first bytes were read and are read again.
pub(super) struct Reread<S> {
    first: [u8; PREFACE.len()],
    /// The part of `first` that is still to be read.
    left: std::ops::Range<usize>,
    stream: S,
}

impl<S: AsyncRead + Unpin> Reread<S> {
    /// Reads until the protocol is known; returns whether it is HTTP/2.
    pub(super) async fn new(mut stream: S) -> io::Result<(Self, bool)> {
        let (mut first, mut length) = ([0; PREFACE.len()], 0);
        while length < first.len() && first[..length] == PREFACE[..length] {
            match stream.read(&mut first[length..]).await? {
                0 => break,
                read => length += read,
            }
        }
        let two = first == *PREFACE;
        Ok((Self { first, left: 0..length, stream }, two))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Reread<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.left.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, into);
        }
        let end = self.left.end.min(self.left.start + into.remaining());
        into.put_slice(&self.first[self.left.start..end]);
        self.left.start = end;
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
