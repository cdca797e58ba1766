//! Notices of a device that are not errors: a cache that cannot be used, a failure while something is released.
//! Giving one never fails, and never waits if the program sets a sink that does not.

use std::fmt;
use std::io::Write;
use std::sync::OnceLock;

static SINK: OnceLock<fn(&str)> = OnceLock::new();

/// Sends notices to `sink` from now on, one line each without a line break; only the first call has an effect.
/// Without a sink they go to standard error, if that can be written.
pub fn send_to(sink: fn(&str)) {
    // A second call has no effect, because the program has one place for notices.
    let _ = SINK.set(sink);
}

/// Gives a notice of one line.
pub fn say(line: fmt::Arguments<'_>) {
    let line = format!("dacapo: {line}");
    match SINK.get() {
        Some(sink) => sink(&line),
        None => {
            // Standard error cannot be written, so this failure cannot be reported either.
            let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
        }
    }
}
