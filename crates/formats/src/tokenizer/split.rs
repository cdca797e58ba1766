//! Cuts a text into words, each of which is merged on its own.
//!
//! Words come out one after the other and are never all in memory.

use super::effort::Effort;
use super::expression::{Expression, Part};
use crate::Result;
use serde::Deserialize;
use std::path::Path;
use std::sync::LazyLock;
use unicode_categories::UnicodeCategories;

/// What becomes of a match.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub(super) enum Behaviour {
    Removed,
    Isolated,
    MergedWithPrevious,
    MergedWithNext,
    Contiguous,
}

/// When a text gets a leading space mark that is not in it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(super) enum Prepend {
    First,
    Never,
    Always,
}

#[derive(Debug)]
pub(super) enum Step {
    Split { at: Expression, behaviour: Behaviour, invert: bool },
    Chars { at: fn(char) -> bool, behaviour: Behaviour },
    ByteLevel { add_prefix_space: bool, words: bool },
    Metaspace { mark: char, prepend: Prepend, split: bool },
}

impl Step {
    pub(super) fn digits(individual: bool) -> Self {
        let behaviour = if individual { Behaviour::Isolated } else { Behaviour::Contiguous };
        Self::Chars { at: char::is_numeric, behaviour }
    }

    pub(super) fn punctuation(behaviour: Behaviour) -> Self {
        Self::Chars { at: |c| c.is_ascii_punctuation() || c.is_punctuation(), behaviour }
    }

    /// What is between spaces.
    pub(super) fn spaces() -> Self {
        Self::Chars { at: char::is_whitespace, behaviour: Behaviour::Removed }
    }

    /// Words and runs of other characters, without what is between.
    pub(super) fn whitespace() -> Result<Self> {
        let at = Expression::new(Path::new("Whitespace"), "pattern", r"\w+|[^\w\s]+")?;
        Ok(Self::Split { at, behaviour: Behaviour::Removed, invert: true })
    }
}

/// GPT-2's words.
static WORDS: LazyLock<Expression> = LazyLock::new(|| {
    let words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
    Expression::new(Path::new("ByteLevel"), "pattern", words).expect("the expression is constant")
});

/// GPT-2's alphabet: the character that stands for each byte.
pub(super) static ALPHABET: LazyLock<[char; 256]> = LazyLock::new(|| {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut others = (0x100..).filter_map(char::from_u32);
    std::array::from_fn(|byte| match byte as u8 {
        byte if printable(byte) => char::from(byte),
        _ => others.next().expect("there are more characters than bytes"),
    })
});

/// A chain of steps, each of which cuts what the one before left whole.
#[derive(Debug, Default)]
pub(super) struct PreTokenizer(pub(super) Vec<Step>);

/// What takes the words.
pub(super) type Sink<'a> = dyn FnMut(&mut Effort, &str) -> Result<()> + 'a;

impl PreTokenizer {
    /// Calls `sink` with every word of `text`. `first` if it is the beginning of the whole text.
    pub(super) fn words(
        &self,
        text: &str,
        first: bool,
        effort: &mut Effort,
        sink: &mut Sink,
    ) -> Result<()> {
        run(&self.0, text, first, effort, sink)
    }

    /// Whether every byte of a text is in some word.
    pub(super) fn keeps_all(&self) -> bool {
        let removes = |step: &Step| {
            matches!(
                step,
                Step::Split { behaviour: Behaviour::Removed, .. }
                    | Step::Chars { behaviour: Behaviour::Removed, .. }
            )
        };
        !self.0.iter().any(removes)
    }

    /// Whether words are written in GPT-2's alphabet.
    pub(super) fn is_byte_level(&self) -> bool {
        self.0.iter().any(|step| matches!(step, Step::ByteLevel { .. }))
    }
}

fn run(
    steps: &[Step],
    text: &str,
    first: bool,
    effort: &mut Effort,
    sink: &mut Sink,
) -> Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let Some((step, rest)) = steps.split_first() else { return sink(effort, text) };
    match step {
        Step::Split { at, behaviour, invert } => {
            let mut gather = Gather::new(*behaviour);
            at.parts(text, effort, |effort, part| {
                let part = Part { is_match: part.is_match != *invert, ..part };
                gather.push(part, &mut |start, end| {
                    run(rest, &text[start..end], first && start == 0, effort, sink)
                })
            })?;
            gather.finish(&mut |start, end| {
                run(rest, &text[start..end], first && start == 0, effort, sink)
            })
        }
        Step::Chars { at, behaviour } => {
            let mut gather = Gather::new(*behaviour);
            let mut emit = |start: usize, end: usize| {
                run(rest, &text[start..end], first && start == 0, effort, sink)
            };
            let mut done = 0;
            for (start, c) in text.char_indices().filter(|&(_, c)| at(c)) {
                let end = start + c.len_utf8();
                if done < start {
                    gather.push(Part { start: done, end: start, is_match: false }, &mut emit)?;
                }
                gather.push(Part { start, end, is_match: true }, &mut emit)?;
                done = end;
            }
            if done < text.len() {
                let part = Part { start: done, end: text.len(), is_match: false };
                gather.push(part, &mut emit)?;
            }
            gather.finish(&mut emit)
        }
        Step::ByteLevel { add_prefix_space, words } => {
            let spaced;
            let text = if *add_prefix_space && !text.starts_with(' ') {
                spaced = format!(" {text}");
                &spaced
            } else {
                text
            };
            let mut spelled = String::new();
            let mut spell = |effort: &mut Effort, start: usize, end: usize| {
                spelled.clear();
                spelled.extend(text[start..end].bytes().map(|byte| ALPHABET[usize::from(byte)]));
                run(rest, &spelled, first && start == 0, effort, sink)
            };
            if *words {
                WORDS.parts(text, effort, |effort, part| spell(effort, part.start, part.end))
            } else {
                spell(effort, 0, text.len())
            }
        }
        Step::Metaspace { mark, prepend, split } => {
            let mut marked = String::with_capacity(text.len() + 4);
            let prefix = match prepend {
                Prepend::Always => true,
                Prepend::First => first,
                Prepend::Never => false,
            };
            if prefix && !text.starts_with([' ', *mark]) {
                marked.push(*mark);
            }
            marked.extend(text.chars().map(|c| if c == ' ' { *mark } else { c }));
            if !*split {
                return run(rest, &marked, first, effort, sink);
            }
            let mut start = 0;
            for (at, _) in marked.match_indices(*mark).filter(|&(at, _)| at > 0) {
                run(rest, &marked[start..at], first && start == 0, effort, sink)?;
                start = at;
            }
            run(rest, &marked[start..], first && start == 0, effort, sink)
        }
    }
}

/// Combines matches and gaps according to a [`Behaviour`].
struct Gather {
    behaviour: Behaviour,
    last_matched: bool,
    /// What the next part may be joined to.
    open: Option<(usize, usize)>,
}

type Emit<'a> = dyn FnMut(usize, usize) -> Result<()> + 'a;

impl Gather {
    fn new(behaviour: Behaviour) -> Self {
        Self { behaviour, last_matched: false, open: None }
    }

    fn push(&mut self, part: Part, emit: &mut Emit) -> Result<()> {
        let Part { start, end, is_match } = part;
        let joins = match self.behaviour {
            Behaviour::Isolated => return emit(start, end),
            Behaviour::Removed if is_match => return Ok(()),
            Behaviour::Removed => return emit(start, end),
            Behaviour::Contiguous => is_match == self.last_matched,
            Behaviour::MergedWithPrevious => is_match && !self.last_matched,
            Behaviour::MergedWithNext => !is_match && self.last_matched,
        };
        self.last_matched = is_match;
        match &mut self.open {
            Some(open) if joins => open.1 = end,
            open => {
                if let Some((start, end)) = open.replace((start, end)) {
                    emit(start, end)?;
                }
            }
        }
        Ok(())
    }

    fn finish(mut self, emit: &mut Emit) -> Result<()> {
        self.open.take().map_or(Ok(()), |(start, end)| emit(start, end))
    }
}
