//! Decodes UTF-8 from a stream of bytes.

/// Decodes bytes to text without splitting a character. Invalid bytes become U+FFFD, exactly as in
/// [`String::from_utf8_lossy`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Utf8Stream {
    /// The start of an incomplete character: at most three bytes.
    held: Vec<u8>,
}

impl Utf8Stream {
    /// Adds bytes and appends complete characters to `out`.
    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut String) {
        if self.held.is_empty()
            && let Ok(text) = std::str::from_utf8(bytes)
        {
            out.push_str(text);
            return;
        }
        self.held.extend_from_slice(bytes);
        let mut rest = self.held.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                    break;
                }
                Err(e) => {
                    let (good, bad) = rest.split_at(e.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(good));
                    rest = bad;
                    match e.error_len() {
                        Some(n) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            rest = &rest[n..];
                        }
                        None => break,
                    }
                }
            }
        }
        let keep = self.held.len() - rest.len();
        self.held.drain(..keep);
    }

    /// Ends the stream; an incomplete character becomes U+FFFD.
    pub(crate) fn flush(&mut self, out: &mut String) {
        if !self.held.is_empty() {
            self.held.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_pieces_give_the_same_text(
            bytes in prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..64),
                any::<String>().prop_map(String::into_bytes),
            ],
            cuts in proptest::collection::vec(1usize..5, 0..64),
        ) {
            let mut stream = Utf8Stream::default();
            let mut out = String::new();
            let mut rest = bytes.as_slice();
            for cut in cuts {
                let (head, tail) = rest.split_at(cut.min(rest.len()));
                stream.push(head, &mut out);
                prop_assert!(stream.held.len() < 4);
                rest = tail;
            }
            stream.push(rest, &mut out);
            stream.flush(&mut out);
            prop_assert_eq!(out, String::from_utf8_lossy(&bytes));
        }
    }
}
