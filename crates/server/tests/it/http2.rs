//! HTTP/2: the same answers and the same limits as HTTP/1.

use crate::bed::{Bed, config, model, soon};
use bytes::Bytes;
use h2::client::SendRequest;
use h2::{Reason, RecvStream, SendStream};
use http::{Request, Response};
use mock::MockConfig;
use serde_json::{Value, json};
use server::Exit;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

const COMPLETIONS: &str = "/v1/completions";
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A client connection.
struct Two {
    send: SendRequest<Bytes>,
    connection: JoinHandle<Result<(), h2::Error>>,
}

impl Two {
    async fn new(bed: &Bed) -> Self {
        Self::with(bed, &h2::client::Builder::new()).await
    }

    async fn with(bed: &Bed, builder: &h2::client::Builder) -> Self {
        let stream = raw(bed).await;
        let (send, connection) = builder.handshake(stream).await.unwrap();
        Self { send, connection: tokio::spawn(connection) }
    }

    /// Sends headers; the body follows on the stream.
    async fn start(
        &self,
        request: Request<()>,
        end: bool,
    ) -> (h2::client::ResponseFuture, SendStream<Bytes>) {
        let mut send = self.send.clone().ready().await.unwrap();
        send.send_request(request, end).unwrap()
    }

    async fn post(&self, path: &str, body: &Value) -> Response<RecvStream> {
        let (answer, mut stream) = self.start(post(path), false).await;
        stream.send_data(body.to_string().into(), true).unwrap();
        soon("an answer", answer).await.unwrap()
    }

    async fn get(&self, path: &str) -> Response<RecvStream> {
        let (answer, _) = self.start(get(path), true).await;
        soon("an answer", answer).await.unwrap()
    }

    /// Waits until the server has closed the connection.
    async fn closed(self) {
        drop(self.send);
        let _ = soon("the connection is closed", self.connection).await;
    }
}

async fn raw(bed: &Bed) -> TcpStream {
    TcpStream::connect(&bed.target.host).await.unwrap()
}

fn get(path: &str) -> Request<()> {
    Request::get(format!("http://localhost{path}")).body(()).unwrap()
}

fn post(path: &str) -> Request<()> {
    let url = format!("http://localhost{path}");
    Request::post(url).header("content-type", "application/json").body(()).unwrap()
}

async fn text(mut body: RecvStream) -> String {
    let mut bytes = Vec::new();
    while let Some(data) = soon("data", body.data()).await {
        let data = data.unwrap();
        body.flow_control().release_capacity(data.len()).unwrap();
        bytes.extend_from_slice(&data);
    }
    String::from_utf8(bytes).unwrap()
}

async fn value(answer: Response<RecvStream>) -> Value {
    serde_json::from_str(&text(answer.into_body()).await).unwrap()
}

/// A long answer: a token per millisecond for a minute.
fn slow() -> MockConfig {
    MockConfig { step_time: Duration::from_millis(1), ..MockConfig::default() }
}

fn long() -> Value {
    json!({"prompt": "x".repeat(4000), "max_tokens": 4000, "stream": true})
}

#[tokio::test]
async fn answers_are_those_of_http_1() {
    let bed = Bed::new(MockConfig::default()).await;
    let two = Two::new(&bed).await;
    let body = json!({"prompt": "one and the same", "max_tokens": 20});
    let ours = value(two.post(COMPLETIONS, &body).await).await;
    let theirs = bed.ok(COMPLETIONS, &body).await;
    assert_eq!(ours["choices"], theirs["choices"]);
    assert_eq!(ours["usage"]["total_tokens"], theirs["usage"]["total_tokens"]);

    // Many streams at once on one connection, read side by side: the answers are larger than the
    // connection's window, so a client that reads them in turn may wait for one whose data cannot
    // come before the others' is read.
    let streamed = json!({"prompt": "one and the same", "max_tokens": 20, "stream": true});
    let all = (0..50).map(async |_| {
        let answer = two.post(COMPLETIONS, &streamed).await;
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        text(answer.into_body()).await
    });
    for events in futures(all).await {
        assert!(events.trim_end().ends_with("data: [DONE]"), "{events}");
        let made: String = events
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
            .filter_map(|event| Some(event["choices"][0]["text"].as_str()?.to_owned()))
            .collect();
        assert_eq!(made, theirs["choices"][0]["text"].as_str().unwrap());
    }
    let lost = two.get("/nothing").await;
    assert_eq!(lost.status(), 404);
    assert_eq!(value(lost).await["error"]["type"], "invalid_request_error");
}

/// Runs futures one after the other on the same task, all started before the first ends.
async fn futures<T>(all: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut all: Vec<_> = all.map(|one| (Box::pin(one), None)).collect();
    std::future::poll_fn(|cx| {
        let mut done = true;
        for (one, made) in &mut all {
            if made.is_none() {
                match one.as_mut().poll(cx) {
                    std::task::Poll::Ready(value) => *made = Some(value),
                    std::task::Poll::Pending => done = false,
                }
            }
        }
        if done { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    all.into_iter().filter_map(|(_, made)| made).collect()
}

#[tokio::test]
async fn a_reset_stream_cancels_its_request_and_no_other() {
    let bed = Bed::new(slow()).await;
    let two = Two::new(&bed).await;
    let (answer, mut first) = two.start(post(COMPLETIONS), false).await;
    first.send_data(long().to_string().into(), true).unwrap();
    let mut body = soon("an answer", answer).await.unwrap().into_body();
    soon("a token", body.data()).await.unwrap().unwrap();
    let other = two.post(COMPLETIONS, &long()).await;
    assert_eq!(bed.link.inflight(), 2);
    first.send_reset(Reason::CANCEL);
    bed.until("one request is left", || bed.link.inflight() == 1).await;
    // Dropping the last handle of a stream resets it, too.
    drop(other);
    bed.until("no request is left", || bed.link.inflight() == 0).await;

    // Before the headers of the answer, a reset is counted as 499.
    let whole = json!({"prompt": "x".repeat(4000), "max_tokens": 4000});
    let (answer, mut stream) = two.start(post(COMPLETIONS), false).await;
    stream.send_data(whole.to_string().into(), true).unwrap();
    bed.until("the request runs", || bed.link.inflight() == 1).await;
    stream.send_reset(Reason::CANCEL);
    drop(answer);
    bed.until("no request is left", || bed.link.inflight() == 0).await;
    let metrics = text(two.get("/metrics").await.into_body()).await;
    let counted = |line: &str| line.contains("status=\"499\"") && line.ends_with(" 1");
    assert!(metrics.lines().any(counted), "{metrics}");

    // A lost connection cancels all of its requests.
    let _answers = [two.post(COMPLETIONS, &long()).await, two.post(COMPLETIONS, &long()).await];
    assert_eq!(bed.link.inflight(), 2);
    two.connection.abort();
    bed.until("no request is left", || bed.link.inflight() == 0).await;
}

#[tokio::test]
async fn sizes_are_limited() {
    let mut config = config();
    config.limits.body_bytes = 10_000;
    config.limits.body_ms = 200;
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    let two = Two::new(&bed).await;
    let large = Request::get("http://localhost/health/live").header("x", "y".repeat(64 * 1024));
    let (answer, _) = two.start(large.body(()).unwrap(), true).await;
    assert_eq!(soon("an answer", answer).await.unwrap().status(), 431);
    let mut many = Request::get("http://localhost/health/live");
    for i in 0..200 {
        many = many.header(format!("x-{i}"), "y");
    }
    let (answer, _) = two.start(many.body(()).unwrap(), true).await;
    assert_eq!(soon("an answer", answer).await.unwrap().status(), 431);
    let body = json!({"prompt": "x".repeat(20_000)});
    assert_eq!(two.post(COMPLETIONS, &body).await.status(), 413);
    // A body that does not end.
    let (answer, mut stream) = two.start(post(COMPLETIONS), false).await;
    stream.send_data("{".into(), false).unwrap();
    assert_eq!(soon("an answer", answer).await.unwrap().status(), 408);
    let strange = Request::get("http://evil.example/health/live").body(()).unwrap();
    let (answer, _) = two.start(strange, true).await;
    assert_eq!(soon("an answer", answer).await.unwrap().status(), 421);
    assert_eq!(two.get("/health/live").await.status(), 200);
}

#[tokio::test]
async fn streams_are_limited_per_connection_and_in_total() {
    let mut config = config();
    config.limits.connections = 3;
    config.limits.streams = 2;
    let bed = Bed::with(config, slow(), model()).await;
    let (one, two) = (Two::new(&bed).await, Two::new(&bed).await);
    let held = [one.post(COMPLETIONS, &long()).await, one.post(COMPLETIONS, &long()).await];
    assert_eq!(one.send.current_max_send_streams(), 2);
    let last = two.post(COMPLETIONS, &long()).await;
    assert_eq!(last.status(), 200);
    let refused = two.post(COMPLETIONS, &long()).await;
    assert_eq!(refused.status(), 503);
    assert_eq!(value(refused).await["error"]["code"], "too_many_connections");
    drop(held);
    bed.until("one request is left", || bed.link.inflight() == 1).await;
    assert_eq!(two.get("/health/live").await.status(), 200);
}

#[tokio::test]
async fn a_flood_of_resets_closes_the_connection() {
    let bed = Bed::new(MockConfig::default()).await;
    // All frames in one write: the server sees streams that are already reset.
    let mut bytes = PREFACE.to_vec();
    bytes.extend_from_slice(&[0, 0, 0, 4, 0, 0, 0, 0, 0]);
    for i in 0..2000u32 {
        let id = (2 * i + 1).to_be_bytes();
        // GET, http, / from the static table, with an authority.
        let block = b"\x82\x86\x84\x41\x09localhost";
        bytes.extend_from_slice(&[0, 0, block.len() as u8, 1, 5]);
        bytes.extend_from_slice(&id);
        bytes.extend_from_slice(block);
        bytes.extend_from_slice(&[0, 0, 4, 3, 0]);
        bytes.extend_from_slice(&id);
        bytes.extend_from_slice(&8u32.to_be_bytes());
    }
    let mut stream = raw(&bed).await;
    let _ = stream.write_all(&bytes).await;
    let _ = soon("the connection is closed", stream.read_to_end(&mut Vec::new())).await;
    assert_eq!(Two::new(&bed).await.get("/health/live").await.status(), 200);
}

#[tokio::test]
async fn idle_and_stalled_connections_are_closed() {
    let mut config = config();
    config.limits.header_ms = 200;
    config.limits.write_ms = 400;
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    let settings: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];
    // The last one begins a request and does not end its headers.
    let partial: &[u8] = &[0, 0, 1, 1, 0, 0, 0, 0, 1, 0x82];
    for sent in [
        &b""[..],
        &PREFACE[..10],
        PREFACE,
        &[PREFACE, settings].concat(),
        &[PREFACE, settings, partial].concat(),
    ] {
        let mut stream = raw(&bed).await;
        stream.write_all(sent).await.unwrap();
        let _ = soon("the connection is closed", stream.read_to_end(&mut Vec::new())).await;
    }
    // A client that is served and then silent.
    let two = Two::new(&bed).await;
    assert_eq!(two.get("/health/live").await.status(), 200);
    two.closed().await;
}

/// A client that reads its socket and grants no window does not keep its connection; one that has
/// nothing to read because the answer is not ready does.
#[tokio::test]
async fn a_client_that_grants_no_window_is_closed() {
    let mut config = config();
    config.limits.write_ms = 300;
    let mock = MockConfig { step_time: Duration::from_millis(2), ..MockConfig::default() };
    let bed = Bed::with(config, mock, model()).await;
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(0);
    for stream in [true, false] {
        let two = Two::with(&bed, &builder).await;
        let body = json!({"prompt": "x".repeat(400), "max_tokens": 400, "stream": stream});
        let (answer, mut sent) = two.start(post(COMPLETIONS), false).await;
        sent.send_data(body.to_string().into(), true).unwrap();
        let answer = soon("an answer", answer).await.unwrap();
        assert_eq!(answer.status(), 200);
        let mut body = answer.into_body();
        let end = soon("the connection is closed", body.data()).await;
        assert!(end.is_none_or(|data| data.is_err()));
        two.closed().await;
        bed.until("no request is left", || bed.link.inflight() == 0).await;
    }
}

#[tokio::test]
async fn a_stopping_server_finishes_open_streams() {
    let mut bed = Bed::new(slow()).await;
    let (busy, idle) = (Two::new(&bed).await, Two::new(&bed).await);
    assert_eq!(idle.get("/health/live").await.status(), 200);
    // This client never agrees to close.
    let mut silent = raw(&bed).await;
    silent.write_all(PREFACE).await.unwrap();
    let body = json!({"prompt": "x".repeat(500), "max_tokens": 500, "stream": true});
    let answer = busy.post(COMPLETIONS, &body).await;
    bed.begin_stop();
    let events = text(answer.into_body()).await;
    assert!(events.trim_end().ends_with("data: [DONE]"), "{events}");
    busy.closed().await;
    idle.closed().await;
    assert_eq!(soon("the server ends", bed.ended()).await, Exit::Drained);
}
