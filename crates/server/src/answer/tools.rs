//! Tool calls, whose format depends on the model family.

use super::Delta;
use super::call_list::CallList;
use super::harmony::Marks;
use super::hermes::{self, Hermes};
use super::llama::{Llama, PYTHON_TAG};
use serde_json::{Map, Value, json};
use text::{Chat, CheckpointText, TextModel};

/// The format of a model's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// Qwen and Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, text around it.
    Hermes,
    /// Llama 3: the whole answer is `{"name": …, "parameters": {…}}`, several separated by `;`, or
    /// a Python list of calls, `[f(a=1), g(b="x")]`.
    Llama,
    /// gpt-oss: messages on channels; a call is a message to a function.
    Harmony(Marks),
    /// The chat template shows no tools: the server describes them in a system message, and the
    /// calls are those of Hermes.
    Generic {
        /// Whether the template shows system messages; else the description is in the first
        /// message of the user.
        system: bool,
    },
}

impl ToolFormat {
    /// The format that a rendered template describes.
    pub fn detect(template: &str) -> Self {
        if template.contains(hermes::OPEN) {
            Self::Hermes
        } else if template.contains("python_tag") || template.contains("\"parameters\": ") {
            Self::Llama
        } else {
            Self::Generic { system: true }
        }
    }

    /// The format of a checkpoint, found by rendering its chat template with and without a tool.
    pub fn of(text: &CheckpointText) -> Self {
        let tool = json!({"type": "function", "function": {
            "name": "f", "description": "f", "parameters": {"type": "object", "properties": {}},
        }});
        let ask = |messages: Value, tools: Value| {
            let chat = Chat {
                messages,
                tools,
                generation_prompt: true,
                continue_final: false,
                extra: Map::new(),
            };
            text.render(&chat, usize::MAX).map(|rendered| rendered.text).unwrap_or_default()
        };
        let user = json!({"role": "user", "content": "x"});
        let (with, without) = (ask(json!([user]), json!([tool])), ask(json!([user]), Value::Null));
        if let Some(marks) = Marks::of(text, &with) {
            return Self::Harmony(marks);
        }
        if with == without {
            let word = "a system message";
            let shown = ask(json!([{"role": "system", "content": word}, user]), Value::Null);
            return Self::Generic { system: shown.contains(word) };
        }
        match Self::detect(&with) {
            Self::Generic { .. } if text.id_of(PYTHON_TAG).is_some() => Self::Llama,
            found => found,
        }
    }
}

/// Separates tool calls from text in a stream. The arguments of a call are emitted as they arrive.
#[derive(Clone, Debug)]
pub enum ToolSplit {
    /// No tools: everything is text.
    Off,
    /// Calls between tags.
    Hermes(Hermes),
    /// The answer is either only calls or only text.
    Llama(Llama),
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
            ToolFormat::Hermes | ToolFormat::Generic { .. } => Self::Hermes(Hermes::default()),
            ToolFormat::Llama => Self::Llama(Llama::new(names)),
            // Calls are messages, which are separated before.
            ToolFormat::Harmony(_) => Self::Off,
        }
    }

    /// Adds text and emits what is certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<Delta>) {
        if text.is_empty() {
            return;
        }
        match self {
            Self::Off => out.push(Delta::Text(text.into())),
            Self::Hermes(hermes) => hermes.push(text, out),
            Self::Llama(llama) => llama.push(text, out),
            Self::Named { name, started } => {
                if !*started {
                    out.push(Delta::ToolStart { name: name.clone() });
                    *started = true;
                }
                out.push(Delta::ToolArguments(text.into()));
            }
            Self::List(list) => list.push(text, out),
        }
    }

    /// Ends the answer. `cut`: the token limit ended it, and part of a call is not text.
    pub fn flush(&mut self, cut: bool, out: &mut Vec<Delta>) {
        match self {
            Self::Off => {}
            Self::Named { started, .. } => {
                if *started {
                    out.push(Delta::ToolEnd);
                }
            }
            Self::Hermes(hermes) => hermes.flush(cut, out),
            Self::Llama(llama) => llama.flush(cut, out),
            Self::List(list) => {
                if let Some(rest) = list.flush(out).filter(|_| !cut) {
                    out.push(Delta::Text(rest));
                }
            }
        }
    }
}

/// A call: the function's name and its arguments as JSON text.
pub(super) type ToolCall = (String, String);

pub(super) fn emit((name, arguments): ToolCall, out: &mut Vec<Delta>) {
    out.push(Delta::ToolStart { name });
    out.push(Delta::ToolArguments(arguments));
    out.push(Delta::ToolEnd);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn split(split: ToolSplit, text: &str, size: usize) -> (String, Vec<(String, String)>) {
        ended(split, text, size, false)
    }

    /// Text and calls; every call that began has an end.
    fn ended(
        mut split: ToolSplit,
        text: &str,
        size: usize,
        cut: bool,
    ) -> (String, Vec<(String, String)>) {
        let mut out = Vec::new();
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(size) {
            split.push(&piece.iter().collect::<String>(), &mut out);
        }
        split.flush(cut, &mut out);
        let (mut text, mut calls) = (String::new(), Vec::<(String, String)>::new());
        let mut open = false;
        for delta in out {
            match delta {
                Delta::Text(more) => text += &more,
                Delta::ToolStart { name } => {
                    assert!(!std::mem::replace(&mut open, true));
                    calls.push((name, String::new()));
                }
                Delta::ToolArguments(more) => {
                    assert!(open);
                    calls.last_mut().unwrap().1 += &more;
                }
                Delta::ToolEnd => assert!(std::mem::take(&mut open)),
                Delta::Reasoning(_) => panic!("unexpected reasoning"),
            }
        }
        assert!(!open);
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
                ("Let me see.".into(), calls(&[("f", "{\"a\": 1}"), ("g", "{}")]))
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
                (String::new(), calls(&[("f", "{\"a\": 1}"), ("g", "{}")]))
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
            let both = calls(&[("f", "{\"a\": {\"b\": \"}]\"}}"), ("g", "{}")]);
            assert_eq!(split(list(), &two, size), (String::new(), both.clone()));
            // Truncated: what there is of a call is emitted, and it is never text.
            let part = ended(list(), &two[..two.len() - 3], size, true);
            assert_eq!(part, (String::new(), calls(&[("f", &both[0].1), ("g", "{")])));
            assert_eq!(ended(list(), &two[..20], size, true), (String::new(), vec![]));
            assert_eq!(split(list(), "no list", size), ("no list".into(), vec![]));
        }
    }

    #[test]
    fn a_list_of_calls_is_emitted_call_by_call() {
        let mut split = ToolSplit::List(CallList::default());
        let mut out = Vec::new();
        split.push("[{\"name\": \"f\", \"parameters\": {}}, {\"name\"", &mut out);
        assert_eq!(out[0], Delta::ToolStart { name: "f".into() });
        assert_eq!(out.len(), 3);
    }

    /// Arguments are emitted as they arrive; a call that the token limit cut is not text.
    #[test]
    fn arguments_are_streamed_and_a_cut_call_is_not_text() {
        let hermes = || ToolSplit::new(ToolFormat::Hermes, vec![]);
        let llama = || ToolSplit::new(ToolFormat::Llama, vec!["f".into()]);
        let list = || ToolSplit::List(CallList::default());
        for (make, begin, cuts) in [
            (&hermes as &dyn Fn() -> ToolSplit, "Hm.\n<tool_call>\n", "Hm."),
            (&llama, "", ""),
            (&list, "[", ""),
        ] {
            let (mut split, mut out) = (make(), Vec::new());
            split.push(begin, &mut out);
            split.push("{\"name\": \"f\", \"arguments\": {\"a\": \"o", &mut out);
            let last = |out: &Vec<Delta>| out.last().cloned();
            assert_eq!(last(&out), Some(Delta::ToolArguments("{\"a\": \"o".into())));
            split.push("ne }\\\"\"", &mut out);
            assert_eq!(last(&out), Some(Delta::ToolArguments("ne }\\\"\"".into())));
            split.push("}", &mut out);
            assert_eq!(last(&out), Some(Delta::ToolArguments("}".into())));
            split.push("}", &mut out);
            assert_eq!(last(&out), Some(Delta::ToolEnd));
            for part in ["{\"na", "{\"name\": \"f", "{\"name\": \"f\", \"argu"] {
                let text = format!("{begin}{part}");
                assert_eq!(ended(make(), &text, 3, true), (cuts.into(), vec![]), "{text}");
            }
        }
        // Text that only looks like JSON is text, cut or not.
        let text = "{\"city\": \"Par";
        assert_eq!(ended(llama(), text, 3, true), (text.into(), vec![]));
        assert_eq!(ended(llama(), "[f(a=\"x", 3, true), (String::new(), vec![]));
        assert_eq!(ended(llama(), "[1, 2", 3, true), ("[1, 2".into(), vec![]));
        // The arguments before the name: known at the end of the call only.
        let turned = "<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"f\"}</tool_call>";
        assert_eq!(split_of(hermes(), turned), calls(&[("f", "{\"a\":1}")]));
        let quoted = "<tool_call>{\"name\": \"f\", \"arguments\": \"{}\"}</tool_call>";
        assert_eq!(split_of(hermes(), quoted), calls(&[("f", "{}")]));
    }

    /// A call that stops being one after its arguments: what follows does not depend on the pieces.
    #[test]
    fn broken_calls_are_the_same_for_any_piece_size() {
        let call = "{\"name\": \"f\", \"arguments\": {\"a\": \"</tool_call>\"}";
        let made = calls(&[("f", "{\"a\": \"</tool_call>\"}")]);
        let tagged = format!("<tool_call>{call}n é</tool_call> done");
        let (bare, list) = (format!("{call}né</too"), format!("[{call}n, {{"));
        for size in 1..80 {
            let hermes = ToolSplit::new(ToolFormat::Hermes, vec![]);
            assert_eq!(split(hermes, &tagged, size), (" done".into(), made.clone()), "{size}");
            let llama = ToolSplit::new(ToolFormat::Llama, vec!["f".into()]);
            assert_eq!(split(llama, &bare, size), ("né</too".into(), made.clone()), "{size}");
            let forced = ToolSplit::List(CallList::default());
            assert_eq!(split(forced, &list, size), (String::new(), made.clone()), "{size}");
        }
    }

    fn split_of(make: ToolSplit, text: &str) -> Vec<(String, String)> {
        split(make, text, 5).1
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
            split.flush(false, &mut out);
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
        assert_eq!(out.len(), 150_000);
    }

    #[test]
    fn formats_are_detected_from_templates() {
        assert_eq!(ToolFormat::detect("... <tool_call> ..."), ToolFormat::Hermes);
        assert_eq!(ToolFormat::detect("... <|python_tag|> ..."), ToolFormat::Llama);
        assert_eq!(ToolFormat::detect("{{ messages }}"), ToolFormat::Generic { system: true });
    }
}
