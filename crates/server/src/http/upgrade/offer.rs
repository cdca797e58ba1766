//! The request that offers an upgrade.
//!
//! Everything is refused that two parsers might read differently, or that a proxy might have written:
//! bodies, several values where there is one, unusual characters, and headers that proxies add.

use crate::config::Limits;
use crate::http::base64;

/// The largest frame that every server accepts.
const FRAME: usize = 16_384;
/// The frame type of headers, and of more headers.
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// What a beginning of a connection means.
#[derive(Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing yet.
    More,
    /// HTTP/1: there is no offer, or it is not taken.
    No,
    /// HTTP/2, with this request.
    Upgrade(First),
}

/// The first request of an upgraded connection.
#[derive(Debug, PartialEq, Eq)]
pub struct First {
    settings: Vec<u8>,
    /// Names and values in the order of HTTP/2.
    fields: Vec<(String, String)>,
}

impl First {
    /// Appends the client's settings and the request as frames: those of the request's header, then
    /// `settings` of the client's frame, all in one frame because the client expects one
    /// acknowledgement.
    pub fn write(&self, settings: &[u8], out: &mut Vec<u8>) {
        frame(super::SETTINGS, 0, 0, &[&self.settings[..], settings].concat(), out);
        let mut block = Vec::new();
        for (name, value) in &self.fields {
            // A literal that is not put into the table, with a new name.
            block.push(0);
            text(name, &mut block);
            text(value, &mut block);
        }
        let parts = block.chunks(FRAME);
        let last = parts.len() - 1;
        for (index, part) in parts.enumerate() {
            let (kind, begin) = if index == 0 { (HEADERS, END_STREAM) } else { (CONTINUATION, 0) };
            let end = if index == last { END_HEADERS } else { 0 };
            frame(kind, begin | end, 1, part, out);
        }
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8], out: &mut Vec<u8>) {
    let length = u32::try_from(payload.len()).expect("a payload has at most 16384 bytes");
    out.extend_from_slice(&length.to_be_bytes()[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
}

/// A string of HPACK, not compressed.
fn text(text: &str, out: &mut Vec<u8>) {
    let mut left = text.len();
    if left < 127 {
        out.push(left as u8);
    } else {
        out.push(127);
        left -= 127;
        while left >= 128 {
            out.push(left as u8 | 128);
            left >>= 7;
        }
        out.push(left as u8);
    }
    out.extend_from_slice(text.as_bytes());
}

/// Reads a request line by line until it is known to be an offer or not.
pub struct Offer {
    most_bytes: usize,
    most_fields: usize,
    /// Where the next line begins, and where to look for its end.
    line: usize,
    scanned: usize,
    method: String,
    path: String,
    host: Option<String>,
    connection: bool,
    upgrade: bool,
    length: bool,
    settings: Option<Vec<u8>>,
    fields: Vec<(String, String)>,
    count: usize,
}

/// The line cannot be part of an offer.
struct NoOffer;

impl Offer {
    /// Before the first byte.
    pub fn new(limits: &Limits) -> Self {
        Self {
            most_bytes: limits.header_bytes as usize,
            most_fields: limits.headers as usize,
            line: 0,
            scanned: 0,
            method: String::new(),
            path: String::new(),
            host: None,
            connection: false,
            upgrade: false,
            length: false,
            settings: None,
            fields: Vec::new(),
            count: 0,
        }
    }

    /// Reads on; `bytes` are all that came so far.
    pub fn read(&mut self, bytes: &[u8]) -> Look {
        while let Some(end) = bytes[self.scanned..].iter().position(|byte| *byte == b'\n') {
            let next = self.scanned + end + 1;
            let Some(line) = bytes[self.line..next].strip_suffix(b"\r\n") else { return Look::No };
            let fields = !self.method.is_empty();
            if next > self.most_bytes {
                return Look::No;
            }
            if fields && line.is_empty() {
                // A client that sends more before the answer has not understood the protocol.
                let alone = next == bytes.len();
                return if alone { self.finish() } else { Look::No };
            }
            let read = if fields { self.field(line) } else { self.request_line(line) };
            if read.is_err() {
                return Look::No;
            }
            (self.line, self.scanned) = (next, next);
        }
        self.scanned = bytes.len();
        if bytes.len() >= self.most_bytes { Look::No } else { Look::More }
    }

    fn request_line(&mut self, line: &[u8]) -> Result<(), NoOffer> {
        let mut words = line.split(|byte| *byte == b' ');
        let (Some(method), Some(path), Some(b"HTTP/1.1"), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(NoOffer);
        };
        let plain = method.iter().all(u8::is_ascii_uppercase) && method != b"CONNECT";
        let path_plain = path.first() == Some(&b'/')
            && path.iter().all(|byte| byte.is_ascii_graphic() && *byte != b'#');
        if !plain || !(1..=16).contains(&method.len()) || !path_plain {
            return Err(NoOffer);
        }
        self.method = ascii(method);
        self.path = ascii(path);
        Ok(())
    }

    fn field(&mut self, line: &[u8]) -> Result<(), NoOffer> {
        self.count += 1;
        let colon = line.iter().position(|byte| *byte == b':').ok_or(NoOffer)?;
        let name = &line[..colon];
        let value = trim(&line[colon + 1..]);
        let token = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
        let plain = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
        if name.is_empty()
            || !name.iter().all(token)
            || !value.iter().all(plain)
            || self.count > self.most_fields
        {
            return Err(NoOffer);
        }
        let (name, value) = (ascii(name).to_ascii_lowercase(), ascii(value));
        match name.as_str() {
            "host" if self.host.is_none() && is_authority(&value) => self.host = Some(value),
            "connection" if !self.connection && offers(&value) => self.connection = true,
            "upgrade" if !self.upgrade && value.eq_ignore_ascii_case("h2c") => self.upgrade = true,
            "http2-settings" if self.settings.is_none() => {
                self.settings = Some(settings(&value).ok_or(NoOffer)?);
            }
            "content-length" if !self.length && value == "0" => self.length = true,
            "host" | "connection" | "upgrade" | "http2-settings" | "content-length" => {
                return Err(NoOffer);
            }
            // Between two neighbours only, or about a body.
            "transfer-encoding"
            | "te"
            | "trailer"
            | "expect"
            | "keep-alive"
            | "proxy-connection"
            | "proxy-authorization" => return Err(NoOffer),
            // Written by proxies.
            "via" | "forwarded" | "x-real-ip" | "x-client-ip" | "true-client-ip" => {
                return Err(NoOffer);
            }
            other if other.starts_with("x-forwarded-") || other.starts_with("x-envoy-") => {
                return Err(NoOffer);
            }
            _ => self.fields.push((name, value)),
        }
        Ok(())
    }

    fn finish(&mut self) -> Look {
        let (Some(host), Some(settings)) = (self.host.take(), self.settings.take()) else {
            return Look::No;
        };
        if !self.connection || !self.upgrade {
            return Look::No;
        }
        let take = std::mem::take;
        let mut fields = vec![
            (":method".into(), take(&mut self.method)),
            (":scheme".into(), "http".into()),
            (":authority".into(), host),
            (":path".into(), take(&mut self.path)),
        ];
        fields.append(&mut self.fields);
        Look::Upgrade(First { settings, fields })
    }
}

/// Without spaces around it. Tabs and other white space are no part of an offer.
fn trim(mut value: &[u8]) -> &[u8] {
    while let [b' ', rest @ ..] | [rest @ .., b' '] = value {
        value = rest;
    }
    value
}

fn ascii(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

fn is_authority(host: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte);
    !host.is_empty() && host.bytes().all(plain)
}

/// Whether the options of a connection are those of an offer.
fn offers(options: &str) -> bool {
    let mut found = [0; 2];
    for option in options.split(',').map(str::trim) {
        if option.eq_ignore_ascii_case("upgrade") {
            found[0] += 1;
        } else if option.eq_ignore_ascii_case("http2-settings") {
            found[1] += 1;
        } else {
            return false;
        }
    }
    found == [1, 1]
}

/// The settings in a header: base64 for URLs, without padding.
fn settings(text: &str) -> Option<Vec<u8>> {
    if text.len() > super::SETTINGS_BYTES / 3 * 4 {
        return None;
    }
    let out = base64::decode(text, *b"-_")?;
    // Six bytes are eight characters: nothing is left over.
    let whole = text.len().is_multiple_of(8) && out.len().is_multiple_of(6);
    (whole && out.chunks_exact(6).all(is_setting)).then_some(out)
}

/// Whether a setting has a value that RFC 9113 allows.
fn is_setting(setting: &[u8]) -> bool {
    let [id_high, id_low, value @ ..] = setting else { return false };
    let value = value.iter().fold(0u32, |value, byte| value << 8 | u32::from(*byte));
    match u16::from_be_bytes([*id_high, *id_low]) {
        // Whether the server may push.
        2 => value <= 1,
        // The window of a stream.
        4 => value < 1 << 31,
        // The largest frame.
        5 => (1 << 14..1 << 24).contains(&value),
        // Extended CONNECT.
        8 => value <= 1,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFER: &str = "GET /health HTTP/1.1\r\nHost: localhost:1\r\n\
        Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\
        HTTP2-Settings: AAMAAABkAAQAAP__\r\nX-Api-Key: k\r\n\r\n";

    fn look(text: &str) -> Look {
        Offer::new(&Limits::default()).read(text.as_bytes())
    }

    fn fields(look: Look) -> Vec<(String, String)> {
        let Look::Upgrade(first) = look else { panic!("{look:?}") };
        assert_eq!(first.settings, [0, 3, 0, 0, 0, 100, 0, 4, 0, 0, 255, 255]);
        first.fields
    }

    #[test]
    fn an_offer_is_read_in_any_pieces() {
        let whole = fields(look(OFFER));
        let expected = [
            (":method", "GET"),
            (":scheme", "http"),
            (":authority", "localhost:1"),
            (":path", "/health"),
            ("x-api-key", "k"),
        ];
        let expected = expected.map(|(name, value)| (name.to_string(), value.to_string()));
        assert_eq!(whole, expected);
        let mut offer = Offer::new(&Limits::default());
        for end in 0..OFFER.len() {
            assert_eq!(offer.read(&OFFER.as_bytes()[..end]), Look::More, "{end}");
        }
        assert_eq!(fields(offer.read(OFFER.as_bytes())), expected);
        let empty = OFFER.replace("\r\n\r\n", "\r\nContent-Length: 0\r\n\r\n");
        assert_eq!(fields(look(&empty)), expected);
    }

    #[test]
    fn whatever_is_odd_is_no_offer() {
        let changed = |from: &str, to: &str| {
            let text = OFFER.replace(from, to);
            assert_ne!(text, OFFER, "{from}");
            text
        };
        let with = |line: &str| changed("X-Api-Key: k", line);
        let mut odd = vec![
            changed("Upgrade, HTTP2-Settings", "Upgrade"),
            changed("Upgrade, HTTP2-Settings", "HTTP2-Settings"),
            changed("Upgrade, HTTP2-Settings", "Upgrade, HTTP2-Settings, close"),
            changed("Upgrade, HTTP2-Settings", "Upgrade, Upgrade, HTTP2-Settings"),
            changed("Upgrade: h2c", "Upgrade: h2c, websocket"),
            changed("Upgrade: h2c", "Upgrade: h2"),
            changed("Upgrade: h2c", "X: h2c"),
            changed("Upgrade: h2c", "Upgrade : h2c"),
            changed("Upgrade: h2c", "Upgrade: h2c\r\nUpgrade: h2c"),
            changed("AAMAAABkAAQAAP__", "AAMAAABkAAQAAP_"),
            changed("AAMAAABkAAQAAP__", "AAMAAABkAAQAAP/+"),
            changed("AAMAAABkAAQAAP__", "AAMAAABkAAQAAP=="),
            // A window and a frame that are too large.
            changed("AAMAAABkAAQAAP__", "AAQAAP__AAT_____"),
            changed("AAMAAABkAAQAAP__", "AAX_____"),
            changed("AAMAAABkAAQAAP__", &"AAMAAABk".repeat(65)),
            changed("HTTP2-Settings: ", "HTTP2-Setting: "),
            changed("HTTP/1.1", "HTTP/1.0"),
            changed("GET /health", "GET  /health"),
            changed("GET /health", "get /health"),
            changed("GET /health", "CONNECT /health"),
            changed("GET /health", "OPTIONS *"),
            changed("GET /health", "GET http://localhost/health"),
            changed("GET /health", "\r\nGET /health"),
            changed("Host: localhost:1", "Host: "),
            changed("Host: localhost:1", "Host: user@localhost"),
            changed("Host: localhost:1", "Host: a\r\nHost: a"),
            changed("Host: localhost:1\r\n", ""),
            changed("\r\nUpgrade", "\nUpgrade"),
            format!("{OFFER}GET / HTTP/1.1\r\n"),
        ];
        odd.extend(
            [
                "Content-Length: 1",
                "Content-Length: 00",
                "Content-Length: 0\r\nContent-Length: 0",
                "Transfer-Encoding: chunked",
                "TE: trailers",
                "Expect: 100-continue",
                "Via: 1.1 proxy",
                "X-Forwarded-For: 1.2.3.4",
                "Forwarded: for=1.2.3.4",
                "X: a\r\n folded",
                "X: a\rb",
                "X: a\r",
                "X:\ta",
                "X: a\0b",
                "X: a\tb",
                "X: ü",
                "X y: a",
                ": a",
                "no colon",
            ]
            .map(with),
        );
        for text in odd {
            assert_eq!(look(&text), Look::No, "{text:?}");
        }
    }

    #[test]
    fn limits_of_headers_hold() {
        let limits = Limits { header_bytes: 8192, headers: 6, ..Limits::default() };
        let read = |text: &str| Offer::new(&limits).read(text.as_bytes());
        let with = |lines: &str| OFFER.replace("X-Api-Key: k", lines);
        assert!(matches!(read(&with("A: 1\r\nB: 2")), Look::Upgrade(_)));
        assert_eq!(read(&with("A: 1\r\nB: 2\r\nC: 3")), Look::No);
        assert!(matches!(read(&with(&format!("A: {}", "a".repeat(7000)))), Look::Upgrade(_)));
        assert_eq!(read(&with(&format!("A: {}", "a".repeat(8192)))), Look::No);
        assert_eq!(read(&"a".repeat(8192)), Look::No);
    }

    #[test]
    fn long_headers_take_several_frames() {
        let Look::Upgrade(first) =
            look(&OFFER.replace(": k", &format!(": {}", "k".repeat(20_000))))
        else {
            panic!("no offer");
        };
        let mut bytes = Vec::new();
        first.write(&[0, 1, 0, 0, 0, 0], &mut bytes);
        let (mut found, mut rest) = (Vec::new(), &bytes[..]);
        while let [a, b, c, kind, flags, s0, s1, s2, s3, after @ ..] = rest {
            let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
            found.push((*kind, *flags, u32::from_be_bytes([*s0, *s1, *s2, *s3]), length));
            rest = &after[length..];
        }
        assert!(rest.is_empty());
        assert_eq!(found[..2], [(4, 0, 0, 18), (HEADERS, END_STREAM, 1, FRAME)]);
        assert!(matches!(found[2..], [(CONTINUATION, END_HEADERS, 1, _)]));
    }
}
