//! The exit codes of commands whose other behaviour is tested elsewhere: 1 for a failure, 2 for
//! invalid input, 130 for a server that is interrupted twice.

use crate::process;
use crate::smollm2;
use process::fails;
use smollm2::{dacapo, smollm2};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

const DUMMY: [&str; 3] = ["qwen3-0.6b", "--load-format", "dummy"];

#[test]
fn invalid_input_gives_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| -> String {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().into()
    };
    let missing = folder.path().join("missing.json");
    let missing = missing.to_str().unwrap();
    let (broken, empty) = (file("broken.json", "{"), file("empty.jsonl", ""));
    let bench = |more: &[&'static str]| [&["bench", "serve"], more].concat();
    let graph =
        |what: &'static str, more: &[&'static str]| [&["graph", what][..], &DUMMY, more].concat();
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["trace", missing], "No such file"),
        (vec!["trace", &empty], "no step records"),
        (vec!["graph", "tune", "--trace", missing], "No such file"),
        (vec!["graph", "tune", "--trace", &broken], "broken.json"),
        (vec!["bench", "serve", "--compare", missing, missing], "No such file"),
        (vec!["bench", "serve", "--prompts", missing], "No such file"),
        (vec!["bench", "serve", "--prompts", &broken], "broken.json:1"),
        (vec!["bench", "serve", "--prompts", &empty], "no prompts"),
        (bench(&["--base-url", "ftp://x"]), "only http://"),
        (bench(&["--extra", "["]), "--extra must be a JSON object"),
        (vec!["bench", "prefill", "--shape", "0x1"], "expected PROMPTSxTOKENS"),
        (vec!["bench", "mixed", "--running", "8", "--budget", "8"], "--budget"),
        (graph("explain", &["--batch", "300"]), "the largest is 256"),
        (
            graph("explain", &["--max-batch", "4096", "--max-tokens", "16777216"]),
            "the limits of a step",
        ),
        (graph("verify", &["--buckets-decode", "0"]), "no size may be 0"),
        (graph("verify", &["--buckets-decode", "300"]), "larger than the maximum"),
        (vec!["graph", "diff", "qwen3-0.6b", "decode/0", "decode/1"], "not a graph"),
        (vec!["graph", "diff", "qwen3-0.6b", missing, "decode/1"], "No such file"),
    ];
    for (args, word) in cases {
        let error = fails(dacapo(&args).output().unwrap(), 2);
        assert!(error.contains(word), "{args:?}: {error}");
    }
}

#[test]
fn numbers_out_of_range_give_code_2() {
    for args in [
        &["bench", "decode", "--batch", "0"][..],
        &["bench", "decode", "--context", "4294967295"],
        &["bench", "serve", "--rate", "0"],
        &["bench", "serve", "--requests", "18446744073709551615"],
        &["graph", "explain", "qwen3-0.6b", "--page-size", "0"],
        &["graph", "tune", "--trace", "x", "--graph-size", "18446744073709551615"],
        &["run", "-n", "0"],
        &["serve", "--memory-share", "0"],
    ] {
        let output = dacapo(args).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
        assert!(error.starts_with("error: invalid value"), "{args:?}: {error}");
    }
}

#[test]
fn a_missing_schema_gives_code_2() {
    let Some(model) = smollm2() else { return };
    for flag in ["--json-schema", "--grammar"] {
        let output = dacapo(&["run", model, "-p", "x", flag, "./missing"]).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("./missing: No such file"), "{error}");
    }
}

#[test]
fn failures_give_code_1() {
    let folder = tempfile::tempdir().unwrap();
    let unwritable = folder.path().join("missing").join("file");
    let unwritable = unwritable.to_str().unwrap();
    let record = r#"{"step":1,"at":1,"phase":"decode","bucket_rows":8,"bucket_tokens":8,"live_rows":5,"padded_rows":3,"run":"replayed","host_us":7,"device_us":9}"#;
    let trace = folder.path().join("trace.jsonl");
    std::fs::write(&trace, format!("{record}\n")).unwrap();
    // The port is free again, and refuses connections.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}");
    let explain = [&["graph", "explain"][..], &DUMMY, &["-o", unwritable]].concat();
    for args in [
        vec!["bench", "serve", "--base-url", &url],
        vec!["trace", trace.to_str().unwrap(), "--out", unwritable],
        explain,
    ] {
        fails(dacapo(&args).output().unwrap(), 1);
    }
}

/// A server, ended when dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The second signal comes as soon as the first has an effect: a server that began to listen for it
/// only then would miss it, finish the answer and end with 0.
#[test]
fn a_server_that_is_interrupted_twice_gives_code_130() {
    let Some(model) = smollm2() else { return };
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = dacapo(&["serve", model, "--port", &port.to_string()]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut server = Server(child);
    let mut said = BufReader::new(server.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.starts_with("serving ")), "the server did not start");
    // Minutes of work, so that the server has to wait for it.
    let body = r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8000, "ignore_eos": true, "stream": true}"#;
    let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let length = body.len();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    client.write_all(head.as_bytes()).unwrap();
    client.read_exact(&mut [0; 64]).unwrap();
    // A client that does not read would be closed.
    let reader = std::thread::spawn(move || std::io::copy(&mut client, &mut std::io::sink()));
    let pid = server.0.id().to_string();
    let interrupt =
        || assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    interrupt();
    // It drains: the stream continues, and new connections are refused.
    while TcpStream::connect(("127.0.0.1", port)).is_ok() {}
    assert_eq!(server.0.try_wait().unwrap(), None, "the first signal ended it");
    interrupt();
    assert_eq!(server.0.wait().unwrap().code(), Some(130));
    // However the connection ended.
    let _ = reader.join().unwrap();
}
