//! Parses a JSON list of calls from a stream: `[{"name": …, "parameters": {…}}, …]`.

use super::Delta;
use super::call_object::{CallObject, Progress};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// Before the opening bracket.
    #[default]
    Before,
    /// Before or inside a call.
    Call,
    /// After a call.
    After,
    /// The list has ended, or the text is not a list of calls: nothing more will be found.
    Ended,
}

/// Finds the calls of a list. Each byte is read once.
#[derive(Clone, Debug, Default)]
pub struct CallList {
    place: Place,
    call: CallObject,
    /// The text, while it may turn out not to be a list of calls.
    held: String,
    called: bool,
}

impl CallList {
    /// Adds text and emits what is certain of the calls.
    pub(super) fn push(&mut self, text: &str, out: &mut Vec<Delta>) {
        if !self.called {
            self.held.push_str(text);
        }
        let mut rest = text;
        while !rest.is_empty() {
            rest = match self.place {
                Place::Ended => return,
                Place::Call => match self.call.push(rest, &|_| true, out) {
                    Progress::Open => "",
                    Progress::Bad => {
                        self.call.cut(out);
                        self.place = Place::Ended;
                        ""
                    }
                    Progress::Done(bytes) => {
                        self.call = CallObject::default();
                        self.place = Place::After;
                        &rest[bytes..]
                    }
                },
                Place::Before | Place::After => self.between(rest),
            };
        }
        if !self.called && out.iter().any(|delta| matches!(delta, Delta::ToolStart { .. })) {
            self.called = true;
            self.held = String::new();
        }
    }

    /// Reads the text between two calls; returns the rest.
    fn between<'a>(&mut self, text: &'a str) -> &'a str {
        let text = text.trim_start_matches([' ', '\n', '\r', '\t']);
        let expected = if self.place == Place::Before { '[' } else { ',' };
        match text.strip_prefix(expected) {
            Some(rest) => {
                self.place = Place::Call;
                rest
            }
            None => {
                if !text.is_empty() {
                    self.place = Place::Ended;
                }
                ""
            }
        }
    }

    /// Ends the answer; returns its text if it was not a list of calls.
    pub(super) fn flush(&mut self, out: &mut Vec<Delta>) -> Option<String> {
        if self.place == Place::Call {
            self.call.cut(out);
        }
        let rest = std::mem::take(&mut self.held);
        (!self.called && !rest.is_empty()).then_some(rest)
    }
}
