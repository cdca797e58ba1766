//! Notices that a device gives without being asked: a cache that cannot be used, a failure while something is
//! released. Never a reason to fail, and never to wait, if the program says where it goes.

use std::fmt;
use std::io::Write;
use std::sync::OnceLock;

static SINK: OnceLock<fn(&str)> = OnceLock::new();

/// Sends notices, one line each without its end, to `sink` from now on; the first call counts. Without
/// one they go to standard error, as far as that can be written.
pub fn send_to(sink: fn(&str)) {
    // A second caller has nothing to add: the program has one place for them.
    let _ = SINK.set(sink);
}

/// Says one line.
pub(crate) fn say(line: fmt::Arguments<'_>) {
    let line = format!("dacapo: {line}");
    match SINK.get() {
        Some(sink) => sink(&line),
        None => {
            // Standard error cannot be written, so this failure cannot be reported either.
            let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
        }
    }
}
