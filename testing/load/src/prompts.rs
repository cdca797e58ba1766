//! The prompts of a load.

use crate::dist::{Dice, Dist};
use serde_json::{Value, json};
use std::fmt;

/// The prompts to send.
#[derive(Clone, Debug)]
pub enum Prompts {
    /// Random words, one token each approximately.
    Random {
        /// The number of words.
        input: Dist,
        /// The fraction of words (0 to 1) that is the same in every prompt.
        shared: f64,
    },
    /// Random token ids, exactly as many as drawn. For `/v1/completions` only.
    Tokens {
        /// The number of tokens.
        input: Dist,
        /// The fraction of tokens (0 to 1) that is the same in every prompt.
        shared: f64,
        /// Ids are below this.
        vocab: u32,
    },
    /// These prompts in turn: text, and optionally the most tokens of its answer.
    List(Vec<(String, Option<u32>)>),
}

impl Prompts {
    /// The prompt with this number, and the most tokens of its answer if it says so. `seed` gives the shared part.
    pub(crate) fn draw(&self, number: u64, seed: u64, dice: &mut Dice) -> (Value, Option<u32>) {
        let parts = |input: &Dist, shared: f64, dice: &mut Dice| {
            let length = input.draw(dice);
            let same = (f64::from(length) * shared) as u32;
            (same, (length - same).max(1))
        };
        match self {
            Self::Random { input, shared } => {
                let (same, own) = parts(input, *shared, dice);
                let mut text = String::new();
                words(same, &mut Dice::new(seed), &mut text);
                words(own, dice, &mut text);
                (text.into(), None)
            }
            Self::Tokens { input, shared, vocab } => {
                let (same, own) = parts(input, *shared, dice);
                let id = |dice: &mut Dice| dice.roll() % u64::from((*vocab).max(1));
                let mut common = Dice::new(seed);
                let mut ids: Vec<u64> = (0..same).map(|_| id(&mut common)).collect();
                ids.extend((0..own).map(|_| id(dice)));
                (json!(ids), None)
            }
            Self::List(list) => {
                let (text, limit) = &list[number as usize % list.len()];
                (text.as_str().into(), *limit)
            }
        }
    }
}

impl fmt::Display for Prompts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (input, unit, shared) = match self {
            Self::Random { input, shared } => (input, "words", *shared),
            Self::Tokens { input, shared, .. } => (input, "tokens", *shared),
            Self::List(list) => return write!(f, "{} prompts from a file", list.len()),
        };
        write!(f, "{input} {unit} in")?;
        if shared > 0.0 { write!(f, " ({:.0} % shared)", shared * 100.0) } else { Ok(()) }
    }
}

const WORDS: [&str; 24] = [
    "graph", "record", "replay", "slot", "bucket", "page", "token", "the", "of", "and", "a",
    "step", "device", "host", "row", "plan", "arena", "span", "seat", "with", "from", "phase",
    "prompt", "again",
];

fn words(count: u32, dice: &mut Dice, into: &mut String) {
    for _ in 0..count {
        into.push_str(WORDS[(dice.roll() % WORDS.len() as u64) as usize]);
        into.push(' ');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_prompts_have_the_length_and_the_shared_part() {
        let prompts = Prompts::Tokens { input: Dist::Fixed(40), shared: 0.25, vocab: 100 };
        let mut dice = Dice::new(7);
        let ids = |value: &Value| -> Vec<u64> {
            value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
        };
        let [a, b] = [0, 1].map(|number| ids(&prompts.draw(number, 3, &mut dice).0));
        assert_eq!((a.len(), b.len()), (40, 40));
        assert_eq!(a[..10], b[..10]);
        assert_ne!(a[10..], b[10..]);
        assert!(a.iter().chain(&b).all(|id| *id < 100));
        assert_eq!(prompts.to_string(), "40 tokens in (25 % shared)");
    }
}
