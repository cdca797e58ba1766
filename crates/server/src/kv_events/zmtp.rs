//! As much of ZMTP 3, the protocol of ZMQ, as a publisher and a replay socket need: the NULL mechanism, frames,
//! subscriptions as messages (3.0) or commands (3.1), and heartbeats.

use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// Longest frame that a peer may send: subscriptions, commands and sequence numbers are short.
const LONGEST: u64 = 4096;

/// An error for a peer that is not understood.
pub(super) fn refuse(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// A frame from a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) more: bool,
    command: bool,
    pub(super) body: Vec<u8>,
}

impl Frame {
    /// The data of a command with this name.
    fn command(&self, name: &str) -> Option<&[u8]> {
        let (&len, rest) = self.body.split_first()?;
        let named = self.command && usize::from(len) == name.len();
        rest.strip_prefix(name.as_bytes()).filter(|_| named)
    }

    /// The context of a heartbeat, which the answer repeats.
    pub(super) fn ping(&self) -> Option<&[u8]> {
        // Two bytes say how long the peer waits.
        self.command("PING")?.get(2..)
    }

    /// A topic that is subscribed to (true) or no longer.
    pub(super) fn subscription(&self) -> Option<(bool, &[u8])> {
        if self.command {
            let topic = self.command("SUBSCRIBE").map(|topic| (true, topic));
            return topic.or_else(|| Some((false, self.command("CANCEL")?)));
        }
        match self.body.split_first()? {
            (1, topic) => Some((true, topic)),
            (0, topic) => Some((false, topic)),
            _ => None,
        }
    }
}

/// A frame that has been read in part: reading may be cancelled and go on later.
#[derive(Default)]
pub(super) struct Partial {
    read: Vec<u8>,
}

impl Partial {
    /// The frame if it is complete, else how many bytes are missing at least.
    fn frame(&mut self) -> io::Result<Result<Frame, usize>> {
        let have = self.read.len();
        let Some(&flags) = self.read.first() else { return Ok(Err(2)) };
        let head = if flags & LONG > 0 { 9 } else { 2 };
        if have < head {
            return Ok(Err(head - have));
        }
        let len = match self.read[1..head] {
            [len] => u64::from(len),
            _ => u64::from_be_bytes(self.read[1..9].try_into().expect("eight bytes")),
        };
        if len > LONGEST {
            return Err(refuse("a frame is too long"));
        }
        let whole = head + len as usize;
        if have < whole {
            return Ok(Err(whole - have));
        }
        let body = self.read.split_off(head);
        self.read.clear();
        Ok(Ok(Frame { more: flags & MORE > 0, command: flags & COMMAND > 0, body }))
    }
}

/// A connection after the handshake.
#[derive(Debug)]
pub(super) struct Wire<S>(S);

pub(super) struct Reader<S>(ReadHalf<S>);

pub(super) struct Writer<S>(WriteHalf<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> Wire<S> {
    /// Introduces a socket of type `own` to a peer, which must be one of `peers`.
    pub(super) async fn introduce(mut stream: S, own: &str, peers: &[&str]) -> io::Result<Self> {
        let mut greeting = [0; 64];
        (greeting[0], greeting[9]) = (0xff, 0x7f);
        // Version 3.0: then peers subscribe by messages, which every version can.
        greeting[10] = 3;
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).await?;
        let mut theirs = [0; 64];
        stream.read_exact(&mut theirs).await?;
        if theirs[0] != 0xff || theirs[9] & 1 != 1 || theirs[10] < 3 {
            return Err(refuse("the peer does not speak ZMTP 3"));
        }
        if theirs[12..16] != *b"NULL" || theirs[16] != 0 {
            return Err(refuse("the peer asks for an authentication that there is not"));
        }
        let mut ready = vec![5];
        ready.extend(b"READY");
        for (name, value) in [("Socket-Type", own), ("Identity", "")] {
            ready.push(name.len() as u8);
            ready.extend(name.as_bytes());
            ready.extend((value.len() as u32).to_be_bytes());
            ready.extend(value.as_bytes());
        }
        stream.write_all(&[&[COMMAND, ready.len() as u8], ready.as_slice()].concat()).await?;
        let mut partial = Partial::default();
        let frame = read_frame(&mut stream, &mut partial).await?;
        let data = frame.command("READY").ok_or_else(|| refuse("the peer is not ready"))?;
        match socket_type(data) {
            Some(found) if peers.iter().any(|peer| peer.as_bytes() == found) => Ok(Wire(stream)),
            _ => Err(refuse("the peer is a socket of the wrong type")),
        }
    }

    pub(super) fn split(self) -> (Reader<S>, Writer<S>) {
        let (reader, writer) = tokio::io::split(self.0);
        (Reader(reader), Writer(writer))
    }
}

/// The value of `Socket-Type` among the properties of READY.
fn socket_type(mut data: &[u8]) -> Option<&[u8]> {
    loop {
        let (&len, rest) = data.split_first()?;
        let (name, rest) = rest.split_at_checked(len.into())?;
        let (len, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        if name.eq_ignore_ascii_case(b"socket-type") {
            return Some(value);
        }
        data = rest;
    }
}

async fn read_frame(
    stream: &mut (impl AsyncRead + Unpin),
    partial: &mut Partial,
) -> io::Result<Frame> {
    loop {
        match partial.frame()? {
            Ok(frame) => return Ok(frame),
            Err(missing) => {
                let mut piece = [0; 512];
                let most = missing.min(piece.len());
                let read = stream.read(&mut piece[..most]).await?;
                if read == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                partial.read.extend(&piece[..read]);
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Reader<S> {
    /// The next frame; what was read of it stays in `partial` if this is cancelled.
    pub(super) async fn frame(&mut self, partial: &mut Partial) -> io::Result<Frame> {
        read_frame(&mut self.0, partial).await
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Writer<S> {
    /// Sends a message of these frames.
    pub(super) async fn send(&mut self, frames: &[&[u8]]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
        for (at, frame) in frames.iter().enumerate() {
            let more = if at + 1 < frames.len() { MORE } else { 0 };
            match u8::try_from(frame.len()) {
                Ok(len) => bytes.extend([more, len]),
                Err(_) => {
                    bytes.push(more | LONG);
                    bytes.extend((frame.len() as u64).to_be_bytes());
                }
            }
            bytes.extend(*frame);
        }
        self.0.write_all(&bytes).await
    }

    /// Answers a heartbeat.
    pub(super) async fn pong(&mut self, context: &[u8]) -> io::Result<()> {
        // A context has at most 16 bytes.
        let context = &context[..context.len().min(16)];
        let body = [b"\x04PONG", context].concat();
        self.0.write_all(&[&[COMMAND, body.len() as u8], body.as_slice()].concat()).await
    }
}
