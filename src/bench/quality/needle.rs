//! The needle test: numbers hidden in a long text, asked for at its end.
//!
//! All keys are hidden in one text, each for another town, so that it is read once. A key counts as found when each of its
//! tokens is the likeliest after the question and the tokens before it: then a greedy answer is the key.

use super::{Pair, Side};
use crate::exit::bad_input;
use crate::output::say;
use crate::progress;
use anyhow::Result;
use engine::request::Token;
use formats::tokenizer::Tokenizer;
use indicatif::ProgressBar;
use model::Reading;
use model::quality::likeliest;
use serde::Serialize;

const TOWNS: [&str; 40] = [
    "Lisbon", "Oslo", "Cairo", "Lima", "Madrid", "Dublin", "Warsaw", "Athens", "Havana", "Nairobi",
    "Vienna", "Prague", "Tokyo", "Delhi", "Quito", "Rome", "Berlin", "Paris", "London", "Moscow",
    "Sydney", "Boston", "Chicago", "Denver", "Toronto", "Seoul", "Bangkok", "Jakarta", "Manila",
    "Hanoi", "Geneva", "Milan", "Naples", "Zurich", "Munich", "Hamburg", "Dallas", "Houston",
    "Seattle", "Phoenix",
];
/// Most keys.
pub(super) const MOST: i64 = TOWNS.len() as i64;

/// A number that is hidden.
#[derive(Debug)]
struct Key {
    sentence: Vec<Token>,
    /// The question and the beginning of the answer.
    question: Vec<Token>,
    answer: Vec<Token>,
    /// Its place in the text, from 0 to 1.
    depth: f64,
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figure {
    measured: Side,
    reference: Side,
    /// Tokens of the text.
    context: usize,
    /// The share of keys that were found.
    found: f64,
    reference_found: f64,
    /// The share of the keys' tokens that were likeliest.
    tokens_found: f64,
    reference_tokens_found: f64,
    keys: Vec<Found>,
}

/// How a key was found.
#[derive(Clone, Copy, Debug, Serialize)]
struct Found {
    depth: f64,
    /// Tokens of the key, and of these the ones that were likeliest.
    tokens: usize,
    measured: usize,
    reference: usize,
}

impl Key {
    /// Numbers that no text repeats: multiples of a prime, modulo another.
    fn new(tokenizer: &Tokenizer, index: usize, of: usize) -> Result<Key> {
        let (town, number) = (TOWNS[index], 10_000 + (index + 1) * 48_611 % 89_989);
        let stem = format!("The secret number of {town} is");
        let question =
            format!("\n\nQuestion: What is the secret number of {town}?\nAnswer: {stem}");
        let sentence = tokenizer.encode_text(&format!(" {stem} {number}."), false)?;
        let asked = tokenizer.encode_text(&question, false)?;
        let answered = tokenizer.encode_text(&format!("{question} {number}"), false)?;
        let same = asked.iter().zip(&answered).take_while(|(a, b)| a == b).count();
        let (question, answer) = answered.split_at(same);
        let depth = (index as f64 + 0.5) / of as f64;
        Ok(Key { sentence, question: question.to_vec(), answer: answer.to_vec(), depth })
    }

    fn len(&self) -> usize {
        self.question.len() + self.answer.len()
    }
}

/// The text with all keys, repeated to fill `room` tokens.
fn haystack(tokenizer: &Tokenizer, text: &str, keys: &[Key], room: usize) -> Result<Vec<Token>> {
    let sentences = text.split_inclusive(['.', '?', '!']).map(str::trim).filter(|s| !s.is_empty());
    let encode = |sentence: &str| tokenizer.encode_text(&format!(" {sentence}"), false);
    let sentences: Vec<Vec<Token>> = sentences.map(encode).collect::<Result<_, _>>()?;
    let longest = sentences.iter().map(Vec::len).max().unwrap_or(0);
    let needles: usize = keys.iter().map(|key| key.sentence.len()).sum();
    let mut tokens = tokenizer.encode_text("", true)?;
    if longest == 0 || room < tokens.len() + needles + longest * keys.len() {
        return Err(bad_input(format!("--context is too small to hide {} keys", keys.len())));
    }
    let mut hidden = keys.iter().peekable();
    for sentence in sentences.iter().cycle() {
        while let Some(key) = hidden.next_if(|key| tokens.len() as f64 >= key.depth * room as f64) {
            tokens.extend(&key.sentence);
        }
        let left: usize = hidden.clone().map(|key| key.sentence.len()).sum();
        if tokens.len() + sentence.len() + left > room {
            break;
        }
        tokens.extend(sentence);
    }
    tokens.extend(hidden.flat_map(|key| &key.sentence));
    Ok(tokens)
}

/// For each key the number of its tokens that the model finds likeliest.
fn search(
    reading: &mut Reading<'_>,
    hay: &[Token],
    keys: &[Key],
    bar: &ProgressBar,
) -> Result<Vec<usize>> {
    reading.rewind(0);
    for some in hay.chunks(reading.most() as usize) {
        reading.feed(some)?;
        bar.inc(some.len() as u64);
    }
    let mut found = Vec::with_capacity(keys.len());
    for key in keys {
        reading.rewind(hay.len() as u32);
        let (last, before) = key.question.split_last().expect("a question has tokens");
        reading.feed_all(before)?;
        // Each token is predicted from the one before it.
        let end: Vec<Token> = [&[*last], &key.answer[..key.answer.len() - 1]].concat();
        reading.feed(&end)?;
        let logits = reading.logits()?.read(0, end.len() as u32)?;
        let rows = logits.chunks_exact(logits.len() / end.len());
        found.push(rows.zip(&key.answer).filter(|(row, token)| likeliest(row) == **token).count());
        bar.inc(key.len() as u64);
    }
    Ok(found)
}

/// Hides `count` keys in `context` tokens and asks both models for each.
pub(super) fn measure(pair: &mut Pair, text: &str, context: u32, count: u32) -> Result<Figure> {
    let tokenizer = pair.tokenizer()?;
    let keys = (0..count as usize).map(|index| Key::new(tokenizer, index, count as usize));
    let keys: Vec<Key> = keys.collect::<Result<_>>()?;
    let asked = keys.iter().map(Key::len).max().unwrap_or(0);
    let room = (context as usize).saturating_sub(asked);
    let hay = haystack(tokenizer, text, &keys, room)?;
    let total = 2 * (hay.len() + keys.iter().map(Key::len).sum::<usize>());
    let bar = progress::count(total as u64, "tokens");
    let measured = search(&mut Reading::new(&mut pair.measured.executor), &hay, &keys, &bar)?;
    let reference = search(&mut Reading::new(&mut pair.reference.executor), &hay, &keys, &bar)?;
    bar.finish_and_clear();
    let found = keys.iter().zip(measured.iter().zip(&reference));
    let found = found.map(|(key, (&measured, &reference))| Found {
        depth: key.depth,
        tokens: key.answer.len(),
        measured,
        reference,
    });
    let [ours, theirs] = pair.sides.clone();
    Ok(Figure::of(ours, theirs, hay.len(), found.collect()))
}

impl Figure {
    fn of(measured: Side, reference: Side, context: usize, keys: Vec<Found>) -> Figure {
        let count = keys.len().max(1) as f64;
        let tokens = keys.iter().map(|key| key.tokens).sum::<usize>().max(1) as f64;
        let whole = |of: fn(&Found) -> usize| {
            keys.iter().filter(|key| of(key) == key.tokens).count() as f64 / count
        };
        let single = |of: fn(&Found) -> usize| keys.iter().map(of).sum::<usize>() as f64 / tokens;
        Figure {
            measured,
            reference,
            context,
            found: whole(|key| key.measured),
            reference_found: whole(|key| key.reference),
            tokens_found: single(|key| key.measured),
            reference_tokens_found: single(|key| key.reference),
            keys,
        }
    }

    pub(super) fn print(&self) -> Result<()> {
        say!("{} keys in {} tokens", self.keys.len(), self.context)?;
        say!(
            "model                                weights MB  found %  tokens %  missed at depth %"
        )?;
        type Of = fn(&Found) -> usize;
        let sides: [(&Side, f64, f64, Of); 2] = [
            (&self.measured, self.found, self.tokens_found, |key| key.measured),
            (&self.reference, self.reference_found, self.reference_tokens_found, |key| {
                key.reference
            }),
        ];
        for (side, found, tokens, of) in sides {
            let missed = self.keys.iter().filter(|key| of(key) < key.tokens);
            let missed: Vec<String> =
                missed.map(|key| format!("{:.0}", key.depth * 100.0)).collect();
            let (name, megabytes) = (&side.name, side.weights as f64 * 1e-6);
            let (found, tokens, missed) = (found * 100.0, tokens * 100.0, missed.join(" "));
            say!("{name:<36} {megabytes:>10.1} {found:>8.1} {tokens:>9.1}  {missed}")?;
        }
        say!("points {:+.1}", (self.found - self.reference_found) * 100.0)?;
        Ok(())
    }
}
