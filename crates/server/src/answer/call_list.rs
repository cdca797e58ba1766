//! A JSON list of calls that comes in pieces: `[{"name": …, "parameters": {…}}, …]`.

use super::tools::{ToolCall, call_of};

/// Finds the calls of a list as they become whole. Each byte is looked at once to find where a call
/// ends, and once more when it is read.
#[derive(Clone, Debug, Default)]
pub struct CallList {
    /// What is not a whole call yet.
    held: String,
    /// Bytes of `held` that were looked at.
    seen: usize,
    /// Where in `held` the current call begins.
    from: usize,
    /// How deep the text is at `seen`: 1 inside the list, 2 inside a call.
    depth: u32,
    in_string: bool,
    escaped: bool,
    /// Between two calls.
    comma: bool,
    called: bool,
    /// It is no list of calls, or it is over: nothing more will be found.
    ended: bool,
}

impl CallList {
    /// Takes text and gives out every call that is whole.
    pub(super) fn push(&mut self, text: &str, mut give: impl FnMut(ToolCall)) {
        self.held.push_str(text);
        while !self.ended
            && let Some(&byte) = self.held.as_bytes().get(self.seen)
        {
            self.take(byte, &mut give);
            self.seen += 1;
        }
        if self.called {
            let done = if self.ended { self.held.len() } else { self.from };
            self.held.drain(..done);
            self.seen = self.seen.saturating_sub(done);
            self.from = 0;
        }
    }

    fn take(&mut self, byte: u8, give: &mut impl FnMut(ToolCall)) {
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
                    self.close(give);
                }
            }
            _ => {}
        }
    }

    /// The current call is whole.
    fn close(&mut self, give: &mut impl FnMut(ToolCall)) {
        let text = &self.held[self.from..=self.seen];
        match serde_json::from_str(text).ok().as_ref().and_then(call_of) {
            Some(call) => {
                give(call);
                self.called = true;
                self.comma = true;
                self.from = self.seen + 1;
            }
            None => self.ended = true,
        }
    }

    /// The answer is over: its text, if it was no list of calls.
    pub(super) fn flush(&mut self) -> Option<String> {
        let rest = std::mem::take(&mut self.held);
        (!self.called && !rest.is_empty()).then_some(rest)
    }
}
