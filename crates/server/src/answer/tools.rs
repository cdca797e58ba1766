//! Parses tool calls, whose format depends on the model family.

use super::call_list::CallList;
use super::pythonic;
use super::{Delta, partial_at};
use serde_json::{Map, Value, json};
use text::{Chat, CheckpointText, TextModel};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const PYTHON_TAG: &str = "<|python_tag|>";

/// The format of a model's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// Qwen and Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, text around it.
    Hermes,
    /// Llama 3: the whole answer is `{"name": …, "parameters": {…}}`, several separated by `;`, or
    /// a Python list of calls, `[f(a=1), g(b="x")]`.
    Llama,
    /// The model does not support tool calls.
    None,
}

impl ToolFormat {
    /// The format that a chat template uses.
    pub fn detect(template: &str) -> Self {
        if template.contains(OPEN) {
            Self::Hermes
        } else if template.contains("python_tag") || template.contains("\"parameters\": ") {
            Self::Llama
        } else {
            Self::None
        }
    }

    /// The format of a checkpoint, found by rendering its chat template with and without a tool.
    pub fn of(text: &CheckpointText) -> Self {
        let tool = json!({"type": "function", "function": {
            "name": "f", "description": "f", "parameters": {"type": "object", "properties": {}},
        }});
        let ask = |tools: Value| {
            let chat = Chat {
                messages: json!([{"role": "user", "content": "x"}]),
                tools,
                generation_prompt: true,
                extra: Map::new(),
            };
            text.render(&chat, usize::MAX).map(|rendered| rendered.text).unwrap_or_default()
        };
        let (with, without) = (ask(json!([tool])), ask(Value::Null));
        if with == without {
            return Self::None;
        }
        match Self::detect(&with) {
            Self::None if text.id_of(PYTHON_TAG).is_some() => Self::Llama,
            found => found,
        }
    }
}

/// Separates tool calls from text in a stream. A call is emitted once it is complete, because part
/// of one is of no use and a malformed one is emitted as text.
#[derive(Clone, Debug)]
pub enum ToolSplit {
    /// No tools: everything is text.
    Off,
    /// Calls between tags.
    Hermes {
        /// Text held back, or the content of a call.
        held: String,
        /// Bytes of the call in which the closing tag does not begin.
        seen: usize,
        /// Whether the opening tag has been seen.
        inside: bool,
        /// White space that is emitted only if text follows.
        space: String,
    },
    /// The answer is either only calls or only text.
    Llama {
        /// The answer so far, while it may be calls.
        held: String,
        /// Leading bytes of it known to be white space.
        blank: usize,
        /// Whether it was found to be text.
        text: bool,
        /// The names of the offered functions.
        names: Vec<String>,
    },
    /// A grammar enforces that the answer is the arguments of this function.
    Named {
        /// The name of the function.
        name: String,
        /// Whether the start of the call was emitted.
        started: bool,
    },
    /// A grammar enforces that the answer is a JSON list of calls.
    List(CallList),
}

impl ToolSplit {
    /// A splitter for this format and these functions.
    pub fn new(format: ToolFormat, names: Vec<String>) -> Self {
        match format {
            ToolFormat::Hermes => {
                Self::Hermes { held: String::new(), seen: 0, inside: false, space: String::new() }
            }
            ToolFormat::Llama => Self::Llama { held: String::new(), blank: 0, text: false, names },
            ToolFormat::None => Self::Off,
        }
    }

    /// Adds text and emits what is certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<Delta>) {
        if text.is_empty() {
            return;
        }
        match self {
            Self::Off => out.push(Delta::Text(text.into())),
            Self::Hermes { held, seen, inside, space } => {
                held.push_str(text);
                hermes(held, seen, inside, space, out);
            }
            Self::Llama { text: true, .. } => out.push(Delta::Text(text.into())),
            Self::Llama { held, blank, text: is_text, .. } => {
                held.push_str(text);
                let begun = held[*blank..].trim_start();
                *blank = held.len() - begun.len();
                let undecided = begun.is_empty()
                    || begun.starts_with(['{', '['])
                    || begun.starts_with(PYTHON_TAG)
                    || PYTHON_TAG.starts_with(begun);
                if !undecided {
                    *is_text = true;
                    out.push(Delta::Text(std::mem::take(held)));
                }
            }
            Self::Named { name, started } => {
                if !*started {
                    out.push(Delta::ToolStart { name: name.clone() });
                    *started = true;
                }
                out.push(Delta::ToolArguments(text.into()));
            }
            Self::List(list) => list.push(text, |call| emit(call, out)),
        }
    }

    /// Ends the answer.
    pub fn flush(&mut self, out: &mut Vec<Delta>) {
        match self {
            Self::Off | Self::Named { .. } => {}
            Self::Hermes { held, seen, inside, space } => {
                let call = if *inside { parse_call(held) } else { None };
                match call {
                    Some(call) => emit(call, out),
                    None => {
                        let mark = if *inside { OPEN } else { "" };
                        let rest = format!("{space}{mark}{held}");
                        if !rest.trim().is_empty() {
                            out.push(Delta::Text(rest));
                        }
                    }
                }
                held.clear();
                *seen = 0;
                *inside = false;
            }
            Self::Llama { held, names, .. } => {
                let whole = std::mem::take(held);
                match parse_llama(&whole, names) {
                    Some(calls) => calls.into_iter().for_each(|call| emit(call, out)),
                    None if whole.is_empty() => {}
                    None => out.push(Delta::Text(whole)),
                }
            }
            Self::List(list) => {
                // After a call, only the end of the list or part of another call can follow.
                if let Some(rest) = list.flush() {
                    out.push(Delta::Text(rest));
                }
            }
        }
    }
}

fn hermes(
    held: &mut String,
    seen: &mut usize,
    inside: &mut bool,
    space: &mut String,
    out: &mut Vec<Delta>,
) {
    // Processed text is removed from `held` at the end, all at once.
    let mut from = 0;
    loop {
        if *inside {
            let Some(at) = held[from + *seen..].find(CLOSE).map(|at| from + *seen + at) else {
                let begins = partial_at(&held[from + *seen..], CLOSE);
                *seen += begins;
                break;
            };
            match parse_call(&held[from..at]) {
                Some(call) => {
                    emit(call, out);
                    space.clear();
                }
                None => {
                    let raw = format!("{space}{OPEN}{}{CLOSE}", &held[from..at]);
                    space.clear();
                    out.push(Delta::Text(raw));
                }
            }
            from = at + CLOSE.len();
            *inside = false;
        } else {
            let rest = &held[from..];
            let (end, opens) = match rest.find(OPEN) {
                Some(at) => (at, true),
                None => (partial_at(rest, OPEN), false),
            };
            let text = &rest[..end];
            let kept = text.trim_end().len();
            if kept > 0 {
                out.push(Delta::Text(format!("{space}{}", &text[..kept])));
                space.clear();
            }
            space.push_str(&text[kept..]);
            from += end + if opens { OPEN.len() } else { 0 };
            *inside = opens;
            *seen = 0;
            if !opens {
                break;
            }
        }
    }
    held.drain(..from);
}

/// A call: the function's name and its arguments as JSON text.
pub(super) type ToolCall = (String, String);

fn emit((name, arguments): ToolCall, out: &mut Vec<Delta>) {
    out.push(Delta::ToolStart { name });
    out.push(Delta::ToolArguments(arguments));
}

fn parse_call(text: &str) -> Option<ToolCall> {
    call_of(&serde_json::from_str(text.trim()).ok()?)
}

/// Parses `{"name": …, "arguments" or "parameters": …}`.
pub(super) fn call_of(value: &Value) -> Option<ToolCall> {
    let name = value.get("name")?.as_str()?;
    let arguments = value.get("arguments").or_else(|| value.get("parameters"));
    let arguments = match arguments {
        None | Some(Value::Null) => "{}".into(),
        // Some models quote their arguments: the text is JSON already.
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    Some((name.into(), arguments))
}

fn parse_llama(text: &str, names: &[String]) -> Option<Vec<ToolCall>> {
    let text = text.trim();
    let text = text.strip_prefix(PYTHON_TAG).unwrap_or(text).trim();
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
        rest = rest[values.byte_offset()..].trim_start_matches([';', ' ', '\n', '\t', '\r']);
    }
    Some(calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(mut split: ToolSplit, text: &str, size: usize) -> (String, Vec<(String, String)>) {
        let mut out = Vec::new();
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(size) {
            split.push(&piece.iter().collect::<String>(), &mut out);
        }
        split.flush(&mut out);
        let (mut text, mut calls) = (String::new(), Vec::<(String, String)>::new());
        for delta in out {
            match delta {
                Delta::Text(more) => text += &more,
                Delta::ToolStart { name } => calls.push((name, String::new())),
                Delta::ToolArguments(more) => calls.last_mut().unwrap().1 += &more,
                Delta::Reasoning(_) => panic!("unexpected reasoning"),
            }
        }
        (text, calls)
    }

    fn calls(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(n, a)| ((*n).into(), (*a).into())).collect()
    }

    #[test]
    fn hermes_calls_for_any_piece_size() {
        let make = || ToolSplit::new(ToolFormat::Hermes, vec![]);
        let two = "Let me see. \n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n\
                   </tool_call>\n<tool_call>{\"name\":\"g\"}</tool_call>\n";
        let broken = "<tool_call>\n{\"name\": </tool_call> done";
        let open = "<tool_call>{\"name\": \"f\", \"arguments\": {}}";
        for size in 1..40 {
            assert_eq!(
                split(make(), two, size),
                ("Let me see.".into(), calls(&[("f", "{\"a\":1}"), ("g", "{}")]))
            );
            assert_eq!(split(make(), broken, size), (broken.into(), vec![]));
            assert_eq!(split(make(), open, size), (String::new(), calls(&[("f", "{}")])));
            assert_eq!(split(make(), "a < b  <tool", size), ("a < b  <tool".into(), vec![]));
        }
    }

    #[test]
    fn llama_calls_for_any_piece_size() {
        let make = || ToolSplit::new(ToolFormat::Llama, vec!["f".into(), "g".into()]);
        let json = "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"name\":\"g\"}";
        for size in 1..40 {
            assert_eq!(
                split(make(), json, size),
                (String::new(), calls(&[("f", "{\"a\":1}"), ("g", "{}")]))
            );
            assert_eq!(
                split(make(), "[f(a=1, b='x'), g()]", size),
                (String::new(), calls(&[("f", "{\"a\":1,\"b\":\"x\"}"), ("g", "{}")]))
            );
            for text in ["{\"name\": \"other\"}", "[1, 2]", "{ broken", "Hello {\"name\"", "<|py"] {
                assert_eq!(split(make(), text, size), (text.into(), vec![]));
            }
        }
    }

    #[test]
    fn forced_calls() {
        for size in [1, 7, 100] {
            let named = ToolSplit::Named { name: "f".into(), started: false };
            let found = split(named, "{\"a\": 1}", size);
            assert_eq!(found, (String::new(), calls(&[("f", "{\"a\": 1}")])));
            let list = || ToolSplit::List(CallList::default());
            let one = "{\"name\": \"f\", \"parameters\": {\"a\": {\"b\": \"}]\"}}}";
            let two = format!("[{one},\n {{\"name\": \"g\", \"parameters\": {{}}}}]");
            let both = calls(&[("f", "{\"a\":{\"b\":\"}]\"}}"), ("g", "{}")]);
            assert_eq!(split(list(), &two, size), (String::new(), both.clone()));
            // Truncated: complete calls are emitted, a partial one is not.
            assert_eq!(
                split(list(), &two[..two.len() - 3], size),
                (String::new(), both[..1].into())
            );
            assert_eq!(split(list(), &two[..20], size), (two[..20].into(), vec![]));
        }
    }

    #[test]
    fn a_list_of_calls_is_emitted_call_by_call() {
        let mut split = ToolSplit::List(CallList::default());
        let mut out = Vec::new();
        split.push("[{\"name\": \"f\", \"parameters\": {}}, {\"name\"", &mut out);
        assert_eq!(out[0], Delta::ToolStart { name: "f".into() });
        assert_eq!(out.len(), 2);
    }

    /// Answers that every splitter must hold back, in pieces of a few bytes: rescanning the held
    /// text took minutes for each of them.
    #[test]
    fn work_is_linear() {
        let hermes = || ToolSplit::new(ToolFormat::Hermes, vec![]);
        let llama = || ToolSplit::new(ToolFormat::Llama, vec!["f".into()]);
        let list = || ToolSplit::List(CallList::default());
        let million = 1 << 20;
        for (make, begin, piece) in [
            (&hermes as &dyn Fn() -> ToolSplit, "<tool_call>", "}"),
            (&hermes, "<tool_call>", "</tool_cal"),
            (&hermes, "", "<tool_cal"),
            (&hermes, "", " "),
            (&llama, "", " "),
            (&llama, "[", "{"),
            (&llama, "[f(a=", "["),
            (&list, "[{\"a\": ", "{}"),
            (&list, "[{\"name\": \"", "}"),
            (&list, "[", "}"),
            (&list, "[", "{\"a\":"),
            (&list, "", "}"),
        ] {
            let (mut split, mut out) = (make(), Vec::new());
            split.push(begin, &mut out);
            for _ in 0..million {
                split.push(piece, &mut out);
            }
            split.flush(&mut out);
            let text = out.iter().map(|delta| match delta {
                Delta::Text(text) => text.len(),
                other => panic!("{other:?}"),
            });
            let text = text.sum::<usize>();
            // White space at the end of an answer is dropped.
            let all = begin.len() + piece.len() * million;
            assert!(text == all || piece == " " && text == 0, "{begin}{piece}…: {text} of {all}");
        }
        let whole = "<tool_call>{\"name\":\"f\"}</tool_call>".repeat(50_000);
        let mut out = Vec::new();
        hermes().push(&whole, &mut out);
        assert_eq!(out.len(), 100_000);
    }

    #[test]
    fn formats_are_detected_from_templates() {
        assert_eq!(ToolFormat::detect("... <tool_call> ..."), ToolFormat::Hermes);
        assert_eq!(ToolFormat::detect("... <|python_tag|> ..."), ToolFormat::Llama);
        assert_eq!(ToolFormat::detect("{{ messages }}"), ToolFormat::None);
    }
}
