//! Separates calls between tags from text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

use super::call_object::{CallObject, Progress};
use super::{Delta, partial_at};

pub(super) const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

#[derive(Clone, Debug, Default)]
enum Place {
    /// Text of the answer.
    #[default]
    Text,
    /// Inside a call.
    Call(Box<CallObject>),
    /// After a call or inside something that is none, before the closing tag.
    Tail {
        /// The text between the tags, if it was not a call.
        raw: Option<String>,
    },
}

/// Finds calls in the text of an answer.
#[derive(Clone, Debug, Default)]
pub struct Hermes {
    place: Place,
    /// Text that may be the start of a tag.
    held: String,
    /// White space that is emitted only if text follows.
    space: String,
}

impl Hermes {
    /// Adds text and emits what is certain.
    pub(super) fn push(&mut self, text: &str, out: &mut Vec<Delta>) {
        let joined = format!("{}{text}", std::mem::take(&mut self.held));
        let mut rest = joined.as_str();
        while !rest.is_empty() {
            rest = match &mut self.place {
                Place::Text => self.text(rest, out),
                Place::Call(call) => match call.push(rest, &|_| true, out) {
                    Progress::Open => "",
                    Progress::Done(bytes) => {
                        self.space.clear();
                        self.place = Place::Tail { raw: None };
                        &rest[bytes..]
                    }
                    Progress::Bad => {
                        if call.started() {
                            call.cut(out);
                            let read = rest.len() - call.unread().len();
                            self.place = Place::Tail { raw: None };
                            &rest[read..]
                        } else {
                            // The text again, as text.
                            let raw = call.text().to_string();
                            self.place = Place::Tail { raw: Some(String::new()) };
                            self.push(&raw, out);
                            ""
                        }
                    }
                },
                Place::Tail { raw } => match rest.find(CLOSE) {
                    Some(at) => {
                        if let Some(raw) = raw {
                            let space = std::mem::take(&mut self.space);
                            let text = format!("{space}{OPEN}{raw}{}{CLOSE}", &rest[..at]);
                            out.push(Delta::Text(text));
                        }
                        self.place = Place::Text;
                        &rest[at + CLOSE.len()..]
                    }
                    None => {
                        let begins = partial_at(rest, CLOSE);
                        if let Some(raw) = raw {
                            raw.push_str(&rest[..begins]);
                        }
                        self.held = rest[begins..].into();
                        ""
                    }
                },
            };
        }
    }

    /// Emits text up to the next opening tag; returns what follows it.
    fn text<'a>(&mut self, rest: &'a str, out: &mut Vec<Delta>) -> &'a str {
        let (end, opens) = match rest.find(OPEN) {
            Some(at) => (at, true),
            None => (partial_at(rest, OPEN), false),
        };
        let text = &rest[..end];
        let kept = text.trim_end().len();
        if kept > 0 {
            let space = std::mem::take(&mut self.space);
            out.push(Delta::Text(format!("{space}{}", &text[..kept])));
        }
        self.space.push_str(&text[kept..]);
        if !opens {
            self.held = rest[end..].into();
            return "";
        }
        self.place = Place::Call(Box::default());
        &rest[end + OPEN.len()..]
    }

    /// Ends the answer. `cut`: the token limit ended it, and part of a call is not text.
    pub(super) fn flush(&mut self, cut: bool, out: &mut Vec<Delta>) {
        let held = std::mem::take(&mut self.held);
        let space = std::mem::take(&mut self.space);
        let rest = match std::mem::take(&mut self.place) {
            Place::Text => format!("{space}{held}"),
            Place::Call(mut call) if call.started() => {
                call.cut(out);
                return;
            }
            Place::Call(_) | Place::Tail { raw: Some(_) } if cut => return,
            Place::Call(call) => format!("{space}{OPEN}{}", call.text()),
            Place::Tail { raw: Some(raw) } => format!("{space}{OPEN}{raw}{held}"),
            Place::Tail { raw: None } => return,
        };
        if !rest.trim().is_empty() {
            out.push(Delta::Text(rest));
        }
    }
}
