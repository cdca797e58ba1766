//! Answers in Ollama's format: one object, or a line of JSON for each part.

use super::time::now;
use crate::answer::{Collected, Delta, Part, Piece, Usage, arguments};
use crate::app::App;
use crate::error::ApiError;
use crate::http::sse::Events;
use crate::openai::chat::handler::chat_logprob;
use engine::request::TokenLogprob;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Instant;
use text::TextModel;

/// Which route the answer is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Chat,
    Generate,
}

/// Writes the lines of one answer.
pub(super) struct Lines {
    model: String,
    text: Arc<dyn TextModel>,
    shape: Shape,
    logprobs: bool,
    began: Instant,
    prompt_done: Option<Instant>,
    /// The call in progress, which is one line when it is complete.
    call: Collected,
    reason: &'static str,
}

/// The new parts of an answer.
#[derive(Default)]
struct New {
    text: String,
    thinking: Option<String>,
    calls: Vec<Value>,
}

impl New {
    fn add(&mut self, part: &Part) {
        match part {
            Part::Text(text) => self.text.push_str(text),
            Part::Reasoning(text) => self.thinking.get_or_insert_default().push_str(text),
            Part::Call(_, name, text) => {
                let function = json!({"name": name, "arguments": arguments(text)});
                self.calls.push(json!({"function": function}));
            }
        }
    }
}

impl Lines {
    pub(super) fn new(app: &App, shape: Shape, logprobs: bool) -> Self {
        Self {
            model: app.model.name.clone(),
            text: app.model.text.clone(),
            shape,
            logprobs,
            began: Instant::now(),
            prompt_done: None,
            call: Collected::default(),
            reason: "stop",
        }
    }

    /// Sets when the prompt was processed.
    pub(super) fn prompt_done(&mut self, at: Option<Instant>) {
        self.prompt_done = at;
    }

    /// The answer to a request that only loads the model.
    pub(super) fn loaded(&self) -> Value {
        let mut line = self.line(New::default(), &[]);
        line.insert("done".into(), true.into());
        line.insert("done_reason".into(), "load".into());
        line.into()
    }

    /// A complete answer.
    pub(super) fn whole(&mut self, whole: &Collected, usage: Usage) -> Value {
        let mut new = New::default();
        whole.parts.iter().for_each(|part| new.add(part));
        self.reason = whole.reason;
        let mut line = self.line(new, &whole.logprobs);
        self.finish(&mut line, usage);
        line.into()
    }

    fn line(&self, new: New, logprobs: &[TokenLogprob]) -> Map<String, Value> {
        let mut line = Map::new();
        line.insert("model".into(), self.model.clone().into());
        line.insert("created_at".into(), now().into());
        let mut own = Map::new();
        let chat = self.shape == Shape::Chat;
        if chat {
            own.insert("role".into(), "assistant".into());
        }
        own.insert(if chat { "content" } else { "response" }.into(), new.text.into());
        if let Some(thinking) = new.thinking {
            own.insert("thinking".into(), thinking.into());
        }
        if !new.calls.is_empty() {
            own.insert("tool_calls".into(), new.calls.into());
        }
        match chat {
            true => {
                line.insert("message".into(), own.into());
            }
            false => line.extend(own),
        }
        if self.logprobs && !logprobs.is_empty() {
            let one = |entry: &TokenLogprob| json!(chat_logprob(entry, &*self.text));
            line.insert("logprobs".into(), logprobs.iter().map(one).collect());
        }
        line.insert("done".into(), false.into());
        line
    }

    /// Adds what the last line has.
    fn finish(&self, line: &mut Map<String, Value>, usage: Usage) {
        let nanos = |from: Instant, to: Instant| (to - from).as_nanos() as u64;
        let now = Instant::now();
        let middle = self.prompt_done.unwrap_or(now);
        line.insert("done".into(), true.into());
        let reason = if self.reason == "length" { "length" } else { "stop" };
        line.insert("done_reason".into(), reason.into());
        for (name, value) in [
            ("total_duration", nanos(self.began, now)),
            ("load_duration", 0),
            ("prompt_eval_count", usage.prompt),
            ("prompt_eval_duration", nanos(self.began, middle)),
            ("eval_count", usage.completion),
            ("eval_duration", nanos(middle, now)),
        ] {
            line.insert(name.into(), value.into());
        }
    }

    fn send(&self, new: New, logprobs: &[TokenLogprob], out: &mut Vec<u8>) {
        write(&self.line(new, logprobs).into(), out);
    }
}

fn write(line: &Value, out: &mut Vec<u8>) {
    // Writing to a Vec cannot fail.
    let _ = serde_json::to_writer(&mut *out, line);
    out.push(b'\n');
}

impl Events for Lines {
    const CONTENT_TYPE: &'static str = "application/x-ndjson";
    const PING: &'static [u8] = b"";

    fn piece(&mut self, piece: Piece, out: &mut Vec<u8>) {
        match piece {
            Piece::Prompt { .. } => self.prompt_done = Some(Instant::now()),
            Piece::Delta { delta, logprobs, .. } => match delta {
                Delta::Text(text) => {
                    self.send(New { text, ..New::default() }, &logprobs, out);
                }
                Delta::Reasoning(text) => {
                    self.send(New { thinking: Some(text), ..New::default() }, &logprobs, out);
                }
                Delta::ToolStart { .. } | Delta::ToolArguments(_) => {
                    self.call.logprobs.extend(logprobs);
                    self.call.add(delta);
                }
                Delta::ToolEnd => {
                    let call = std::mem::take(&mut self.call);
                    let mut new = New::default();
                    call.parts.iter().for_each(|part| new.add(part));
                    self.send(new, &call.logprobs, out);
                }
            },
            Piece::End { reason, .. } => self.reason = reason,
        }
    }

    fn end(&mut self, usage: Usage, out: &mut Vec<u8>) {
        let mut line = self.line(New::default(), &[]);
        self.finish(&mut line, usage);
        write(&line.into(), out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        write(&super::error::body(error), out);
    }
}
