//! Text operations of filters and methods. Each result is charged to the budget while it is made.

use super::args::{self, Args};
use super::budget::Budget;
use super::fault::{Fault, Outcome};
use super::python;
use super::value::{Builder, Value};

/// Replaces the first `count` parts, or all.
pub(super) fn replace(budget: &Budget, text: &str, args: Args) -> Outcome<Value> {
    let [old, new, count] = args.bind("replace", ["old", "new", "count"])?;
    let spelled = |value: Option<Value>| {
        let mut text = Builder::new(budget)?;
        python::write_str(&mut text, &value.unwrap_or(Value::Undefined))?;
        Ok::<_, Fault>(text)
    };
    let (old, new) = (spelled(old)?, spelled(new)?);
    let count = match count {
        None | Some(Value::None) => -1,
        Some(count) => args::int("replace", &count)?,
    };
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    budget.work(text.len())?;
    let mut out = Builder::new(budget)?;
    let mut done = 0;
    for (at, part) in text.match_indices(old.as_str()).take(count) {
        out.push(&text[done..at])?;
        out.push(new.as_str())?;
        done = at + part.len();
    }
    out.push(&text[done..])?;
    Ok(out.finish())
}

/// The texts of `items` with `between` between them.
pub(super) fn join(budget: &Budget, between: &str, items: &[Value]) -> Outcome<Value> {
    let mut out = Builder::new(budget)?;
    for (i, item) in items.iter().enumerate() {
        budget.step()?;
        if i > 0 {
            out.push(between)?;
        }
        python::write_str(&mut out, item)?;
    }
    Ok(out.finish())
}

/// Splits at a separator, or at spaces, from either end.
pub(super) fn split(budget: &Budget, text: &str, from_end: bool, args: Args) -> Outcome<Value> {
    let [separator, most] = args.bind("split", ["sep", "maxsplit"])?;
    let most = match most {
        None | Some(Value::None) => usize::MAX,
        Some(most) => usize::try_from(args::int("split", &most)?).unwrap_or(usize::MAX),
    };
    let mut parts = Parts::new(budget)?;
    let pieces = most.saturating_add(1);
    match separator {
        None | Some(Value::None) => {
            let mut rest = text;
            for _ in 0..most {
                rest = if from_end { rest.trim_end() } else { rest.trim_start() };
                let cut = if from_end {
                    rest.rfind(char::is_whitespace)
                } else {
                    rest.find(char::is_whitespace)
                };
                let Some(at) = cut else { break };
                let space = rest[at..].chars().next().map_or(1, char::len_utf8);
                let (before, after) = (&rest[..at], &rest[at + space..]);
                parts.push(if from_end { after } else { before })?;
                rest = if from_end { before } else { after };
            }
            let rest = if from_end { rest.trim_end() } else { rest.trim_start() };
            // Without a limit there are no spaces left at the other end either.
            if !rest.trim().is_empty() {
                parts.push(rest)?;
            }
        }
        Some(separator) => {
            let separator = args::text("split", &separator)?;
            if separator.is_empty() {
                return Err(Fault::new("split: found an empty separator"));
            }
            if from_end {
                text.rsplitn(pieces, &*separator).try_for_each(|part| parts.push(part))?;
            } else {
                text.splitn(pieces, &*separator).try_for_each(|part| parts.push(part))?;
            }
        }
    }
    parts.finish(from_end)
}

/// What ends a line in Python; `\r\n` is one end.
const LINE_ENDS: [char; 10] =
    ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];

/// The lines of a text, each with its end.
fn split_lines(mut text: &str) -> impl Iterator<Item = (&str, &str)> {
    std::iter::from_fn(move || {
        let (line, rest) = text.split_at(text.find(LINE_ENDS).unwrap_or(text.len()));
        let first = rest.chars().next().map_or(0, char::len_utf8);
        let (end, rest) = rest.split_at(if rest.starts_with("\r\n") { 2 } else { first });
        let over = text.is_empty();
        text = rest;
        (!over).then_some((line, end))
    })
}

/// The lines of a text, with their ends if so wanted.
pub(super) fn lines(budget: &Budget, text: &str, args: Args) -> Outcome<Value> {
    let [keep_ends] = args.bind("splitlines", ["keepends"])?;
    let keep_ends = keep_ends.is_some_and(|keep| keep.is_true());
    let mut parts = Parts::new(budget)?;
    let mut at = 0;
    for (line, end) in split_lines(text) {
        let whole = &text[at..at + line.len() + end.len()];
        at += whole.len();
        parts.push(if keep_ends { whole } else { line })?;
    }
    parts.finish(false)
}

/// A list of texts that is being made.
struct Parts<'b> {
    budget: &'b Budget,
    parts: Vec<Value>,
}

impl<'b> Parts<'b> {
    fn new(budget: &'b Budget) -> Outcome<Self> {
        Ok(Self { budget, parts: Vec::new() })
    }

    fn push(&mut self, part: &str) -> Outcome<()> {
        self.parts.push(Value::text(self.budget, part)?);
        Ok(())
    }

    fn finish(mut self, reversed: bool) -> Outcome<Value> {
        if reversed {
            self.parts.reverse();
        }
        Value::list(self.budget, self.parts)
    }
}

/// Takes spaces, or `chars`, off either side.
pub(super) fn strip(
    budget: &Budget,
    text: &str,
    chars: Option<&Value>,
    (left, right): (bool, bool),
) -> Outcome<Value> {
    let mut rest = text;
    match chars {
        None | Some(Value::None | Value::Undefined) => {
            rest = if left { rest.trim_start() } else { rest };
            rest = if right { rest.trim_end() } else { rest };
        }
        Some(chars) => {
            let chars = args::text("strip", chars)?;
            budget.work(text.len().saturating_mul(chars.len().max(1)))?;
            rest = if left { rest.trim_start_matches(|c| chars.contains(c)) } else { rest };
            rest = if right { rest.trim_end_matches(|c| chars.contains(c)) } else { rest };
        }
    }
    Value::text(budget, rest)
}

/// Puts spaces before lines: all but the first, and all that are not blank, unless told otherwise.
pub(super) fn indent(budget: &Budget, text: &str, args: Args) -> Outcome<Value> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"])?;
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let (first, blank) = (is_true(first), is_true(blank));
    let mut prefix = Builder::new(budget)?;
    match width {
        Some(Value::Str(text)) => prefix.push(&text)?,
        width => {
            let width = width.map_or(Ok(4), |width| args::int("indent", &width))?;
            let mut left = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
            while left > 0 {
                let spaces = "                                ";
                let some = left.min(spaces.len());
                prefix.push(&spaces[..some])?;
                left -= some;
            }
        }
    }
    // Jinja splits the text with a `\n` after it, so that a last end of a line stays; an `\r` becomes a part of that.
    let ended = text.is_empty() || (text.ends_with(LINE_ENDS) && !text.ends_with('\r'));
    let lines = split_lines(text).map(|(line, _)| line).chain(ended.then_some(""));
    let mut out = Builder::new(budget)?;
    for (i, line) in lines.enumerate() {
        if i > 0 {
            out.push("\n")?;
        }
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push(prefix.as_str())?;
        }
        out.push(line)?;
    }
    Ok(out.finish())
}
