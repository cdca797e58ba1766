//! Responses as events. Every event has a number; an item is announced, grows and ends.

use super::handler::Conversation;
use super::types::ResponsesResponse;
use super::write::{self, item, item_id, text_part};
use crate::answer::{Collected, Delta, Part, Piece, Usage};
use crate::app::App;
use crate::error::ApiError;
use crate::http::sse::{Events, event};
use serde_json::{Value, json};
use std::sync::Arc;

/// Writes the events of one response.
pub(super) struct ResponseEvents {
    app: Arc<App>,
    response: ResponsesResponse,
    conversation: Option<Conversation>,
    logprobs: bool,
    number: u64,
    /// The answer so far; its last part is the open item, if there is one.
    answer: Collected,
    /// The id of the open item.
    open: Option<String>,
    /// Log-probabilities of the open item.
    scores: Vec<Value>,
}

impl ResponseEvents {
    pub(super) fn new(
        app: Arc<App>,
        response: ResponsesResponse,
        conversation: Conversation,
        logprobs: bool,
    ) -> Self {
        Self {
            app,
            response,
            conversation: Some(conversation),
            logprobs,
            number: 0,
            answer: Collected::default(),
            open: None,
            scores: Vec::new(),
        }
    }

    /// Writes one event with its number.
    fn send(&mut self, name: &str, mut data: Value, out: &mut Vec<u8>) {
        data["type"] = name.into();
        data["sequence_number"] = self.number.into();
        self.number += 1;
        event(name, &data, out);
    }

    fn send_response(&mut self, name: &str, out: &mut Vec<u8>) {
        let data = json!({"response": self.response});
        self.send(name, data, out);
    }

    /// Writes an event about the open item.
    fn send_item(&mut self, name: &str, mut data: Value, out: &mut Vec<u8>) {
        data["output_index"] = self.response.output.len().into();
        data["item_id"] = json!(self.open);
        self.send(name, data, out);
    }

    /// Announces the last part of the answer as a new item.
    fn begin(&mut self, out: &mut Vec<u8>) {
        let Some(part) = self.answer.parts.last() else { return };
        let id = item_id(part);
        let mut made = item(part, &id, "in_progress", Vec::new());
        let (parted, begun) = match part {
            Part::Text(_) => (true, text_part("", Vec::new())),
            Part::Reasoning(_) => (true, json!({"type": "reasoning_text", "text": ""})),
            Part::Call(..) => (false, Value::Null),
        };
        if parted {
            made["content"] = json!([]);
        }
        self.open = Some(id);
        let data = json!({"output_index": self.response.output.len(), "item": made});
        self.send("response.output_item.added", data, out);
        if parted {
            let data = json!({"content_index": 0, "part": begun});
            self.send_item("response.content_part.added", data, out);
        }
    }

    /// Ends the open item.
    fn finish(&mut self, status: &str, out: &mut Vec<u8>) {
        let Some(id) = self.open.clone() else { return };
        let Some(part) = self.answer.parts.last().cloned() else { return };
        let scores = std::mem::take(&mut self.scores);
        match &part {
            Part::Text(text) => {
                let data = json!({"content_index": 0, "text": text, "logprobs": scores});
                self.send_item("response.output_text.done", data, out);
                let data = json!({"content_index": 0, "part": text_part(text, scores.clone())});
                self.send_item("response.content_part.done", data, out);
            }
            Part::Reasoning(text) => {
                let data = json!({"content_index": 0, "text": text});
                self.send_item("response.reasoning_text.done", data, out);
                let part = json!({"type": "reasoning_text", "text": text});
                let data = json!({"content_index": 0, "part": part});
                self.send_item("response.content_part.done", data, out);
            }
            Part::Call(_, name, arguments) => {
                let data = json!({"name": name, "arguments": arguments});
                self.send_item("response.function_call_arguments.done", data, out);
            }
        }
        let made = item(&part, &id, status, scores);
        let data = json!({"output_index": self.response.output.len(), "item": made});
        self.send("response.output_item.done", data, out);
        self.response.output.push(made);
        self.open = None;
    }

    fn delta(&mut self, delta: Delta, scores: Vec<Value>, out: &mut Vec<u8>) {
        let before = self.answer.parts.len();
        let (name, data) = match &delta {
            Delta::Text(text) => (
                "response.output_text.delta",
                json!({"content_index": 0, "delta": text, "logprobs": scores}),
            ),
            Delta::Reasoning(text) => {
                ("response.reasoning_text.delta", json!({"content_index": 0, "delta": text}))
            }
            Delta::ToolArguments(text) => {
                ("response.function_call_arguments.delta", json!({"delta": text}))
            }
            Delta::ToolStart { .. } => ("", Value::Null),
            // What follows tells whether the call is complete.
            Delta::ToolEnd => return,
        };
        // A new part ends the item before it, whose part is still the last one.
        if self.open.is_some() && self.answer.begins(&delta) {
            self.finish("completed", out);
        }
        self.answer.add(delta);
        if self.answer.parts.len() > before {
            self.begin(out);
        }
        if !name.is_empty() {
            self.scores.extend(scores);
            self.send_item(name, data, out);
        }
    }
}

impl Events for ResponseEvents {
    fn piece(&mut self, piece: Piece, out: &mut Vec<u8>) {
        match piece {
            Piece::Prompt { .. } => {
                self.send_response("response.created", out);
                self.send_response("response.in_progress", out);
            }
            Piece::Delta { delta, logprobs, .. } => {
                let scores = match self.logprobs {
                    true => write::logprobs(&logprobs, &*self.app.model.text),
                    false => Vec::new(),
                };
                self.delta(delta, scores, out);
            }
            Piece::End { reason, .. } => {
                let status = if reason == "length" { "incomplete" } else { "completed" };
                self.finish(status, out);
                self.answer.reason = reason;
            }
        }
    }

    fn end(&mut self, usage: Usage, out: &mut Vec<u8>) {
        write::ended(&mut self.response, self.answer.reason, usage);
        if let Some(conversation) = self.conversation.take() {
            conversation.keep(&self.app, &self.response, &self.answer.parts);
        }
        let name = format!("response.{}", self.response.status);
        self.send_response(&name, out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        self.response.status = "failed".into();
        self.response.error = Some(json!({"code": "server_error", "message": error.message}));
        self.send_response("response.failed", out);
    }
}
