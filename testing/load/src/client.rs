//! A small HTTP/1.1 client: one request at a time per connection, bodies read as they arrive.

use std::io;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The most bytes of a response head.
const HEAD: usize = 64 * 1024;

/// Where to send requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Host and port, as in the `Host` header.
    pub host: String,
    /// Prepended to every path; empty, or `/…` without a trailing slash.
    pub prefix: String,
    /// Sent as a bearer token.
    pub key: Option<String>,
}

impl Target {
    /// Parses a base URL such as `http://127.0.0.1:8000` or `http://host/v1`; a trailing `/v1` is
    /// optional.
    pub fn parse(url: &str, key: Option<String>) -> Result<Self, String> {
        let rest = url
            .strip_prefix("http://")
            .ok_or_else(|| format!("{url:?}: only http:// is supported; use a proxy for TLS"))?;
        let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        if host.is_empty() {
            return Err(format!("{url:?} has no host"));
        }
        let port = host.rsplit_once(':').is_some_and(|(_, p)| p.parse::<u16>().is_ok());
        let host = if port { host.to_string() } else { format!("{host}:80") };
        let path = path.trim_end_matches('/');
        let prefix = path.strip_suffix("/v1").unwrap_or(path).to_string();
        Ok(Self { host, prefix, key })
    }
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The connection failed.
    #[error("connection: {0}")]
    Io(#[from] io::Error),
    /// The server closed the connection before the end of the response.
    #[error("the connection closed before the end of the response")]
    Closed,
    /// The response is not valid HTTP/1.1.
    #[error("invalid HTTP response: {0}")]
    Protocol(&'static str),
}

/// The head of a response.
#[derive(Clone, Debug)]
pub struct Head {
    /// The status.
    pub status: u16,
    /// The headers, with names in lower case.
    pub headers: Vec<(String, String)>,
}

impl Head {
    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// This many bytes of the body.
    Bytes(u64),
    /// The size of a chunk comes next.
    ChunkHead,
    /// This many bytes of a chunk, then its line end.
    Chunk(u64),
    /// Everything until the connection closes.
    UntilClose,
    Nothing,
}

/// One connection. It can be reused once a body has been read to its end.
pub struct Connection {
    stream: TcpStream,
    host: String,
    prefix: String,
    key: Option<String>,
    buffer: Vec<u8>,
    /// Bytes of `buffer` already consumed.
    used: usize,
    left: Left,
    reusable: bool,
}

impl Connection {
    /// Connects.
    pub async fn open(target: &Target) -> Result<Self, ClientError> {
        let stream = TcpStream::connect(&target.host).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            host: target.host.clone(),
            prefix: target.prefix.clone(),
            key: target.key.clone(),
            buffer: Vec::with_capacity(16 * 1024),
            used: 0,
            left: Left::Nothing,
            reusable: true,
        })
    }

    /// Whether another request may be sent.
    pub(crate) fn is_reusable(&self) -> bool {
        self.reusable && self.left == Left::Nothing
    }

    /// The socket, for tests with misbehaving clients.
    pub fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    /// Sends a request and reads the head of the response.
    pub async fn request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<Head, ClientError> {
        let mut text =
            format!("{method} {}{path} HTTP/1.1\r\nhost: {}\r\n", self.prefix, self.host);
        if let Some(key) = &self.key {
            text += &format!("authorization: Bearer {key}\r\n");
        }
        for (name, value) in headers {
            text += &format!("{name}: {value}\r\n");
        }
        if !body.is_empty() || method == "POST" {
            text +=
                &format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
        }
        text += "\r\n";
        let mut bytes = text.into_bytes();
        bytes.extend_from_slice(body);
        let sent = self.stream.write_all(&bytes).await;
        // A server may refuse before it has read the whole body: its response is still readable.
        let head = self.read_head(method == "HEAD").await;
        match (sent, head) {
            (_, Ok(head)) => Ok(head),
            (Err(e), Err(_)) => Err(e.into()),
            (Ok(()), Err(e)) => Err(e),
        }
    }

    async fn read_head(&mut self, no_body: bool) -> Result<Head, ClientError> {
        loop {
            let end = loop {
                let seen = &self.buffer[self.used..];
                if let Some(at) = seen.windows(4).position(|w| w == b"\r\n\r\n") {
                    break at;
                }
                if seen.len() > HEAD {
                    return Err(ClientError::Protocol("the head is too long"));
                }
                self.fill().await?;
            };
            let head = self.buffer[self.used..self.used + end].to_vec();
            self.used += end + 4;
            let head = parse_head(&head)?;
            if head.status / 100 == 1 {
                continue;
            }
            self.left = body_length(&head, no_body)?;
            let close = head.header("connection").is_some_and(|v| v.eq_ignore_ascii_case("close"));
            self.reusable = !close && self.left != Left::UntilClose;
            return Ok(head);
        }
    }

    /// Reads more bytes; an error at the end of the stream.
    async fn fill(&mut self) -> Result<(), ClientError> {
        if self.used == self.buffer.len() {
            self.buffer.clear();
            self.used = 0;
        } else if self.used > 64 * 1024 {
            self.buffer.drain(..self.used);
            self.used = 0;
        }
        match self.stream.read_buf(&mut self.buffer).await? {
            0 => Err(ClientError::Closed),
            _ => Ok(()),
        }
    }

    /// Passes the next bytes of the body to `sink`; false at its end.
    pub async fn read(&mut self, sink: &mut impl FnMut(&[u8])) -> Result<bool, ClientError> {
        loop {
            match self.left {
                Left::Nothing => return Ok(false),
                Left::Bytes(0) => self.left = Left::Nothing,
                Left::Bytes(left) => {
                    let n = self.give(left, sink).await?;
                    self.left = Left::Bytes(left - n);
                    return Ok(true);
                }
                Left::UntilClose => {
                    return match self.give(u64::MAX, sink).await {
                        Ok(_) => Ok(true),
                        Err(ClientError::Closed) => {
                            self.left = Left::Nothing;
                            Ok(false)
                        }
                        Err(e) => Err(e),
                    };
                }
                Left::ChunkHead => {
                    let line = self.line().await?;
                    let text = std::str::from_utf8(&line).unwrap_or("");
                    let size = text.split(';').next().unwrap_or("").trim();
                    let size = u64::from_str_radix(size, 16);
                    let size = size.map_err(|_| ClientError::Protocol("a chunk without a size"))?;
                    if size > 0 {
                        self.left = Left::Chunk(size);
                    } else {
                        // Trailers, if any, end with an empty line.
                        while !self.line().await?.is_empty() {}
                        self.left = Left::Nothing;
                    }
                }
                Left::Chunk(0) => {
                    if !self.line().await?.is_empty() {
                        return Err(ClientError::Protocol("a chunk is longer than its size"));
                    }
                    self.left = Left::ChunkHead;
                    // Continue only if the next chunk is already buffered; otherwise return without
                    // waiting.
                    if self.used == self.buffer.len() {
                        return Ok(true);
                    }
                }
                Left::Chunk(left) => {
                    let n = self.give(left, sink).await?;
                    self.left = Left::Chunk(left - n);
                }
            }
        }
    }

    async fn give(&mut self, most: u64, sink: &mut impl FnMut(&[u8])) -> Result<u64, ClientError> {
        if self.used == self.buffer.len() {
            self.fill().await?;
        }
        let there = &self.buffer[self.used..];
        let n = (there.len() as u64).min(most) as usize;
        sink(&there[..n]);
        self.used += n;
        Ok(n as u64)
    }

    async fn line(&mut self) -> Result<Vec<u8>, ClientError> {
        loop {
            let seen = &self.buffer[self.used..];
            if let Some(at) = seen.windows(2).position(|w| w == b"\r\n") {
                let line = seen[..at].to_vec();
                self.used += at + 2;
                return Ok(line);
            }
            if seen.len() > HEAD {
                return Err(ClientError::Protocol("a line is too long"));
            }
            self.fill().await?;
        }
    }

    /// The complete body.
    pub async fn body(&mut self) -> Result<Vec<u8>, ClientError> {
        let mut all = Vec::new();
        while self.read(&mut |bytes| all.extend_from_slice(bytes)).await? {}
        Ok(all)
    }
}

fn parse_head(bytes: &[u8]) -> Result<Head, ClientError> {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.split("\r\n");
    let first = lines.next().unwrap_or("");
    let status = first.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1));
    let status = status.and_then(|s| s.parse().ok());
    let status = status.ok_or(ClientError::Protocol("no status line"))?;
    let header = |line: &str| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_string()))
    };
    Ok(Head { status, headers: lines.filter_map(header).collect() })
}

fn body_length(head: &Head, no_body: bool) -> Result<Left, ClientError> {
    if no_body || head.status == 204 || head.status == 304 {
        return Ok(Left::Nothing);
    }
    let coding = head.header("transfer-encoding");
    if coding.is_some_and(|v| v.to_ascii_lowercase().contains("chunked")) {
        return Ok(Left::ChunkHead);
    }
    match head.header("content-length") {
        Some(length) => {
            let length = length.parse();
            length.map(Left::Bytes).map_err(|_| ClientError::Protocol("invalid content-length"))
        }
        None => Ok(Left::UntilClose),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_urls() {
        let parse = |url| Target::parse(url, None).map(|t| (t.host, t.prefix));
        let pair = |a: &str, b: &str| Ok((a.to_string(), b.to_string()));
        assert_eq!(parse("http://localhost:8000"), pair("localhost:8000", ""));
        assert_eq!(parse("http://localhost:8000/v1/"), pair("localhost:8000", ""));
        assert_eq!(parse("http://[::1]:8000/v1"), pair("[::1]:8000", ""));
        assert_eq!(parse("http://host/api/v1"), pair("host:80", "/api"));
        assert!(parse("https://host").is_err());
        assert!(parse("http:///x").is_err());
    }
}
