//! A model hub on 127.0.0.1 with configurable faults.

use ring::digest;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

pub(crate) const COMMIT: &str = "00112233445566778899aabbccddeeff00112233";

/// A fault in serving a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fault {
    /// Every connection ends after this many bytes of the body.
    Break(usize),
    /// The first connection ends after this many bytes, and range requests are ignored.
    BreakOnceNoRange(usize),
    /// This many responses have one bit flipped.
    Flip(usize),
    /// The headers declare this size instead of the real one.
    SaysSize(u64),
    /// This many responses have this status.
    Status(u16, usize),
    /// A range request gets bytes from another offset.
    WrongRange,
    /// The content is on another host.
    Elsewhere,
    /// The tag is not a checksum.
    Opaque,
}

#[derive(Clone, Debug)]
struct File {
    name: String,
    content: Vec<u8>,
    large: bool,
    fault: Option<Fault>,
}

/// A received request.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
}

#[derive(Default)]
struct State {
    files: Vec<File>,
    extra_names: Vec<String>,
    seen: Vec<Seen>,
    status: Option<u16>,
}

/// The hub; it runs until the end of the test process.
pub(crate) struct FakeHub {
    pub(crate) port: u16,
    state: Arc<Mutex<State>>,
}

impl FakeHub {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = shared.clone();
                // Clients of these tests may disconnect.
                std::thread::spawn(move || drop(answer(stream, &state, port)));
            }
        });
        Self { port, state }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// A small file, tagged with git's hash.
    pub(crate) fn small(&self, name: &str, content: &[u8]) {
        self.add(name, content, false, None);
    }

    /// A large file, tagged with its SHA-256.
    pub(crate) fn large(&self, name: &str, content: &[u8], fault: Option<Fault>) {
        self.add(name, content, true, fault);
    }

    fn add(&self, name: &str, content: &[u8], large: bool, fault: Option<Fault>) {
        let mut state = self.state.lock().unwrap();
        let file = File { name: name.into(), content: content.into(), large, fault };
        state.files.push(file);
    }

    /// Lists a name that does not exist.
    pub(crate) fn list(&self, name: &str) {
        self.state.lock().unwrap().extra_names.push(name.into());
    }

    /// Returns this status for every request.
    pub(crate) fn refuse(&self, status: u16) {
        self.state.lock().unwrap().status = Some(status);
    }

    /// Takes the requests received so far.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state.lock().unwrap().seen)
    }
}

/// The cache name of a content.
pub(crate) fn tag(content: &[u8], large: bool) -> String {
    let digest = match large {
        true => digest::digest(&digest::SHA256, content),
        false => {
            let whole = [format!("blob {}\0", content.len()).as_bytes(), content].concat();
            digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, &whole)
        }
    };
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn answer(stream: TcpStream, state: &Mutex<State>, port: u16) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut parts = line.split_whitespace();
    let method = parts.next().unwrap_or_default().to_owned();
    let path = parts.next().unwrap_or_default().to_owned();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((key, value)) = line.trim().split_once(':') else { break };
        headers.insert(key.to_lowercase(), value.trim().to_owned());
    }
    let seen = Seen { method, path, headers };
    let mut guard = state.lock().unwrap();
    guard.seen.push(seen.clone());
    let reply = reply(&mut guard, &seen, port);
    drop(guard);
    send(stream, &seen, reply)
}

struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Bytes of the body after which the connection ends.
    cut: Option<usize>,
}

impl Reply {
    fn new(status: u16, body: Vec<u8>) -> Self {
        Self { status, headers: Vec::new(), body, cut: None }
    }

    fn with(mut self, key: &str, value: impl ToString) -> Self {
        self.headers.push((key.into(), value.to_string()));
        self
    }
}

fn send(mut stream: TcpStream, seen: &Seen, reply: Reply) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {} Status\r\nconnection: close\r\n", reply.status);
    for (key, value) in &reply.headers {
        head.push_str(&format!("{key}: {value}\r\n"));
    }
    if !reply.headers.iter().any(|(key, _)| key == "content-length") {
        head.push_str(&format!("content-length: {}\r\n", reply.body.len()));
    }
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    if seen.method != "HEAD" {
        let end = reply.cut.unwrap_or(reply.body.len()).min(reply.body.len());
        stream.write_all(&reply.body[..end])?;
    }
    stream.flush()
}

fn reply(state: &mut State, seen: &Seen, port: u16) -> Reply {
    if let Some(status) = state.status {
        return Reply::new(status, b"refused".to_vec());
    }
    if seen.path.starts_with("/api/models?") {
        return Reply::new(200, b"[]".to_vec());
    }
    if seen.path.starts_with("/api/models/org/name/revision/") {
        let names = state.files.iter().map(|file| &file.name).chain(&state.extra_names);
        let names: Vec<_> = names.map(|name| serde_json::json!({ "rfilename": name })).collect();
        let info = serde_json::json!({ "sha": COMMIT, "siblings": names });
        return Reply::new(200, info.to_string().into_bytes());
    }
    let resolved = seen.path.strip_prefix(&format!("/org/name/resolve/{COMMIT}/"));
    let stored = seen.path.strip_prefix("/stored/");
    let Some(name) = resolved.or(stored) else { return Reply::new(404, b"what?".to_vec()) };
    let Some(file) = state.files.iter_mut().find(|file| file.name == name) else {
        return Reply::new(404, b"no such file".to_vec());
    };
    let elsewhere = file.fault == Some(Fault::Elsewhere) && stored.is_none();
    let reply = match (seen.method.as_str(), elsewhere) {
        ("HEAD", false) => Reply::new(200, Vec::new()),
        (_, true) => Reply::new(302, Vec::new())
            .with("location", format!("http://localhost:{port}/stored/{name}")),
        _ => body(file, seen),
    };
    let size = match file.fault {
        Some(Fault::SaysSize(size)) => size,
        _ => file.content.len() as u64,
    };
    let tag = match file.fault {
        // Like the tags of common web servers: time and size.
        Some(Fault::Opaque) => "\"65f1a2b3-5a9c\"".into(),
        _ => format!("\"{}\"", tag(&file.content, file.large)),
    };
    let reply = reply.with("x-repo-commit", COMMIT);
    match (file.large, seen.method.as_str()) {
        (true, _) => reply.with("x-linked-etag", tag).with("x-linked-size", size),
        (false, "HEAD") => reply.with("etag", tag).with("content-length", size),
        (false, _) => reply.with("etag", tag),
    }
}

fn body(file: &mut File, seen: &Seen) -> Reply {
    let from: usize = seen
        .headers
        .get("range")
        .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok())
        .unwrap_or(0);
    let whole = file.content.clone();
    let rest = |from: usize| {
        let last = whole.len().saturating_sub(1);
        let range = format!("bytes {from}-{last}/{}", whole.len());
        match from {
            0 => Reply::new(200, whole.clone()),
            _ => Reply::new(206, whole[from.min(whole.len())..].to_vec())
                .with("content-range", range),
        }
    };
    match file.fault.clone() {
        Some(Fault::Break(bytes)) => Reply { cut: Some(bytes), ..rest(from) },
        Some(Fault::BreakOnceNoRange(bytes)) => {
            file.fault = Some(Fault::BreakOnceNoRange(usize::MAX));
            Reply { cut: Some(bytes), ..rest(0) }
        }
        Some(Fault::Flip(times)) => {
            file.fault = (times > 1).then(|| Fault::Flip(times - 1));
            let mut reply = rest(from);
            reply.body[0] ^= 1;
            reply
        }
        Some(Fault::Status(status, times)) => {
            file.fault = (times > 1).then_some(Fault::Status(status, times - 1));
            Reply::new(status, b"not now".to_vec())
        }
        Some(Fault::WrongRange) if from == 0 => Reply { cut: Some(100), ..rest(0) },
        Some(Fault::WrongRange) => {
            // Declares that it starts at 0, with the status of a partial response.
            file.fault = None;
            let last = whole.len() - 1;
            Reply::new(206, whole.clone())
                .with("content-range", format!("bytes 0-{last}/{}", whole.len()))
        }
        Some(Fault::SaysSize(_) | Fault::Elsewhere | Fault::Opaque) | None => rest(from),
    }
}
