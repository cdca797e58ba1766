//! Completions as server-sent events.

use super::handler::Writer;
use crate::answer::{Piece, Usage};
use crate::app::App;
use crate::http::sse::{DONE, Events};
use crate::openai::usage::UsageBody;
use crate::openai::{new_id, unix_time};

/// Writes completion chunks.
pub(super) struct CompletionEvents {
    /// `data: {…,"choices":[`, the same for all events.
    head: String,
    tail: &'static str,
    usage: bool,
    writer: Writer,
}

impl CompletionEvents {
    pub(super) fn new(app: &App, writer: Writer, usage: bool) -> Self {
        let head = format!(
            "data: {{\"id\":\"{}\",\"object\":\"text_completion\",\"created\":{},\
             \"model\":{},\"choices\":[",
            new_id("cmpl"),
            unix_time(),
            serde_json::Value::from(app.model.name.as_str()),
        );
        let tail = if usage { "],\"usage\":null}\n\n" } else { "]}\n\n" };
        Self { head, tail, usage, writer }
    }
}

impl Events for CompletionEvents {
    fn piece(&mut self, piece: Piece, out: &mut Vec<u8>) {
        let Self { head, tail, writer, .. } = self;
        writer.write(piece, &mut |choice| {
            out.extend_from_slice(head.as_bytes());
            // Writing to a Vec cannot fail.
            let _ = serde_json::to_writer(&mut *out, &choice);
            out.extend_from_slice(tail.as_bytes());
        });
    }

    fn end(&mut self, usage: Usage, out: &mut Vec<u8>) {
        if self.usage {
            out.extend_from_slice(self.head.as_bytes());
            out.extend_from_slice(b"],\"usage\":");
            let _ = serde_json::to_writer(&mut *out, &UsageBody::from(usage));
            out.extend_from_slice(b"}\n\n");
        }
        out.extend_from_slice(DONE);
    }
}
