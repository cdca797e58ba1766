//! Finds calls in answers of Llama 3, which are either calls or text: `{"name": …, "parameters":
//! {…}}`, several separated by `;`, or a Python list of calls, `[f(a=1), g(b="x")]`.

use super::Delta;
use super::call_object::{CallObject, Progress};
use super::pythonic;
use super::tools::{ToolCall, call_of, emit};
use serde_json::Value;

pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

/// What may stand between two calls.
const BETWEEN: [char; 5] = [';', ' ', '\n', '\t', '\r'];

#[derive(Clone, Debug, Default)]
enum Place {
    /// White space or part of the tag.
    #[default]
    Start,
    /// A call as JSON.
    Call(Box<CallObject>),
    /// After a call.
    Between,
    /// A list, which is read at the end.
    List,
    /// Text of the answer.
    Text,
}

/// Finds calls of the offered functions.
#[derive(Clone, Debug)]
pub struct Llama {
    /// The names of the offered functions.
    names: Vec<String>,
    place: Place,
    /// The text of the answer until it is known to be a call or text.
    raw: String,
    /// Leading bytes of it known to be white space.
    blank: usize,
}

impl Llama {
    pub(super) fn new(names: Vec<String>) -> Self {
        Self { names, place: Place::Start, raw: String::new(), blank: 0 }
    }

    /// Adds text and emits what is certain.
    pub(super) fn push(&mut self, text: &str, out: &mut Vec<Delta>) {
        let mut rest = text.to_string();
        while !rest.is_empty() {
            rest = match &mut self.place {
                Place::Start => self.start(&rest, out),
                Place::List => {
                    self.raw.push_str(&rest);
                    String::new()
                }
                Place::Text => {
                    out.push(Delta::Text(std::mem::take(&mut rest)));
                    String::new()
                }
                Place::Between => {
                    let text = rest.trim_start_matches(BETWEEN);
                    if text.starts_with('{') {
                        self.place = Place::Call(Box::default());
                    } else if !text.is_empty() {
                        self.place = Place::Text;
                    }
                    text.into()
                }
                Place::Call(call) => {
                    let progress =
                        call.push(&rest, &|name| self.names.iter().any(|n| n == name), out);
                    if call.started() {
                        self.raw.clear();
                    }
                    match progress {
                        Progress::Open => String::new(),
                        Progress::Done(bytes) => {
                            self.place = Place::Between;
                            rest.split_off(bytes)
                        }
                        Progress::Bad => {
                            let text = if call.started() {
                                call.cut(out);
                                call.unread().to_string()
                            } else {
                                format!("{}{}", std::mem::take(&mut self.raw), call.text())
                            };
                            self.place = Place::Text;
                            text
                        }
                    }
                }
            };
        }
    }

    /// Reads the beginning; returns text to be read as what it begins.
    fn start(&mut self, text: &str, out: &mut Vec<Delta>) -> String {
        self.raw.push_str(text);
        let begun = self.raw[self.blank..].trim_start();
        self.blank = self.raw.len() - begun.len();
        let (tagged, body) = match begun.strip_prefix(PYTHON_TAG) {
            Some(body) => (true, body.trim_start()),
            None => (false, begun),
        };
        if body.is_empty() || !tagged && PYTHON_TAG.starts_with(begun) {
            return String::new();
        }
        let body = body.to_string();
        if body.starts_with('{') {
            self.raw.truncate(self.raw.len() - body.len());
            self.place = Place::Call(Box::default());
            return body;
        }
        if body.starts_with('[') {
            self.place = Place::List;
            return String::new();
        }
        self.place = Place::Text;
        out.push(Delta::Text(std::mem::take(&mut self.raw)));
        String::new()
    }

    /// Ends the answer. `cut`: the token limit ended it, and part of a call is not text.
    pub(super) fn flush(&mut self, cut: bool, out: &mut Vec<Delta>) {
        let raw = std::mem::take(&mut self.raw);
        match std::mem::replace(&mut self.place, Place::Text) {
            Place::Between | Place::Text => {}
            Place::Start => text(raw, out),
            Place::Call(mut call) if call.started() => call.cut(out),
            Place::Call(call) if cut && begins_call(call.text()) => {}
            Place::Call(call) => text(format!("{raw}{}", call.text()), out),
            Place::List => match parse_list(&raw, &self.names) {
                Some(calls) => calls.into_iter().for_each(|call| emit(call, out)),
                None if cut && begins_list(&raw, &self.names) => {}
                None => text(raw, out),
            },
        }
    }
}

fn text(text: String, out: &mut Vec<Delta>) {
    if !text.is_empty() {
        out.push(Delta::Text(text));
    }
}

/// Whether an object begins as a call does: with its name.
fn begins_call(text: &str) -> bool {
    let inner = text.trim_start().strip_prefix('{').unwrap_or_default().trim_start();
    inner.starts_with("\"name\"") || "\"name\"".starts_with(inner)
}

/// Whether a list begins with a call of an offered function.
fn begins_list(text: &str, names: &[String]) -> bool {
    let text = without_tag(text);
    let Some(inner) = text.strip_prefix('[').map(str::trim_start) else { return false };
    let calls =
        |name: &String| inner.strip_prefix(name.as_str()).is_some_and(|r| r.starts_with('('));
    names.iter().any(calls) || inner.starts_with('{') && begins_call(inner)
}

fn without_tag(text: &str) -> &str {
    let text = text.trim();
    text.strip_prefix(PYTHON_TAG).unwrap_or(text).trim()
}

fn parse_list(text: &str, names: &[String]) -> Option<Vec<ToolCall>> {
    let text = without_tag(text);
    let calls = json_calls(text).or_else(|| pythonic::parse(text))?;
    let known = calls.iter().all(|(name, _)| names.contains(name));
    (known && !calls.is_empty()).then_some(calls)
}

fn json_calls(text: &str) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        match values.next()?.ok()? {
            Value::Array(list) => {
                for value in &list {
                    calls.push(call_of(value)?);
                }
            }
            value => calls.push(call_of(&value)?),
        }
        rest = rest[values.byte_offset()..].trim_start_matches(BETWEEN);
    }
    Some(calls)
}
