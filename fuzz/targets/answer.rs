//! Any text as an answer, in pieces and at once: stop strings, reasoning and tool calls are the
//! same, and other text is unchanged.
#![no_main]

use libfuzzer_sys::fuzz_target;
use server::answer::{Delta, Reasoning, ReasoningSplit, ToolFormat, ToolSplit};
use text::StopFinder;

fn pieces(text: &str, size: usize) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    chars.chunks(size).map(|piece| piece.iter().collect()).collect()
}

/// Text, reasoning and calls.
fn split(text: &str, format: ToolFormat, size: usize) -> (String, String, Vec<String>) {
    let mut out = Vec::new();
    let marks = Reasoning { open: "<think>".into(), close: "</think>".into() };
    let mut thinking = ReasoningSplit::new(marks, false);
    let mut tools = ToolSplit::new(format, vec!["f".into()]);
    for piece in pieces(text, size) {
        let answer = thinking.push(&piece, &mut out);
        tools.push(&answer, &mut out);
    }
    let answer = thinking.flush(&mut out);
    tools.push(&answer, &mut out);
    tools.flush(false, &mut out);
    let (mut said, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
    for delta in out {
        match delta {
            Delta::Text(text) => said += &text,
            Delta::Reasoning(text) => thought += &text,
            Delta::ToolStart { name } => calls.extend([name, String::new()]),
            Delta::ToolArguments(text) => *calls.last_mut().expect("a call began") += &text,
            Delta::ToolEnd => calls.push("end".into()),
        }
    }
    (said, thought, calls)
}

fn stop(text: &str, stop: &str, size: usize) -> String {
    let (mut finder, mut out) = (StopFinder::new(vec![stop.into()]), String::new());
    for piece in pieces(text, size) {
        if finder.push(&piece, &mut out) {
            return out;
        }
    }
    finder.flush(&mut out);
    out
}

fuzz_target!(|input: (u8, &str, &str)| {
    let (size, word, text) = input;
    let size = usize::from(size).max(1);
    for format in [ToolFormat::Hermes, ToolFormat::Llama, ToolFormat::Generic { system: true }] {
        assert_eq!(split(text, format, size), split(text, format, usize::MAX));
    }
    let said = stop(text, word, size);
    assert!(text.starts_with(&said));
    if !word.is_empty() {
        assert_eq!(said, text.split(word).next().unwrap_or(""));
    }
});
