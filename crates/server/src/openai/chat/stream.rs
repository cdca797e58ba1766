//! Chat as server-sent events. There is one event per token, so the constant parts of its JSON are
//! prepared once; tests parse every event back into its type.

use super::handler::chat_logprob;
use super::types::ChatLogprobs;
use crate::answer::{Delta, Piece, Usage};
use crate::app::App;
use crate::http::sse::{DONE, Events};
use crate::openai::usage::UsageBody;
use crate::openai::{new_id, unix_time};
use engine::request::{Token, TokenLogprob};
use std::io::Write;
use std::sync::Arc;
use text::TextModel;

/// Writes chat chunks.
pub(super) struct ChatEvents {
    /// `data: {…,"choices":[`, the same for all events.
    head: String,
    /// The text after the choices.
    tail: &'static str,
    text: Arc<dyn TextModel>,
    usage: bool,
    logprobs: bool,
    /// Whether token ids are sent.
    token_ids: bool,
    /// The prompt's, until they are sent.
    prompt: Option<Arc<[Token]>>,
    /// Per choice: whether it has begun, and the number of tool calls.
    choices: Vec<(bool, u32)>,
}

impl ChatEvents {
    /// `prompt`: its tokens, if token ids are sent.
    pub(super) fn new(
        app: &App,
        choices: usize,
        usage: bool,
        logprobs: bool,
        prompt: Option<Arc<[Token]>>,
    ) -> Self {
        let head = format!(
            "data: {{\"id\":\"{}\",\"object\":\"chat.completion.chunk\",\"created\":{},\
             \"model\":{},\"choices\":[",
            new_id("chatcmpl"),
            unix_time(),
            serde_json::Value::from(app.model.name.as_str()),
        );
        let tail = if usage { "],\"usage\":null}\n\n" } else { "]}\n\n" };
        let text = app.model.text.clone();
        let (token_ids, choices) = (prompt.is_some(), vec![(false, 0); choices]);
        Self { head, tail, text, usage, logprobs, token_ids, prompt, choices }
    }

    fn open(&self, index: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(self.head.as_bytes());
        // Writing to a Vec cannot fail.
        let _ = write!(out, "{{\"index\":{index},\"delta\":{{");
    }

    fn close(
        &mut self,
        list: &[TokenLogprob],
        token_ids: &[Token],
        reason: Option<&str>,
        out: &mut Vec<u8>,
    ) {
        out.push(b'}');
        if self.token_ids {
            out.extend_from_slice(b",\"token_ids\":");
            let _ = serde_json::to_writer(&mut *out, token_ids);
        }
        if self.logprobs {
            let content = list.iter().map(|l| chat_logprob(l, &*self.text)).collect();
            out.extend_from_slice(b",\"logprobs\":");
            let _ = serde_json::to_writer(&mut *out, &ChatLogprobs { content });
        }
        match reason {
            None => out.extend_from_slice(b",\"finish_reason\":null}"),
            Some(reason) => {
                let _ = write!(out, ",\"finish_reason\":\"{reason}\"}}");
            }
        }
        match self.prompt.take() {
            None => out.extend_from_slice(self.tail.as_bytes()),
            Some(prompt) => {
                out.extend_from_slice(b"],\"prompt_token_ids\":");
                let _ = serde_json::to_writer(&mut *out, &prompt[..]);
                out.extend_from_slice(&self.tail.as_bytes()[1..]);
            }
        }
    }

    fn begin(&mut self, index: usize, out: &mut Vec<u8>) {
        if !self.choices[index].0 {
            self.choices[index].0 = true;
            self.open(index, out);
            out.extend_from_slice(b"\"role\":\"assistant\",\"content\":\"\"");
            self.close(&[], &[], None, out);
        }
    }
}

fn string(text: &str, out: &mut Vec<u8>) {
    let _ = serde_json::to_writer(&mut *out, text);
}

impl Events for ChatEvents {
    fn piece(&mut self, piece: Piece, out: &mut Vec<u8>) {
        match piece {
            Piece::Prompt { .. } | Piece::Delta { delta: Delta::ToolEnd, .. } => {}
            Piece::Delta { index, delta, logprobs, token_ids } => {
                self.begin(index, out);
                self.open(index, out);
                match delta {
                    Delta::Text(text) => {
                        out.extend_from_slice(b"\"content\":");
                        string(&text, out);
                    }
                    Delta::Reasoning(text) => {
                        out.extend_from_slice(b"\"reasoning_content\":");
                        string(&text, out);
                    }
                    Delta::ToolStart { name } => {
                        let call = self.choices[index].1;
                        self.choices[index].1 += 1;
                        let _ = write!(
                            out,
                            "\"tool_calls\":[{{\"index\":{call},\"id\":\"{}\",\
                             \"type\":\"function\",\"function\":{{\"name\":",
                            new_id("call"),
                        );
                        string(&name, out);
                        out.extend_from_slice(b",\"arguments\":\"\"}}]");
                    }
                    Delta::ToolArguments(text) => {
                        let call = self.choices[index].1.saturating_sub(1);
                        let _ = write!(
                            out,
                            "\"tool_calls\":[{{\"index\":{call},\"function\":{{\"arguments\":"
                        );
                        string(&text, out);
                        out.extend_from_slice(b"}}]");
                    }
                    Delta::ToolEnd => {}
                }
                self.close(&logprobs, &token_ids, None, out);
            }
            Piece::End { index, reason, logprobs, token_ids, .. } => {
                self.begin(index, out);
                self.open(index, out);
                self.close(&logprobs, &token_ids, Some(reason), out);
            }
        }
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
