//! `Upgrade: h2c`: the first request becomes stream 1, and every limit holds.

use crate::bed::{Bed, config, model, soon};
use mock::MockConfig;
use serde_json::{Value, json};
use server::Exit;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
const SWITCHING: &str = "HTTP/1.1 101 Switching Protocols\r\n";
const OFFER: [(&str, &str); 3] = [
    ("connection", "Upgrade, HTTP2-Settings"),
    ("upgrade", "h2c"),
    ("http2-settings", "AAMAAABkAAQAAP__"),
];
/// `:status: 200` in a block of headers.
const OK: u8 = 0x88;

/// Sends a request with an offer; returns the head of the answer.
async fn offer(bed: &Bed, path: &str, extra: &str) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(&bed.target.host).await.unwrap();
    let offer: String = OFFER.map(|(name, value)| format!("{name}: {value}\r\n")).concat();
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{offer}{extra}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    while !answer.ends_with("\r\n\r\n") {
        answer.push(soon("a head", stream.read_u8()).await.unwrap().into());
    }
    (stream, answer)
}

/// The same, for an offer that must be taken; the client's preface is sent.
async fn upgraded(bed: &Bed, path: &str, extra: &str) -> TcpStream {
    let (mut stream, head) = offer(bed, path, extra).await;
    assert!(head.starts_with(SWITCHING), "{head}");
    stream.write_all(&[PREFACE, SETTINGS].concat()).await.unwrap();
    stream
}

/// The frames of a request with a short body.
fn post(path: &str, body: &str, id: u8) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "localhost"),
        (":path", path),
        ("content-type", "application/json"),
    ] {
        block.push(0);
        for text in [name, value] {
            block.push(text.len() as u8);
            block.extend(text.bytes());
        }
    }
    let frame = |kind: u8, flags: u8, payload: &[u8]| {
        [&[0, 0, payload.len() as u8, kind, flags, 0, 0, 0, id], payload].concat()
    };
    [frame(1, 4, &block), frame(0, 1, body.as_bytes())].concat()
}

/// The answer on stream 1. The settings of the header and of the frame are acknowledged once.
async fn first_answer(stream: &mut TcpStream) -> (u8, String) {
    let found = answer_and_acknowledgements(stream, 1).await;
    assert_eq!(found.2, 1);
    (found.0, found.1)
}

/// The answer on a stream: the first byte of its headers, and its body.
async fn answer(stream: &mut TcpStream, id: u8) -> (u8, String) {
    let found = answer_and_acknowledgements(stream, id).await;
    (found.0, found.1)
}

async fn answer_and_acknowledgements(stream: &mut TcpStream, wanted: u8) -> (u8, String, u8) {
    let (mut status, mut body, mut acknowledged) = (0, Vec::new(), 0);
    loop {
        let mut head = [0; 9];
        soon("a frame", stream.read_exact(&mut head)).await.unwrap();
        let [a, b, c, kind, flags, _, _, _, id] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        stream.read_exact(&mut payload).await.unwrap();
        match (kind, id) {
            (0, _) if id == wanted => body.extend(payload),
            (1, _) if id == wanted => status = payload[0],
            (4, 0) => acknowledged += flags & 1,
            (6, 0) | (8, _) => {}
            _ => panic!("frame {kind} of stream {id}"),
        }
        if id == wanted && kind < 2 && flags & 1 == 1 {
            return (status, String::from_utf8(body).unwrap(), acknowledged);
        }
    }
}

#[tokio::test]
async fn the_request_is_answered_on_stream_1_and_others_follow() {
    let bed = Bed::new(MockConfig::default()).await;
    let mut stream = upgraded(&bed, "/v1/models", "").await;
    let (status, body) = first_answer(&mut stream).await;
    assert_eq!(status, OK);
    let models: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(models["data"][0]["id"], "mock");

    // The connection goes on with other streams.
    for (id, prompt) in [(3, "one"), (5, "two")] {
        let body = json!({"prompt": prompt}).to_string();
        stream.write_all(&post("/v1/completions", &body, id)).await.unwrap();
        let (status, body) = answer(&mut stream, id).await;
        assert_eq!(status, OK, "{body}");
        let made: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(made["choices"][0]["text"], prompt);
    }
    let mut empty = upgraded(&bed, "/health/live", "content-length: 0\r\n").await;
    assert_eq!(first_answer(&mut empty).await.0, OK);
}

#[tokio::test]
async fn requests_with_bodies_and_those_of_proxies_stay_in_http_1() {
    let bed = Bed::new(MockConfig::default()).await;
    let mut wire = bed.connect().await;
    let body = json!({"prompt": "well"}).to_string();
    // The second request comes on a connection that is in use.
    for _ in 0..2 {
        let head = wire.request("POST", "/v1/completions", &OFFER, body.as_bytes()).await.unwrap();
        assert_eq!(head.status, 200);
        let made: Value = serde_json::from_slice(&wire.body().await.unwrap()).unwrap();
        assert_eq!(made["choices"][0]["text"], "well");
    }
    for odd in ["via: 1.1 proxy\r\n", "x-forwarded-for: 10.0.0.1\r\n", "upgrade: websocket\r\n"] {
        let (_, head) = offer(&bed, "/health/live", odd).await;
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{odd}: {head}");
    }
}

#[tokio::test]
async fn keys_and_host_names_are_checked() {
    let mut config = config();
    config.api_keys = vec!["sesame".into()];
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    for (key, right) in
        [("", false), ("x-api-key: sesam\r\n", false), ("x-api-key: sesame\r\n", true)]
    {
        let mut stream = upgraded(&bed, "/v1/models", key).await;
        let (status, body) = first_answer(&mut stream).await;
        assert_eq!(status == OK, right, "{body}");
        assert_eq!(body.contains("API key"), !right, "{body}");
    }
}

#[tokio::test]
async fn headers_beyond_the_limits_of_http_2_are_refused() {
    let mut config = config();
    config.limits.headers = 8;
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    let mut stream = upgraded(&bed, "/v1/models", "a: 1\r\nb: 2\r\n").await;
    assert_eq!(first_answer(&mut stream).await.0, OK);
    // HTTP/1 refuses these.
    let many: String = (0..9).map(|i| format!("a{i}: 1\r\n")).collect();
    let (_, head) = offer(&bed, "/v1/models", &many).await;
    assert!(head.starts_with("HTTP/1.1 431 "), "{head}");
}

#[tokio::test]
async fn a_client_that_does_not_go_on_is_closed() {
    let mut config = config();
    config.limits.header_ms = 300;
    config.limits.write_ms = 400;
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    let ends: [&[u8]; 4] = [
        b"",
        b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\nmore than a preface has",
        // A preface without settings, and with an acknowledgement.
        &[PREFACE, &[0, 0, 0, 1, 5, 0, 0, 0, 3]].concat(),
        &[PREFACE, &[0, 0, 0, 4, 1, 0, 0, 0, 0]].concat(),
    ];
    for sent in ends {
        let (mut stream, head) = offer(&bed, "/health/live", "").await;
        assert!(head.starts_with(SWITCHING), "{head}");
        stream.write_all(sent).await.unwrap();
        let mut rest = Vec::new();
        // A reset is as good as an end.
        let _ = soon("the connection is closed", stream.read_to_end(&mut rest)).await;
        assert!(rest.is_empty(), "{rest:?}");
    }
    // One that is silent after its first request.
    let mut stream = upgraded(&bed, "/health/live", "").await;
    assert_eq!(first_answer(&mut stream).await.0, OK);
    let _ = soon("an idle connection is closed", stream.read_to_end(&mut Vec::new())).await;
}

#[tokio::test]
async fn a_stopping_server_waits_for_no_upgrade() {
    let mut bed = Bed::new(MockConfig::default()).await;
    let (_pending, head) = offer(&bed, "/health/live", "").await;
    assert!(head.starts_with(SWITCHING), "{head}");
    let mut idle = upgraded(&bed, "/health/live", "").await;
    assert_eq!(first_answer(&mut idle).await.0, OK);
    tokio::time::sleep(Duration::from_millis(10)).await;
    bed.begin_stop();
    assert_eq!(soon("the server ends", bed.ended()).await, Exit::Drained);
}
