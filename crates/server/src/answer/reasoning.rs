//! Separates reasoning, which a model writes between two tags before its answer.

use super::harmony::{Marks, THOUGHT};
use super::{Delta, partial_at};
use text::{CheckpointText, Token};

/// The tags around the reasoning of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reasoning {
    /// The opening tag.
    pub open: String,
    /// The closing tag.
    pub close: String,
}

impl Reasoning {
    /// The tags that occur in a chat template, if any.
    pub fn detect(template: &str) -> Option<Self> {
        [("<think>", "</think>"), ("<reasoning>", "</reasoning>")]
            .into_iter()
            .find(|(_, close)| template.contains(close))
            .map(|(open, close)| Self { open: open.into(), close: close.into() })
    }

    /// The tags of a checkpoint, if its tokenizer has a token for them. Those of messages on channels are the end of one
    /// message and the start of the next.
    pub fn of(text: &CheckpointText) -> Option<Self> {
        if Marks::find(|spelling| text.id_of(spelling)).is_some() {
            let [open, close] = THOUGHT.map(Into::into);
            return Some(Self { open, close });
        }
        Self::of_tokens(|token| text.id_of(token))
    }

    fn of_tokens(id_of: impl Fn(&str) -> Option<Token>) -> Option<Self> {
        id_of("</think>").and_then(|_| Self::detect("</think>"))
    }

    /// The tags of a tokenizer, and whether a rendered chat ends with the opening one.
    pub(super) fn in_use(
        id_of: impl Fn(&str) -> Option<Token>,
        rendered: &str,
    ) -> Option<(Self, bool)> {
        let tags = Self::of_tokens(id_of)?;
        let opened = tags.opened_by(rendered);
        Some((tags, opened))
    }

    /// Whether a rendered chat ends with the opening tag.
    pub(crate) fn opened_by(&self, rendered: &str) -> bool {
        rendered.trim_end().ends_with(&self.open)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    Before,
    Inside { started: bool },
    After { started: bool },
}

/// Separates reasoning from the answer in a stream.
#[derive(Clone, Debug)]
pub struct ReasoningSplit {
    marks: Reasoning,
    place: Where,
    held: String,
    /// Bytes of `held` known to be white space, while `place` is `Before`.
    blank: usize,
}

impl ReasoningSplit {
    /// `opened`: the prompt already ended with the opening tag.
    pub fn new(marks: Reasoning, opened: bool) -> Self {
        let place = if opened { Where::Inside { started: false } } else { Where::Before };
        Self { marks, place, held: String::new(), blank: 0 }
    }

    /// Whether the stream is inside the reasoning.
    pub(crate) fn inside(&self) -> bool {
        matches!(self.place, Where::Inside { .. })
    }

    /// Adds text; appends reasoning to `out` and returns text of the answer.
    pub fn push(&mut self, text: &str, out: &mut Vec<Delta>) -> String {
        self.held.push_str(text);
        if self.place == Where::Before {
            let begun = self.held[self.blank..].trim_start();
            self.blank = self.held.len() - begun.len();
            if let Some(rest) = begun.strip_prefix(self.marks.open.as_str()) {
                self.held = rest.to_string();
                self.place = Where::Inside { started: false };
            } else if self.marks.open.starts_with(begun) {
                return String::new();
            } else {
                self.place = Where::After { started: true };
            }
        }
        if let Where::Inside { mut started } = self.place {
            match self.held.find(self.marks.close.as_str()) {
                Some(at) => {
                    let rest = self.held.split_off(at + self.marks.close.len());
                    self.held.truncate(at);
                    self.emit_reasoning(&mut started, out);
                    self.held = rest;
                    self.place = Where::After { started: false };
                }
                None => {
                    let rest = self.held.split_off(partial_at(&self.held, &self.marks.close));
                    self.emit_reasoning(&mut started, out);
                    self.held = rest;
                    self.place = Where::Inside { started };
                }
            }
        }
        match self.place {
            Where::After { started: true } => std::mem::take(&mut self.held),
            Where::After { started: false } => {
                // Drops the white space between reasoning and answer.
                let answer = self.held.trim_start().to_string();
                self.held.clear();
                self.place = Where::After { started: !answer.is_empty() };
                answer
            }
            _ => String::new(),
        }
    }

    /// Ends the answer; text held back counts as what it was taken for so far.
    pub fn flush(&mut self, out: &mut Vec<Delta>) -> String {
        match self.place {
            Where::Inside { mut started } => {
                self.emit_reasoning(&mut started, out);
                String::new()
            }
            _ => std::mem::take(&mut self.held),
        }
    }

    fn emit_reasoning(&mut self, started: &mut bool, out: &mut Vec<Delta>) {
        let text = if *started { self.held.as_str() } else { self.held.trim_start() };
        if !text.is_empty() {
            out.push(Delta::Reasoning(text.into()));
            *started = true;
        }
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str, opened: bool, size: usize) -> (String, String) {
        let marks = Reasoning::detect("x</think>").unwrap();
        let mut split = ReasoningSplit::new(marks, opened);
        let (mut out, mut answer) = (Vec::new(), String::new());
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(size) {
            answer += &split.push(&piece.iter().collect::<String>(), &mut out);
        }
        answer += &split.flush(&mut out);
        let thought = out.into_iter().map(|d| match d {
            Delta::Reasoning(text) => text,
            other => panic!("{other:?}"),
        });
        (thought.collect(), answer)
    }

    /// White space or incomplete tags in a million pieces: rescanning the held text took minutes.
    #[test]
    fn work_is_linear() {
        for (piece, opened) in [(" ", false), ("</think", true), ("<think", true)] {
            let marks = Reasoning::detect("x</think>").unwrap();
            let mut split = ReasoningSplit::new(marks, opened);
            let (mut out, mut answer) = (Vec::new(), String::new());
            for _ in 0..1 << 20 {
                answer += &split.push(piece, &mut out);
            }
            answer += &split.flush(&mut out);
            let thought = out.iter().map(|delta| match delta {
                Delta::Reasoning(text) => text.len(),
                other => panic!("{other:?}"),
            });
            assert_eq!(thought.sum::<usize>() + answer.len(), piece.len() << 20);
        }
    }

    #[test]
    fn reasoning_is_separated_for_any_piece_size() {
        for size in 1..20 {
            let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
            let both = "\n<think>\nwhy <not>?</think>\n\nBecause </think>.";
            assert_eq!(split(both, false, size), pair("why <not>?", "Because </think>."));
            assert_eq!(split("why</think>\nYes", true, size), pair("why", "Yes"));
            assert_eq!(split("No <think>thinking</think>", false, size).0, "");
            assert_eq!(split("<think>never ends", false, size), pair("never ends", ""));
            assert_eq!(split("<thin ice", false, size), pair("", "<thin ice"));
            assert_eq!(split("<thin", false, size), pair("", "<thin"));
            assert_eq!(split("  hi", false, size), pair("", "  hi"));
        }
    }
}
