//! The rows of a prefill step: prompts, chunks in the middle of a context, decoding sequences.

use crate::exit::bad_input;
use crate::numbers::{SEQUENCES, TOKENS, TOKENS_BEFORE};
use anyhow::Result;
use std::ops::RangeInclusive;

/// The rows of one step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Mix {
    /// The text it was parsed from.
    pub(crate) name: String,
    /// Tokens of each row, and of its sequence before the step.
    pub(crate) rows: Vec<(u32, u32)>,
}

impl Mix {
    /// `16x512`, `1x4096+64x1@2000`, `random`, `random:4096`; `context` is the default for parts
    /// without one.
    pub(crate) fn parse(text: &str, context: u32) -> Result<Mix> {
        let rows = match text.strip_prefix("random") {
            Some("") => random(2048, context),
            Some(rest) => {
                let tokens = rest.strip_prefix(':').and_then(|n| n.parse().ok());
                let wrong = || bad_input(format!("{text}: expected random or random:TOKENS"));
                random(tokens.filter(within(&TOKENS)).ok_or_else(wrong)?, context)
            }
            None => {
                let mut rows = Vec::new();
                for part in text.split('+') {
                    rows.extend(repeated(part, context)?);
                }
                rows
            }
        };
        let tokens: i64 = rows.iter().map(|row| i64::from(row.0)).sum();
        if !SEQUENCES.contains(&(rows.len() as i64)) || !TOKENS.contains(&tokens) {
            let (rows, most) = (SEQUENCES.end(), TOKENS.end());
            let text = format!("{text}: a step has at most {rows} rows and {most} tokens");
            return Err(bad_input(text));
        }
        Ok(Mix { name: text.into(), rows })
    }

    /// Tokens of the step.
    pub(crate) fn tokens(&self) -> u32 {
        self.rows.iter().map(|row| row.0).sum()
    }

    /// The same mix with its longest row extended so that the step has `tokens` tokens.
    pub(crate) fn filled(&self, tokens: u32) -> Mix {
        let mut filled = self.clone();
        let more = tokens.saturating_sub(self.tokens());
        if let Some(longest) = filled.rows.iter_mut().max_by_key(|row| row.0) {
            longest.0 += more;
        }
        filled
    }
}

fn repeated(part: &str, context: u32) -> Result<Vec<(u32, u32)>> {
    let wrong = || {
        let (rows, tokens) = (SEQUENCES.end(), TOKENS.end());
        bad_input(format!(
            "{part}: expected PROMPTSxTOKENS or PROMPTSxTOKENS@CONTEXT, with 1 to {rows} prompts and \
             up to {tokens} tokens"
        ))
    };
    let (shape, before) = match part.split_once('@') {
        Some((shape, before)) => {
            let before = before.parse().ok().filter(within(&TOKENS_BEFORE));
            (shape, before.ok_or_else(wrong)?)
        }
        None => (part, context),
    };
    let pair = shape.split_once('x').and_then(|(n, t)| Some((n.parse().ok()?, t.parse().ok()?)));
    let fits =
        |&(prompts, tokens): &(u32, u32)| within(&SEQUENCES)(&prompts) && within(&TOKENS)(&tokens);
    let (prompts, tokens) = pair.filter(fits).ok_or_else(wrong)?;
    Ok(vec![(tokens, before); prompts as usize])
}

fn within(range: &RangeInclusive<i64>) -> impl Fn(&u32) -> bool {
    |&number| range.contains(&i64::from(number))
}

/// A pseudo-random mix of short and long rows, the same for the same total.
fn random(total: u32, context: u32) -> Vec<(u32, u32)> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64 ^ u64::from(total);
    let mut below = |n: u32| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % u64::from(n.max(1))) as u32
    };
    let (mut rows, mut left) = (Vec::new(), total);
    while left > 0 {
        let tokens = match below(4) {
            0 => 1,
            1 => 1 + below(32),
            2 => 1 + below(300),
            _ => 1 + below(total / 2),
        };
        let tokens = tokens.min(left);
        rows.push((tokens, context + below(512)));
        left -= tokens;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixes_are_parsed() {
        let mix = Mix::parse("1x4096+3x1@2000", 7).expect("a mix");
        assert_eq!(mix.rows, [(4096, 7), (1, 2000), (1, 2000), (1, 2000)]);
        assert_eq!(mix.tokens(), 4099);
        assert_eq!(mix.filled(4200).tokens(), 4200);
        for wrong in ["", "x", "0x5", "5x0", "1x2@", "random:", "random:0", "1x2+", "1x2@x"] {
            assert!(Mix::parse(wrong, 0).is_err(), "{wrong}");
        }
        for large in [
            "4294967295x1",
            "1x4294967295",
            "1x1@4294967295",
            "random:4294967295",
            "4096x1+1x1",
            "2x16777216",
        ] {
            assert!(Mix::parse(large, 0).is_err(), "{large}");
        }
    }

    #[test]
    fn random_mixes_have_the_given_tokens_and_are_reproducible() {
        for total in [1, 2, 100, 2048, 8192] {
            let mix = Mix::parse(&format!("random:{total}"), 0).expect("a mix");
            assert_eq!(mix.tokens(), total);
            assert!(mix.rows.iter().all(|row| row.0 > 0));
            assert_eq!(mix, Mix::parse(&format!("random:{total}"), 0).expect("a mix"));
        }
    }
}
