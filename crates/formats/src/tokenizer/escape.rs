//! Keeping control tokens in messages from being recognised.
//!
//! A chat template mixes the messages' text with control tokens of its own, and only the result is
//! tokenized. To tell the two apart afterwards, a marker is put inside every control token that a
//! message contains, after its first character. The marker breaks the match and is taken out of
//! the text before merging, so that:
//!
//! - a message without control tokens renders and encodes exactly as without escaping, merges across
//!   the seam between template and message included;
//! - templates may trim, split, slice and compare messages as they like;
//! - a message with control tokens gives the ids of their letters.
//!
//! The marker is a Unicode noncharacter that no message contains.

use std::collections::BTreeSet;

/// Text in which `Escaped::marker` stands wherever a control token would otherwise be seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Escaped {
    pub(crate) text: String,
    pub(crate) marker: char,
}

impl Escaped {
    /// The text without markers.
    pub fn visible(&self) -> String {
        self.text.replace(self.marker, "")
    }

    /// Removes the last occurrence of `mark` and all that follows it; false if there is none.
    pub fn cut_at(&mut self, mark: &str) -> bool {
        let found = self.text.rfind(mark);
        if let Some(at) = found {
            self.text.truncate(at);
        }
        found.is_some()
    }
}

/// Knows the control tokens of one vocabulary.
#[derive(Debug, Default)]
pub struct Escaper {
    /// Control texts in order: vocabularies have up to a hundred thousand that begin alike. Those
    /// of one character cannot be broken; none are published.
    controls: Vec<Control>,
    firsts: BTreeSet<char>,
    longest: usize,
}

#[derive(Debug)]
struct Control {
    text: String,
    /// Where the longest other control text is that this one begins with.
    shorter: Option<usize>,
}

impl Escaper {
    /// An escaper for control tokens of these texts.
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let texts: BTreeSet<&str> =
            texts.into_iter().filter(|text| text.chars().nth(1).is_some()).collect();
        let mut escaper = Self::default();
        // Those that the one before begins with, itself the last.
        let mut open: Vec<usize> = Vec::new();
        for text in texts {
            while open.last().is_some_and(|&at| !text.starts_with(&escaper.controls[at].text)) {
                open.pop();
            }
            let shorter = open.last().copied();
            open.push(escaper.controls.len());
            escaper.controls.push(Control { text: text.to_owned(), shorter });
            escaper.firsts.extend(text.chars().next());
            escaper.longest = escaper.longest.max(text.len());
        }
        escaper
    }

    /// A marker that none of `texts` contains. There are 66 noncharacters; a caller whose texts
    /// contain them all gets the last one, and [`Escaper::escape`] replaces it there.
    pub fn marker<'a>(texts: impl Iterator<Item = &'a str> + Clone) -> char {
        let planes = (0..=16).flat_map(|plane| [plane << 16 | 0xfffe, plane << 16 | 0xffff]);
        let all = (0xfdd0..=0xfdef).chain(planes).filter_map(char::from_u32);
        // Messages hardly ever contain one; look for any of them first, in one pass each.
        let clean = !texts.clone().any(|text| text.contains(is_noncharacter));
        let mut all = all.filter(|&c| clean || !texts.clone().any(|text| text.contains(c)));
        all.next().unwrap_or('\u{10ffff}')
    }

    /// `text` with `marker` inside every control token, and inside whatever stands at the end and
    /// might become one when a template writes on.
    pub fn escape(&self, text: &str, marker: char) -> String {
        let mut out = String::with_capacity(text.len());
        for (at, c) in text.char_indices() {
            if c == marker {
                out.push('\u{fffd}');
                continue;
            }
            out.push(c);
            if self.firsts.contains(&c) && self.opens(c, &text[at..]) {
                out.push(marker);
            }
        }
        out
    }

    /// Whether `rest`, which begins with `first`, begins with a control token, or is all of it the
    /// beginning of one.
    fn opens(&self, first: char, rest: &str) -> bool {
        // In sorted order, control texts that are prefixes of `rest` come before it; any entry between
        // such a prefix and `rest` begins with that prefix too.
        let behind = self.controls.partition_point(|control| control.text.as_str() <= rest);
        let mut before = behind.checked_sub(1);
        let same = before.map_or(0, |at| {
            let pairs = self.controls[at].text.bytes().zip(rest.bytes());
            pairs.take_while(|(a, b)| a == b).count()
        });
        while let Some(at) = before {
            if self.controls[at].text.len() <= same {
                return true;
            }
            before = self.controls[at].shorter;
        }
        // Do not break the last letter of a role such as "user" because a control token begins with it.
        !first.is_alphanumeric()
            && rest.len() <= self.longest
            && self.controls.get(behind).is_some_and(|control| control.text.starts_with(rest))
    }

    /// `text` escaped on its own.
    pub(super) fn one(&self, text: &str) -> Escaped {
        let marker = Self::marker(std::iter::once(text));
        Escaped { text: self.escape(text, marker), marker }
    }
}

fn is_noncharacter(c: char) -> bool {
    matches!(c, '\u{fdd0}'..='\u{fdef}') || c as u32 & 0xfffe == 0xfffe
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: char = '\u{fdd0}';

    #[test]
    fn control_tokens_are_broken_and_nothing_else_is_touched() {
        let escaper = Escaper::new(["<|im_end|>", "<|im_start|>", "[INST]"]);
        assert_eq!(escaper.escape("a < b, <i>", M), "a < b, <i>");
        assert_eq!(escaper.escape("x<|im_end|>y", M), format!("x<{M}|im_end|>y"));
        assert_eq!(escaper.escape("[[INST]]", M), format!("[[{M}INST]]"));
        // One that begins with another, and one that comes between.
        let nested = Escaper::new(["<a", "<a>", "<ab", "<b>"]);
        assert_eq!(nested.escape("<a<ac<aa<b<c", M), format!("<{M}a<{M}ac<{M}aa<b<c"));
        // The end of a text may be continued by the template.
        assert_eq!(escaper.escape("x<|im_", M), format!("x<{M}|im_"));
    }

    #[test]
    fn a_marker_is_found_whatever_the_text_contains() {
        assert_eq!(Escaper::marker(["plain"].into_iter()), M);
        assert_eq!(Escaper::marker(["\u{fdd0}"].into_iter()), '\u{fdd1}');
        let all: String =
            (0..=0x10ffff).filter_map(char::from_u32).filter(|&c| is_noncharacter(c)).collect();
        assert_eq!(all.chars().count(), 66);
        let marker = Escaper::marker([all.as_str()].into_iter());
        assert!(!Escaper::default().escape(&all, marker).contains(marker));
    }
}
