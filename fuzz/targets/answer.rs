//! Any text as an answer, in pieces and at once: stop strings, reasoning, tool calls and messages on channels are the
//! same, and other text is unchanged.
#![no_main]

use libfuzzer_sys::fuzz_target;
use server::answer::{
    Delta, HarmonySplit, Mark, Marks, Reasoning, ReasoningSplit, ToolFormat, ToolSplit,
};
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

/// Messages on channels: the first characters of Unicode stand for marks.
fn messages(text: &str, size: usize) -> (String, String, Vec<String>) {
    const MARKS: [Mark; 7] = [
        Mark::Start,
        Mark::Channel,
        Mark::Constrain,
        Mark::Message,
        Mark::End,
        Mark::Call,
        Mark::Return,
    ];
    let marks = Marks::find(|spelling| Some(spelling.len() as u32)).expect("every spelling has a token");
    let mut split = HarmonySplit::new(marks, "", true);
    let (mut out, mut said, mut ended) = (Vec::new(), String::new(), false);
    for part in text.split_inclusive(|c: char| (c as usize) < MARKS.len()) {
        let mark = part.chars().next_back().and_then(|c| MARKS.get(c as usize).copied());
        let words = if mark.is_some() { &part[..part.len() - 1] } else { part };
        for piece in pieces(words, size) {
            said += &split.text(&piece, &mut out);
        }
        ended = mark.is_some_and(|mark| split.mark(mark, &mut out));
        if ended {
            break;
        }
    }
    if !ended {
        said += &split.flush(&mut out);
    }
    let (mut thought, mut calls) = (String::new(), Vec::new());
    for delta in out {
        match delta {
            Delta::Text(text) => panic!("text is returned: {text}"),
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
    assert_eq!(messages(text, size), messages(text, usize::MAX));
    let said = stop(text, word, size);
    assert!(text.starts_with(&said));
    if !word.is_empty() {
        assert_eq!(said, text.split(word).next().unwrap_or(""));
    }
});
