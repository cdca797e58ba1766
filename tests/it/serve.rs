//! `dacapo serve` with an unwritable log, a full disk and low system limits: it still answers and
//! counts what was lost.

#![cfg(unix)]

use crate::smollm2;
use smollm2::{dacapo, smollm2};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A timeout that is long enough for a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A running server; it ends with the test.
struct Served {
    child: Child,
    port: u16,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Served {
    /// Starts a command that listens on `port`, and waits until it accepts connections and its engine has started.
    fn start(mut command: Command, port: u16) -> Served {
        let mut served = Served { child: command.spawn().unwrap(), port };
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert_eq!(served.child.try_wait().unwrap(), None, "the server ended");
            assert!(start.elapsed() < TIMEOUT, "the server does not respond");
            std::thread::sleep(Duration::from_millis(20));
        }
        while served.ask("GET", "/health", "").0 == 503 {
            assert!(start.elapsed() < TIMEOUT, "the engine does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        served
    }

    /// The status and body of a response.
    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        (status, answer.split_once("\r\n\r\n").unwrap().1.into())
    }

    #[track_caller]
    fn get(&self, path: &str) -> String {
        let (status, body) = self.ask("GET", path, "");
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    #[track_caller]
    fn answers(&self) {
        let chat = r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}"#;
        let (status, body) = self.ask("POST", "/v1/chat/completions", chat);
        assert_eq!(status, 200, "{body}");
        self.get("/health");
    }

    /// A counter of `/metrics`.
    fn count(&self, name: &str) -> u64 {
        let text = self.get("/metrics");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    /// Sends SIGTERM and waits for the end.
    #[track_caller]
    fn stop(&mut self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < TIMEOUT, "the server does not end");
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(status.code(), Some(0));
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn serve(model: &str, port: u16) -> Command {
    let port = port.to_string();
    let mut command = dacapo(&["serve", model, "--port", &port, "--max-context", "512"]);
    command.stdout(Stdio::null()).env_remove("RUST_LOG");
    command
}

#[test]
fn a_full_disk_loses_only_log_lines_and_trace_records() {
    let Some(model) = smollm2() else { return };
    let port = free_port();
    let mut command = serve(model, port);
    let full = File::options().write(true).open("/dev/full").unwrap();
    command.args(["--trace", "/dev/full"]).stderr(full);
    let mut served = Served::start(command, port);
    for _ in 0..3 {
        served.answers();
    }
    assert!(served.count("dacapo_log_lines_dropped_total") >= 4);
    assert!(served.count("dacapo_trace_records_dropped_total") >= 4);
    served.stop();
}

#[test]
fn a_closed_log_pipe_does_not_stop_the_server() {
    let Some(model) = smollm2() else { return };
    let port = free_port();
    let mut command = serve(model, port);
    // The read end is closed before the first line.
    command.arg("--log-json").stderr(std::io::pipe().unwrap().1);
    let mut served = Served::start(command, port);
    served.answers();
    assert!(served.count("dacapo_log_lines_dropped_total") >= 2);
    served.stop();
}

/// Level and message of every line of a JSON log. A line about a request has fields and no message.
fn json_lines(said: &str) -> Vec<(String, String)> {
    let line = |line: &str| -> (String, String) {
        let line: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|_| panic!("{said}"));
        let level = line["level"].as_str().unwrap().to_owned();
        let fields = line["fields"].as_object().unwrap();
        match fields.get("message") {
            Some(message) => (level, message.as_str().unwrap().to_owned()),
            None => {
                assert!(fields["route"].is_string() && fields["status"].is_u64(), "{line}");
                (level, String::new())
            }
        }
    };
    said.lines().map(line).collect()
}

/// A port in use is found before the model is loaded.
#[test]
fn a_port_in_use_is_an_error_in_a_json_log() {
    let Some(model) = smollm2() else { return };
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let plain = serve(model, taken.local_addr().unwrap().port());
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 100; exec \"$@\"", "sh"]);
    command.arg(plain.get_program()).args(plain.get_args()).arg("--log-json");
    let output = command.env_remove("RUST_LOG").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let lines = json_lines(&said);
    assert!(lines.iter().any(|(level, text)| level == "WARN" && text.contains("open files")));
    assert!(!lines.iter().any(|(_, text)| text.starts_with("memory: ")), "{said}");
    let (level, text) = lines.last().unwrap();
    assert!(level == "ERROR" && text.starts_with("cannot listen on "), "{said}");
}

#[test]
fn every_line_of_a_json_log_is_json() {
    let Some(model) = smollm2() else { return };
    let port = free_port();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut command = serve(model, port);
    command.arg("--log-json").env_remove("RUST_LOG");
    command.stderr(std::fs::File::create(&log).unwrap());
    let mut served = Served::start(command, port);
    served.answers();
    served.stop();
    let lines = json_lines(&std::fs::read_to_string(&log).unwrap());
    let info =
        |start: &str| lines.iter().any(|(level, text)| level == "INFO" && text.starts_with(start));
    assert!(info("memory: ") && info("serving "), "{lines:?}");
}

#[test]
fn a_full_log_pipe_does_not_block_the_server() {
    let Some(model) = smollm2() else { return };
    let port = free_port();
    let (unread, writer) = std::io::pipe().unwrap();
    let mut command = serve(model, port);
    command.stderr(writer);
    let mut served = Served::start(command, port);
    // A pipe holds 64 KiB; a log line has about a hundred bytes.
    for _ in 0..1500 {
        served.get("/v1/models");
    }
    served.answers();
    served.stop();
    drop(unread);
}

#[test]
fn limits_in_force_are_shown() {
    let Some(model) = smollm2() else { return };
    let port = free_port();
    let plain = serve(model, port);
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 400; ulimit -S -n 100; exec \"$@\"", "sh"]);
    command.arg(plain.get_program()).args(plain.get_args()).stderr(Stdio::piped());
    command.args(["--limit", "choices=3"]);
    let mut served = Served::start(command, port);
    let pid = served.child.id();
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let files: Vec<&str> = files.split_whitespace().collect();
    assert_eq!(files[3..5], ["400", "400"], "raised to the hard limit");

    // 400 files: 272 connections and 128 others.
    let page: serde_json::Value = serde_json::from_str(&served.get("/live/graph")).unwrap();
    let shown = |name: &str| {
        let rows = page["limits"].as_array().unwrap();
        let row = rows.iter().find(|row| row["key"] == name).unwrap();
        row["value"].as_str().unwrap().to_owned()
    };
    assert_eq!([shown("connections"), shown("choices"), shown("inflight")], ["272", "3", "1024"]);
    let document: serde_json::Value = serde_json::from_str(&served.get("/openapi.json")).unwrap();
    let n = &document["components"]["schemas"]["ChatRequest"]["properties"]["n"];
    assert_eq!(n["anyOf"][0]["maximum"], 3, "{n}");

    let error = served.child.stderr.take().unwrap();
    served.stop();
    let lines: Vec<String> = BufReader::new(error).lines().map(Result::unwrap).collect();
    let one = |start: &str| {
        let found: Vec<&String> = lines.iter().filter(|line| line.starts_with(start)).collect();
        assert_eq!(found.len(), 1, "{start}: {lines:#?}");
        found[0].clone()
    };
    let warning = one("warning: at most 400 open files");
    assert!(warning.ends_with("connections=272 instead of 4096"), "{warning}");
    let memory = one("memory: weights ");
    // 32 sequences of 512 tokens, which is less than a gibibyte.
    assert!(memory.contains("KV cache 36") && memory.contains("(16384 tokens)"), "{memory}");
}

#[test]
fn empty_keys_are_refused() {
    let refused = |command: &mut Command| {
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.starts_with("error: --api-key (or DACAPO_API_KEY) "), "{error}");
    };
    for key in ["", "  ", "key\n"] {
        refused(dacapo(&["serve", "--api-key", key]).env_remove("DACAPO_API_KEY"));
        refused(dacapo(&["serve"]).env("DACAPO_API_KEY", key));
        refused(&mut dacapo(&["serve", "--api-key", "good", "--api-key", key]));
    }
}
