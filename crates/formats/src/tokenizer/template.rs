//! The special tokens that a post-processor puts around a text, and around two texts of a pair.

use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// A token of a pair of texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairToken {
    /// Its id.
    pub id: u32,
    /// Its kind: usually 0 in the first text and 1 in the second.
    pub kind: u32,
}

/// How many tokens of two texts are kept where there is room for `room`: as the reference cuts the longer first.
fn shares(one: usize, two: usize, room: usize) -> (usize, usize) {
    if one + two <= room {
        return (one, two);
    }
    let (short, long) = (one.min(two), one.max(two));
    let kept = short.max(room.saturating_sub(short));
    let (short, long) = match short + kept > room {
        true => (room / 2, room / 2 + room % 2),
        false => (short, kept.min(long)),
    };
    if one <= two { (short, long) } else { (long, short) }
}

/// What is put around texts.
#[derive(Clone, Debug, Default)]
pub(super) struct Template {
    /// Ids before a whole text.
    pub(super) prefix: Vec<u32>,
    /// Ids after it.
    pub(super) suffix: Vec<u32>,
    /// A pair of texts; empty if the tokenizer says nothing about pairs.
    pub(super) pair: Vec<Piece>,
}

/// A piece of a pair.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) what: What,
    /// The kind of its tokens.
    pub(super) kind: u32,
}

/// What a piece of a pair consists of.
#[derive(Clone, Debug)]
pub(super) enum What {
    First,
    Second,
    Ids(Vec<u32>),
}

impl Template {
    /// The template of a post-processor.
    pub(super) fn read(path: &Path, processor: Option<&Value>) -> Result<Template> {
        let Some(processor) = processor else { return Ok(Template::default()) };
        let refuse = |found: &str| {
            let allowed = "ByteLevel, Sequence, BertProcessing, RobertaProcessing, and one \
                           TemplateProcessing of special tokens";
            Err(Error::unsupported(path, "post_processor", found, allowed))
        };
        match processor.get("type").and_then(Value::as_str) {
            // Adjusts only offsets, which are not used here.
            Some("ByteLevel") => Ok(Template::default()),
            Some("Sequence") => {
                let steps = processor.get("processors").and_then(Value::as_array);
                let mut all = Template::default();
                for step in steps.into_iter().flatten() {
                    if step.get("type").and_then(Value::as_str) == Some("Sequence") {
                        return refuse("Sequence in Sequence");
                    }
                    let step = Template::read(path, Some(step))?;
                    all.prefix.splice(0..0, step.prefix);
                    all.suffix.extend(step.suffix);
                    if all.pair.is_empty() {
                        all.pair = step.pair;
                    }
                }
                Ok(all)
            }
            Some("TemplateProcessing") => match Template::of_pieces(processor) {
                Some(template) => Ok(template),
                None => refuse("a TemplateProcessing of another form"),
            },
            Some(kind @ ("BertProcessing" | "RobertaProcessing")) => {
                let id = |field: &str| id(processor.get(field)?.get(1)?);
                match (id("cls"), id("sep")) {
                    (Some(first), Some(last)) => {
                        Ok(Template::between(first, last, kind == "RobertaProcessing"))
                    }
                    _ => refuse("special tokens without ids"),
                }
            }
            other => refuse(other.unwrap_or("a processor without a type")),
        }
    }

    /// Texts between two tokens, with the last one behind each; `doubled` puts it before the second text, too.
    fn between(first: u32, last: u32, doubled: bool) -> Template {
        let middle = if doubled { vec![last, last] } else { vec![last] };
        let kind = u32::from(!doubled);
        let piece = |what, kind| Piece { what, kind };
        let pair = vec![
            piece(What::Ids(vec![first]), 0),
            piece(What::First, 0),
            piece(What::Ids(middle), 0),
            piece(What::Second, kind),
            piece(What::Ids(vec![last]), kind),
        ];
        Template { prefix: vec![first], suffix: vec![last], pair }
    }

    /// A pair of texts by their ids; `None` if the tokenizer says nothing about pairs. One that is longer than `most`
    /// is cut at the end of the longer text, or of both.
    pub(super) fn join(
        &self,
        first: &[u32],
        second: &[u32],
        most: usize,
    ) -> Option<Vec<PairToken>> {
        if self.pair.is_empty() {
            return None;
        }
        let special = |piece: &Piece| match &piece.what {
            What::Ids(ids) => ids.len(),
            What::First | What::Second => 0,
        };
        let room = most.saturating_sub(self.pair.iter().map(special).sum());
        let (one, two) = shares(first.len(), second.len(), room);
        let (first, second) = (&first[..one], &second[..two]);
        let mut tokens = Vec::with_capacity(most.min(first.len() + second.len() + 8));
        for Piece { what, kind } in &self.pair {
            let ids = match what {
                What::First => first,
                What::Second => second,
                What::Ids(ids) => ids,
            };
            tokens.extend(ids.iter().map(|&id| PairToken { id, kind: *kind }));
        }
        Some(tokens)
    }

    fn of_pieces(processor: &Value) -> Option<Template> {
        let pieces = |form: &str| {
            let items = processor.get(form)?.as_array()?;
            items.iter().map(|item| Piece::read(processor, item)).collect::<Option<Vec<Piece>>>()
        };
        let (mut prefix, mut suffix, mut after) = (Vec::new(), Vec::new(), false);
        for piece in pieces("single")? {
            match piece.what {
                What::Ids(ids) => if after { &mut suffix } else { &mut prefix }.extend(ids),
                What::First | What::Second => after = true,
            }
        }
        let pair = if processor.get("pair").is_some() { pieces("pair")? } else { Vec::new() };
        Some(Template { prefix, suffix, pair })
    }
}

impl Piece {
    fn read(processor: &Value, item: &Value) -> Option<Piece> {
        let (text, special) = (item.get("Sequence"), item.get("SpecialToken"));
        let kind = text.or(special)?.get("type_id").map_or(Some(0), id)?;
        let what = match (text, special) {
            (Some(text), _) if text.get("id").and_then(Value::as_str) == Some("B") => What::Second,
            (Some(_), _) => What::First,
            (None, special) => {
                let name = special?.get("id")?.as_str()?;
                let token = processor.get("special_tokens")?.get(name)?.get("ids")?.as_array()?;
                What::Ids(token.iter().map(id).collect::<Option<Vec<u32>>>()?)
            }
        };
        Some(Piece { what, kind })
    }
}

fn id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}
