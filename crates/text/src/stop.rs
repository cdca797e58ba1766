//! Finds stop strings across pieces of text, so that clients never see part of one.

/// Finds stop strings in a stream and holds back text that may be the start of one. The work per
/// byte is bounded for any text and stop strings.
#[derive(Clone, Debug, Default)]
pub struct StopFinder {
    words: Vec<Word>,
    held: String,
    found: Option<String>,
}

/// One stop string, and how much of it the text so far ends with (Knuth–Morris–Pratt).
#[derive(Clone, Debug)]
struct Word {
    bytes: Vec<u8>,
    /// For each prefix of the word: the longest shorter prefix that is its suffix.
    shorter: Vec<usize>,
    at: usize,
}

impl Word {
    fn new(word: String) -> Self {
        let bytes = word.into_bytes();
        let mut shorter = vec![0; bytes.len() + 1];
        let mut at = 0;
        for (i, byte) in bytes.iter().enumerate().skip(1) {
            while at > 0 && bytes[at] != *byte {
                at = shorter[at];
            }
            at += usize::from(bytes[at] == *byte);
            shorter[i + 1] = at;
        }
        Self { bytes, shorter, at: 0 }
    }

    /// Adds a byte; true if it completes the word.
    fn push(&mut self, byte: u8) -> bool {
        if self.at == self.bytes.len() {
            self.at = self.shorter[self.at];
        }
        while self.at > 0 && self.bytes[self.at] != byte {
            self.at = self.shorter[self.at];
        }
        self.at += usize::from(self.bytes[self.at] == byte);
        self.at == self.bytes.len()
    }
}

impl StopFinder {
    /// A finder for these strings; empty ones are ignored.
    pub fn new(mut stops: Vec<String>) -> Self {
        stops.retain(|stop| !stop.is_empty());
        Self { words: stops.into_iter().map(Word::new).collect(), ..Self::default() }
    }

    /// Adds `text`, appends to `out` the text that cannot be part of a stop string, and returns
    /// whether one was found: the one that ends first, and of several that end together the
    /// longest. Nothing may be pushed after that.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.words.is_empty() {
            out.push_str(text);
            return false;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (i, byte) in text.bytes().enumerate() {
            let mut longest = None;
            for word in &mut self.words {
                if word.push(byte) {
                    longest = longest.max(Some(word.bytes.len()));
                }
            }
            if let Some(length) = longest {
                let end = before + i + 1;
                out.push_str(&self.held[..end - length]);
                self.found = Some(self.held[end - length..end].into());
                self.held.clear();
                return true;
            }
        }
        let partial = self.words.iter().map(|word| word.at).max().unwrap_or(0);
        let keep = self.held.len() - partial;
        out.push_str(&self.held[..keep]);
        self.held.drain(..keep);
        false
    }

    /// The stop string that was found.
    pub fn found(&self) -> Option<&str> {
        self.found.as_deref()
    }

    /// Ends the text: appends what was held back. Another text may follow, with stop strings of its own.
    pub fn flush(&mut self, out: &mut String) {
        self.words.iter_mut().for_each(|word| word.at = 0);
        out.push_str(&self.held);
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The expected output: everything before the stop string that is completed first.
    fn whole(text: &str, stops: &[String]) -> (String, bool) {
        // A stream sees characters one by one: the stop string whose end comes first wins, and
        // among those that end together the one that began first.
        let ends = (0..=text.len()).filter(|at| text.is_char_boundary(*at));
        for end in ends {
            let starts = stops
                .iter()
                .filter(|stop| !stop.is_empty() && text[..end].ends_with(stop.as_str()))
                .map(|stop| end - stop.len());
            if let Some(at) = starts.min() {
                return (text[..at].into(), true);
            }
        }
        (text.into(), false)
    }

    /// Partial matches at every byte: rescanning the held text took minutes.
    #[test]
    fn partial_matches_cost_no_more_than_other_text() {
        let stops: Vec<String> = (0..16).map(|i| "a".repeat(255 - i) + "b").collect();
        let mut finder = StopFinder::new(stops);
        let mut out = String::new();
        for _ in 0..1 << 18 {
            assert!(!finder.push("aaaa", &mut out));
        }
        finder.flush(&mut out);
        assert_eq!(out.len(), 1 << 20);
    }

    proptest! {
        #[test]
        fn character_by_character(
            text in "[ab<é]{0,24}",
            stops in proptest::collection::vec("[ab<é]{1,4}", 0..4),
        ) {
            let mut finder = StopFinder::new(stops.clone());
            let (mut out, mut found) = (String::new(), false);
            for c in text.chars() {
                found = finder.push(c.encode_utf8(&mut [0; 4]), &mut out);
                for stop in &stops {
                    prop_assert!(!out.contains(stop.as_str()));
                }
                if found { break; }
            }
            if !found { finder.flush(&mut out); }
            prop_assert_eq!((out, found), whole(&text, &stops));
        }

        #[test]
        fn stop_strings_never_leak_for_any_piece_size(
            pieces in proptest::collection::vec("[ab<é]{0,5}", 0..12),
            stops in proptest::collection::vec("[ab<é]{1,4}", 1..4),
        ) {
            let text = pieces.concat();
            let mut finder = StopFinder::new(stops.clone());
            let (mut out, mut found) = (String::new(), false);
            for piece in &pieces {
                found = finder.push(piece, &mut out);
                prop_assert!(text.starts_with(&out));
                if found { break; }
            }
            if !found { finder.flush(&mut out); prop_assert_eq!(&out, &text); }
            prop_assert_eq!(found, stops.iter().any(|stop| text.contains(stop.as_str())));
            for stop in &stops {
                prop_assert!(!out.contains(stop.as_str()));
            }
        }
    }
}
