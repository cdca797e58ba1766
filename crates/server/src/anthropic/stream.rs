//! Messages as Anthropic's events.

use super::error;
use super::handler::{empty, stop_reason};
use super::types::{MessagesResponse, MessagesUsage};
use crate::answer::{Delta, Piece, Usage};
use crate::app::App;
use crate::error::ApiError;
use crate::http::sse::{Events, event};
use crate::openai::new_id;
use serde_json::{Value, json};

/// The kind of block that is open.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Open {
    Nothing,
    Text,
    Thinking,
    Call,
}

/// Writes the events of one message.
pub(super) struct MessageEvents {
    message: MessagesResponse,
    open: Open,
    /// The index of the open block, or of the next one.
    index: u32,
    stop: (&'static str, Option<String>),
}

impl MessageEvents {
    pub(super) fn new(app: &App) -> Self {
        let message = empty(app, Vec::new());
        Self { message, open: Open::Nothing, index: 0, stop: ("end_turn", None) }
    }

    /// Opens a block of this kind, unless it is open already.
    fn open(&mut self, kind: Open, block: impl FnOnce() -> Value, out: &mut Vec<u8>) {
        if self.open == kind && kind != Open::Call {
            return;
        }
        self.close(out);
        self.open = kind;
        let data =
            json!({"type": "content_block_start", "index": self.index, "content_block": block()});
        event("content_block_start", &data, out);
    }

    fn delta(&self, delta: &Value, out: &mut Vec<u8>) {
        let data = json!({"type": "content_block_delta", "index": self.index, "delta": delta});
        event("content_block_delta", &data, out);
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        match self.open {
            Open::Nothing => return,
            Open::Thinking => {
                self.delta(&json!({"type": "signature_delta", "signature": ""}), out);
            }
            Open::Text | Open::Call => {}
        }
        let data = json!({"type": "content_block_stop", "index": self.index});
        event("content_block_stop", &data, out);
        self.open = Open::Nothing;
        self.index += 1;
    }
}

impl Events for MessageEvents {
    const PING: &'static [u8] = b"event: ping\ndata: {\"type\": \"ping\"}\n\n";

    fn piece(&mut self, piece: Piece, out: &mut Vec<u8>) {
        match piece {
            Piece::Prompt { tokens, cached, .. } => {
                let usage =
                    Usage { prompt: tokens.into(), cached: cached.into(), ..Usage::default() };
                self.message.usage = usage.into();
                let data = json!({"type": "message_start", "message": self.message});
                event("message_start", &data, out);
            }
            Piece::Delta { delta, .. } => match delta {
                Delta::Text(text) => {
                    self.open(Open::Text, || json!({"type": "text", "text": ""}), out);
                    self.delta(&json!({"type": "text_delta", "text": text}), out);
                }
                Delta::Reasoning(text) => {
                    let block = || json!({"type": "thinking", "thinking": "", "signature": ""});
                    self.open(Open::Thinking, block, out);
                    self.delta(&json!({"type": "thinking_delta", "thinking": text}), out);
                }
                Delta::ToolStart { name } => {
                    let block = || {
                        let id = new_id("call");
                        json!({"type": "tool_use", "id": id, "name": name, "input": {}})
                    };
                    self.open(Open::Call, block, out);
                }
                Delta::ToolArguments(text) => {
                    self.delta(&json!({"type": "input_json_delta", "partial_json": text}), out);
                }
                Delta::ToolEnd => self.close(out),
            },
            Piece::End { reason, stop, .. } => {
                self.close(out);
                self.stop = (stop_reason(reason, stop.as_deref()), stop);
            }
        }
    }

    fn end(&mut self, usage: Usage, out: &mut Vec<u8>) {
        let (reason, stop) = &self.stop;
        let data = json!({
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": MessagesUsage::from(usage),
        });
        event("message_delta", &data, out);
        event("message_stop", &json!({"type": "message_stop"}), out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        event("error", &error::body(error), out);
    }
}
