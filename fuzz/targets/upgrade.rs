//! Any bytes as the beginning of a connection: an offer to upgrade is the same in pieces and at once,
//! and a second parser agrees with what was read from it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use server::Limits;
use server::http::upgrade::{First, Look, Offer};

/// Headers that are not handed on.
const DROPPED: [&str; 5] = ["host", "connection", "upgrade", "http2-settings", "content-length"];

fn whole(bytes: &[u8]) -> Look {
    Offer::new(&Limits::default()).read(bytes)
}

/// Names and values in frames of HTTP/2.
fn decode(mut frames: &[u8]) -> Vec<(String, String)> {
    let (mut block, mut kinds) = (Vec::new(), Vec::new());
    while let [a, b, c, kind, flags, 0, 0, 0, stream, rest @ ..] = frames {
        let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
        assert!(length <= 16_384);
        kinds.push((*kind, *flags, *stream));
        if *stream == 1 {
            block.extend_from_slice(&rest[..length]);
        }
        frames = &rest[length..];
    }
    assert!(frames.is_empty());
    // Settings, then headers that end the stream, then continuations; the last one ends the headers.
    assert_eq!(kinds[0], (4, 0, 0));
    assert_eq!((kinds[1].0, kinds[1].1 & 1), (1, 1));
    assert!(kinds[2..].iter().all(|kind| kind.0 == 9 && kind.1 & 1 == 0));
    let ends = |kind: &(u8, u8, u8)| kind.1 & 4 == 4;
    assert!(kinds[1..].iter().rposition(ends) == kinds[1..].iter().position(ends));
    assert!(kinds.last().is_some_and(ends));
    let (mut fields, mut at) = (Vec::new(), 0);
    while at < block.len() {
        assert_eq!(block[at], 0, "a literal that is not indexed");
        at += 1;
        let name = text(&block, &mut at);
        fields.push((name, text(&block, &mut at)));
    }
    fields
}

fn text(block: &[u8], at: &mut usize) -> String {
    let mut length = usize::from(block[*at]);
    assert!(length < 128, "not compressed");
    *at += 1;
    if length == 127 {
        let mut shift = 0;
        loop {
            let byte = block[*at];
            *at += 1;
            length += usize::from(byte & 127) << shift;
            shift += 7;
            if byte < 128 {
                break;
            }
        }
    }
    *at += length;
    String::from_utf8(block[*at - length..*at].to_vec()).unwrap()
}

/// A second parser reads the same request, to its last byte.
fn compare(bytes: &[u8], first: &First) {
    let mut headers = [httparse::EMPTY_HEADER; 100];
    let mut request = httparse::Request::new(&mut headers);
    let parsed = request.parse(bytes).expect("an offer is a request");
    assert_eq!(parsed, httparse::Status::Complete(bytes.len()));
    assert_eq!(request.version, Some(1));
    let named = |name: &str| {
        let is = |h: &&httparse::Header<'_>| h.name.eq_ignore_ascii_case(name);
        let mut found = request.headers.iter().filter(is);
        let value = found.next().map(|h| String::from_utf8(h.value.to_vec()).unwrap());
        assert!(value.is_none() || found.next().is_none() || !DROPPED.contains(&name));
        value
    };
    assert_eq!(named("upgrade").unwrap().to_lowercase(), "h2c");
    assert!(named("content-length").is_none_or(|length| length == "0"));
    assert!(named("transfer-encoding").is_none());
    let mut expected = vec![
        (":method".to_string(), request.method.unwrap().to_string()),
        (":scheme".into(), "http".into()),
        (":authority".into(), named("host").unwrap()),
        (":path".into(), request.path.unwrap().into()),
    ];
    for header in request.headers.iter() {
        let name = header.name.to_lowercase();
        if !DROPPED.contains(&name.as_str()) {
            let value = String::from_utf8(header.value.to_vec()).unwrap();
            expected.push((name, value.trim_matches(' ').into()));
        }
    }
    let mut frames = Vec::new();
    first.write(&[0, 1, 0, 0, 0, 0], &mut frames);
    assert_eq!(decode(&frames), expected);
}

fuzz_target!(|input: (u8, &[u8])| {
    let (size, bytes) = input;
    let size = usize::from(size).max(1);
    let once = whole(bytes);
    let mut offer = Offer::new(&Limits::default());
    let mut at = 0;
    let pieces = loop {
        at = (at + size).min(bytes.len());
        match offer.read(&bytes[..at]) {
            Look::More if at < bytes.len() => {}
            look => break look,
        }
    };
    // More bytes after the head refuse an offer, and in pieces they come too late to be seen.
    if at == bytes.len() {
        assert_eq!(pieces, once);
    }
    if let Look::Upgrade(first) = &once {
        compare(bytes, first);
    }
    if let Look::Upgrade(first) = &pieces {
        compare(&bytes[..at], first);
    }
});
