//! Parses server-sent events from a stream of bytes.

/// The most bytes of one event; bounds the memory.
const MOST: usize = 16 << 20;

/// Collects bytes and emits the `data` of each event.
#[derive(Clone, Debug, Default)]
pub struct SseParser {
    /// The line that has not ended yet.
    line: Vec<u8>,
    /// The data lines of the event that has not ended yet.
    data: String,
    has_data: bool,
    /// The last byte was a carriage return: a following newline belongs to it.
    after_cr: bool,
}

impl SseParser {
    /// Adds bytes and calls `event` with the data of every completed event. False if an event is
    /// too long; then the stream should be closed.
    pub fn push(&mut self, bytes: &[u8], mut event: impl FnMut(&str)) -> bool {
        let mut rest = bytes;
        if self.after_cr && !rest.is_empty() {
            self.after_cr = false;
            if rest[0] == b'\n' {
                rest = &rest[1..];
            }
        }
        while let Some(at) = rest.iter().position(|b| matches!(b, b'\n' | b'\r')) {
            if self.line.is_empty() {
                self.take_line(&rest[..at], &mut event);
            } else {
                self.line.extend_from_slice(&rest[..at]);
                let line = std::mem::take(&mut self.line);
                self.take_line(&line, &mut event);
                self.line = line;
                self.line.clear();
            }
            let end = if rest[at] == b'\r' {
                match rest.get(at + 1) {
                    Some(b'\n') => at + 2,
                    Some(_) => at + 1,
                    None => {
                        self.after_cr = true;
                        at + 1
                    }
                }
            } else {
                at + 1
            };
            rest = &rest[end..];
        }
        self.line.extend_from_slice(rest);
        self.line.len() + self.data.len() <= MOST
    }

    fn take_line(&mut self, line: &[u8], event: &mut impl FnMut(&str)) {
        if line.is_empty() {
            if self.has_data {
                event(&self.data);
            }
            self.data.clear();
            self.has_data = false;
            return;
        }
        let Some(data) = line.strip_prefix(b"data") else { return };
        let data = match data.first() {
            None => data,
            Some(b':') => data[1..].strip_prefix(b" ").unwrap_or(&data[1..]),
            Some(_) => return,
        };
        if self.has_data {
            self.data.push('\n');
        }
        self.has_data = true;
        self.data.push_str(&String::from_utf8_lossy(data));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(pieces: &[&[u8]]) -> Vec<String> {
        let (mut parser, mut out) = (SseParser::default(), Vec::new());
        for piece in pieces {
            parser.push(piece, |data| out.push(data.to_string()));
        }
        out
    }

    #[test]
    fn events_are_parsed_as_in_the_standard() {
        let text = b": hi\ndata: one\n\ndata:two\r\ndata: more\r\n\r\nevent: x\rdata\r\rdata: lost";
        assert_eq!(read(&[text]), ["one", "two\nmore", ""]);
        assert_eq!(read(&[b"datum: x\n\n\n\nid: 3\n\n"]), Vec::<String>::new());
    }

    proptest! {
        #[test]
        fn any_pieces_give_the_same_events(
            text in "(data: ?[aé]{0,3}|:c|\r|\n|\r\n|x){0,20}",
            cuts in proptest::collection::vec(1usize..6, 0..40),
        ) {
            let bytes = text.as_bytes();
            let (mut pieces, mut rest) = (Vec::new(), bytes);
            for cut in cuts {
                let (head, tail) = rest.split_at(cut.min(rest.len()));
                pieces.push(head);
                rest = tail;
            }
            pieces.push(rest);
            prop_assert_eq!(read(&pieces), read(&[bytes]));
        }
    }
}
