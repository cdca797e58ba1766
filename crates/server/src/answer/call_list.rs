//! Parses a JSON list of calls from a stream: `[{"name": …, "parameters": {…}}, …]`.

use super::tools::{ToolCall, call_of};

/// Finds the calls of a list as they become complete. Each byte is scanned once for the end of a
/// call and parsed once.
#[derive(Clone, Debug, Default)]
pub struct CallList {
    /// Text that is not a complete call yet.
    held: String,
    /// Bytes of `held` already scanned.
    seen: usize,
    /// The start of the current call in `held`.
    from: usize,
    /// The nesting depth at `seen`: 1 inside the list, 2 inside a call.
    depth: u32,
    in_string: bool,
    escaped: bool,
    /// Whether a comma must precede the next call.
    comma: bool,
    called: bool,
    /// The text is not a list of calls, or the list has ended: nothing more will be found.
    ended: bool,
}

impl CallList {
    /// Adds text and emits every complete call.
    pub(super) fn push(&mut self, text: &str, mut emit: impl FnMut(ToolCall)) {
        self.held.push_str(text);
        while !self.ended
            && let Some(&byte) = self.held.as_bytes().get(self.seen)
        {
            self.take(byte, &mut emit);
            self.seen += 1;
        }
        if self.called {
            let done = if self.ended { self.held.len() } else { self.from };
            self.held.drain(..done);
            self.seen = self.seen.saturating_sub(done);
            self.from = 0;
        }
    }

    fn take(&mut self, byte: u8, emit: &mut impl FnMut(ToolCall)) {
        match byte {
            _ if self.in_string => {
                self.in_string = self.escaped || byte != b'"';
                self.escaped = !self.escaped && byte == b'\\';
            }
            b' ' | b'\n' | b'\r' | b'\t' if self.depth < 2 => {}
            b'[' if self.depth == 0 && !self.called => {
                self.depth = 1;
                self.from = self.seen + 1;
            }
            b'{' if self.depth == 1 && !self.comma => self.depth = 2,
            b',' if self.depth == 1 && self.comma => {
                self.comma = false;
                self.from = self.seen + 1;
            }
            _ if self.depth < 2 => self.ended = true,
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth -= 1;
                if self.depth == 1 {
                    self.close(emit);
                }
            }
            _ => {}
        }
    }

    /// Parses the current call, which is complete.
    fn close(&mut self, emit: &mut impl FnMut(ToolCall)) {
        let text = &self.held[self.from..=self.seen];
        match serde_json::from_str(text).ok().as_ref().and_then(call_of) {
            Some(call) => {
                emit(call);
                self.called = true;
                self.comma = true;
                self.from = self.seen + 1;
            }
            None => self.ended = true,
        }
    }

    /// Ends the answer; returns its text if it was not a list of calls.
    pub(super) fn flush(&mut self) -> Option<String> {
        let rest = std::mem::take(&mut self.held);
        (!self.called && !rest.is_empty()).then_some(rest)
    }
}
