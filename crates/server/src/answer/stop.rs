//! Stop strings, which come in any pieces and must never be seen by a client.

use super::partial_at;

/// Looks for stop strings in a stream of text and holds back what may be the start of one.
#[derive(Clone, Debug, Default)]
pub struct StopFinder {
    stops: Vec<String>,
    held: String,
}

impl StopFinder {
    /// A finder; empty strings are no stop strings.
    pub fn new(mut stops: Vec<String>) -> Self {
        stops.retain(|stop| !stop.is_empty());
        Self { stops, held: String::new() }
    }

    /// Takes `text`, appends to `out` what surely precedes any stop string, and says whether one
    /// was found. After a find nothing more may be pushed.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.stops.is_empty() {
            out.push_str(text);
            return false;
        }
        self.held.push_str(text);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = found {
            out.push_str(&self.held[..at]);
            self.held.clear();
            return true;
        }
        let partial = self.stops.iter().map(|stop| partial_at(&self.held, stop)).min();
        let keep = partial.unwrap_or(self.held.len());
        out.push_str(&self.held[..keep]);
        self.held.drain(..keep);
        false
    }

    /// The answer ended otherwise: what was held back is text after all.
    pub fn flush(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What should come out: everything before the earliest stop string that is completed first.
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
        fn nothing_leaks_in_any_pieces(
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
