//! Reads one call, `{"name": …, "arguments": {…}}`, from a stream. The name is reported as soon as
//! the arguments begin, and the arguments as they arrive.

use super::Delta;
use super::tools::call_of;

/// How far a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// More text is needed.
    Open,
    /// The call is complete; this many bytes of the text given last belong to it.
    Done(usize),
    /// The text is not a call.
    Bad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before the opening brace.
    Before,
    /// Before a key or the closing brace.
    Key { first: bool },
    /// Inside a key that began at this byte.
    InKey { from: usize },
    /// Before the colon.
    Colon,
    /// Before a value.
    Value,
    /// Inside a value that began at this byte.
    InValue { from: usize, depth: u32, scalar: bool },
    /// After a value.
    After,
}

/// A call in progress.
#[derive(Clone, Debug)]
pub(super) struct CallObject {
    /// The text so far.
    held: String,
    /// Bytes of it that were read.
    seen: usize,
    place: Place,
    key: String,
    name: Option<String>,
    in_string: bool,
    escaped: bool,
    /// Where the arguments that are reported next begin, while they are being reported.
    from: Option<usize>,
    /// Whether the name was reported.
    started: bool,
}

impl Default for CallObject {
    fn default() -> Self {
        Self {
            held: String::new(),
            seen: 0,
            place: Place::Before,
            key: String::new(),
            name: None,
            in_string: false,
            escaped: false,
            from: None,
            started: false,
        }
    }
}

impl CallObject {
    /// Whether part of the call was reported.
    pub(super) fn started(&self) -> bool {
        self.started
    }

    /// All text so far.
    pub(super) fn text(&self) -> &str {
        &self.held
    }

    /// After `Bad`: the text from the byte on that is not part of a call.
    pub(super) fn unread(&self) -> &str {
        &self.held[self.seen.saturating_sub(1)..]
    }

    /// Adds text and reports what is certain. `known` decides whether a name is a function's.
    pub(super) fn push(
        &mut self,
        text: &str,
        known: &impl Fn(&str) -> bool,
        out: &mut Vec<Delta>,
    ) -> Progress {
        let before = self.held.len();
        self.held.push_str(text);
        let mut progress = Progress::Open;
        while progress == Progress::Open
            && let Some(&byte) = self.held.as_bytes().get(self.seen)
        {
            progress = self.take(byte, known, out);
            self.seen += 1;
        }
        self.report(self.seen, out);
        if progress != Progress::Done(0) {
            return progress;
        }
        let end = self.seen;
        if !self.started {
            let call = serde_json::from_str(&self.held[..end]).ok().as_ref().and_then(call_of);
            match call.filter(|(name, _)| known(name)) {
                Some((name, arguments)) => {
                    self.started = true;
                    out.push(Delta::ToolStart { name });
                    out.push(Delta::ToolArguments(arguments));
                }
                None => return Progress::Bad,
            }
        }
        out.push(Delta::ToolEnd);
        Progress::Done(end - before)
    }

    /// Ends a call whose text ends here: what was reported of it is all there is.
    pub(super) fn cut(&mut self, out: &mut Vec<Delta>) {
        if self.started {
            out.push(Delta::ToolEnd);
        }
    }

    /// Reports the arguments up to a byte.
    fn report(&mut self, end: usize, out: &mut Vec<Delta>) {
        if let Some(from) = self.from.filter(|from| *from < end) {
            out.push(Delta::ToolArguments(self.held[from..end].into()));
            self.from = Some(end);
        }
    }

    /// Reads one byte; `Done(0)` at the closing brace of the call.
    fn take(&mut self, byte: u8, known: &impl Fn(&str) -> bool, out: &mut Vec<Delta>) -> Progress {
        let at = self.seen;
        let space = matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
        match self.place {
            Place::InKey { from } => {
                if !self.in_string_goes_on(byte) {
                    self.key = serde_json::from_str(&self.held[from..=at]).unwrap_or_default();
                    self.place = Place::Colon;
                }
            }
            Place::InValue { from, depth, scalar } => {
                return self.value_byte(byte, from, (depth, scalar), out);
            }
            _ if space => {}
            Place::Before if byte == b'{' => self.place = Place::Key { first: true },
            Place::Key { .. } if byte == b'"' => {
                self.place = Place::InKey { from: at };
                self.escaped = false;
            }
            Place::Key { first: true } | Place::After if byte == b'}' => return Progress::Done(0),
            Place::Colon if byte == b':' => self.place = Place::Value,
            Place::After if byte == b',' => self.place = Place::Key { first: false },
            Place::Value if !matches!(byte, b',' | b':' | b'}' | b']') => {
                return self.begin_value(byte, known, out);
            }
            Place::Before | Place::Key { .. } | Place::Colon | Place::Value | Place::After => {
                return Progress::Bad;
            }
        }
        Progress::Open
    }

    /// Whether a string goes on after this byte of it.
    fn in_string_goes_on(&mut self, byte: u8) -> bool {
        let ends = !self.escaped && byte == b'"';
        self.escaped = !self.escaped && byte == b'\\';
        !ends
    }

    fn begin_value(
        &mut self,
        byte: u8,
        known: &impl Fn(&str) -> bool,
        out: &mut Vec<Delta>,
    ) -> Progress {
        let nested = matches!(byte, b'{' | b'[');
        self.in_string = byte == b'"';
        self.escaped = false;
        self.place = Place::InValue {
            from: self.seen,
            depth: u32::from(nested),
            scalar: !nested && !self.in_string,
        };
        let arguments = matches!(self.key.as_str(), "arguments" | "parameters");
        if let Some(name) =
            self.name.as_ref().filter(|_| arguments && byte == b'{' && !self.started)
        {
            if !known(name) {
                return Progress::Bad;
            }
            out.push(Delta::ToolStart { name: name.clone() });
            self.started = true;
            self.from = Some(self.seen);
        }
        Progress::Open
    }

    fn value_byte(
        &mut self,
        byte: u8,
        from: usize,
        (depth, scalar): (u32, bool),
        out: &mut Vec<Delta>,
    ) -> Progress {
        let at = self.seen;
        if scalar {
            return match byte {
                b',' | b'}' | b' ' | b'\n' | b'\r' | b'\t' => {
                    self.place = Place::After;
                    match byte {
                        b',' => self.place = Place::Key { first: false },
                        b'}' => return Progress::Done(0),
                        _ => {}
                    }
                    Progress::Open
                }
                b'"' | b'{' | b'[' | b']' | b':' => Progress::Bad,
                _ => Progress::Open,
            };
        }
        let depth = match byte {
            _ if self.in_string => {
                self.in_string = self.in_string_goes_on(byte);
                depth
            }
            b'"' => {
                self.in_string = true;
                self.escaped = false;
                depth
            }
            b'{' | b'[' => depth + 1,
            b'}' | b']' => depth - 1,
            _ => depth,
        };
        if depth > 0 || self.in_string {
            self.place = Place::InValue { from, depth, scalar };
            return Progress::Open;
        }
        self.place = Place::After;
        if self.key == "name" {
            self.name = serde_json::from_str(&self.held[from..=at]).ok();
            if self.name.is_none() {
                return Progress::Bad;
            }
        }
        // The end of the arguments, if they are being reported.
        self.report(at + 1, out);
        self.from = None;
        Progress::Open
    }
}
