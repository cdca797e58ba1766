//! The thought before an answer, and its budget.
//!
//! A thought without a grammar needs nothing from the host until its budget is used up: until then
//! rows run ahead and launches have several steps, as if the answer ended there
//! ([`Sequence::max_len`]). Only then are its tokens looked at. With a grammar each token is looked at
//! when it comes, because the grammar begins after the closing tag.

use crate::plant::{Plant, planted};
use crate::request::{Thinking, Token};
use crate::sequence::Sequence;
use grammar::{Mask, MaskError, Matcher};

/// Most tokens before the opening tag: models write white space there.
const LEAD: u32 = 4;

/// Where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Thought {
    /// The opening tag may come; the first `seen` tokens have been looked at.
    Before { seen: u32 },
    /// The opening tag is forced.
    Opening,
    /// Inside since position `from`; the first `seen` tokens have been looked at.
    Inside { from: u32, seen: u32 },
    /// The closing tag is forced; so many of its tokens are there.
    Closing { written: u32 },
    /// There is none, or it has ended.
    Over,
}

impl Sequence {
    /// Sets where a new sequence stands.
    pub(crate) fn begin_thought(&mut self) {
        let spec = self.cold.spec.clone();
        let Some(thinking) = &spec.sampling.thinking else { return };
        let len = self.len();
        self.cold.thought = match (thinking.open.is_empty(), self.cold.matcher.is_some()) {
            (true, _) => Thought::Inside { from: len, seen: len },
            (false, true) => Thought::Opening,
            (false, false) => Thought::Before { seen: len },
        };
        self.think();
    }

    /// Looks at the tokens that came since the last time.
    pub(crate) fn think(&mut self) {
        if self.cold.thought == Thought::Over {
            return;
        }
        let spec = self.cold.spec.clone();
        let Some(thinking) = &spec.sampling.thinking else { return };
        self.follow(thinking);
        if let Thought::Inside { from, .. } = self.cold.thought
            && self.len() - from >= thinking.budget
            && !planted(Plant::ThinkOn)
        {
            let inside = &self.tokens[from as usize..];
            let written = begun(inside, &thinking.close);
            self.cold.thought = Thought::Closing { written };
        }
        let free = self.cold.matcher.is_none();
        (self.guided, self.max_len) = match self.cold.thought {
            // The tag may be complete with the next token.
            Thought::Before { .. } => (false, self.len().saturating_add(thinking.budget) + 1),
            Thought::Inside { from, .. } if free => (false, from.saturating_add(thinking.budget)),
            Thought::Opening | Thought::Inside { .. } | Thought::Closing { .. } => (true, u32::MAX),
            Thought::Over => (!free, u32::MAX),
        };
        self.max_len = self.max_len.min(self.cold.limit);
    }

    fn follow(&mut self, Thinking { open, close, .. }: &Thinking) {
        let answer = self.prompt_len as usize;
        let len = self.len();
        if let Thought::Before { seen } = self.cold.thought {
            let ends = |end: &u32| self.tokens[answer..*end as usize].ends_with(open);
            let last = self.prompt_len + LEAD + open.len() as u32;
            self.cold.thought = match (seen + 1..=len.min(last)).find(ends) {
                Some(from) => Thought::Inside { from, seen: from },
                None if len >= last => Thought::Over,
                None => Thought::Before { seen: len },
            };
        }
        self.cold.thought = match self.cold.thought {
            Thought::Opening if self.answer_len() >= open.len() as u32 => {
                Thought::Inside { from: len, seen: len }
            }
            Thought::Inside { from, seen } => {
                let inside = &self.tokens[from as usize..];
                let ends = |end: &u32| inside[..(end - from) as usize].ends_with(close);
                match (seen + 1..=len).any(|end| ends(&end)) {
                    true => Thought::Over,
                    false => Thought::Inside { from, seen: len },
                }
            }
            Thought::Closing { written } => match written + 1 {
                all if all == close.len() as u32 => Thought::Over,
                written => Thought::Closing { written },
            },
            other => other,
        };
    }

    /// The matcher, if its grammar applies to the next token.
    pub(crate) fn matcher(&mut self) -> Option<&mut Matcher> {
        if !self.guided || self.cold.thought != Thought::Over {
            return None;
        }
        self.cold.matcher.as_mut()
    }

    /// The tokens allowed next.
    pub(crate) fn mask(&mut self, vocab: u32) -> Result<Mask, MaskError> {
        let spec = self.cold.spec.clone();
        let words = vocab.div_ceil(32) as usize;
        let only = |token: Token| {
            let mut mask = vec![0; words];
            mask[token as usize / 32] |= 1 << (token % 32);
            Mask { words: mask, cost: 1 }
        };
        let tags = spec.sampling.thinking.as_ref();
        Ok(match (self.cold.thought, tags) {
            (Thought::Opening, Some(tags)) => only(tags.open[self.answer_len() as usize]),
            (Thought::Closing { written }, Some(tags)) => only(tags.close[written as usize]),
            (Thought::Inside { .. }, Some(tags)) => {
                // An answer that ended here would lack what the grammar asks for.
                let mut mask = vec![u32::MAX; words];
                for token in spec.stops.iter().filter(|token| !tags.close.contains(token)) {
                    mask[*token as usize / 32] &= !(1 << (token % 32));
                }
                Mask { words: mask, cost: 1 }
            }
            _ => match &mut self.cold.matcher {
                Some(matcher) => matcher.mask()?,
                None => Mask { words: vec![u32::MAX; words], cost: 1 },
            },
        })
    }
}

/// How many tokens of `tag` the end of a text already has, without the last.
fn begun(text: &[Token], tag: &[Token]) -> u32 {
    let most = text.len().min(tag.len() - 1);
    (0..=most).rev().find(|&count| text.ends_with(&tag[..count])).unwrap_or(0) as u32
}
