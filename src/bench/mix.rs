//! The rows of a prefill step: prompts, chunks in the middle of a context, decoding sequences.

use anyhow::{Context, Result, ensure};

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
                let tokens = rest.strip_prefix(':').and_then(|n| n.parse().ok()).filter(|&n| n > 0);
                random(
                    tokens.with_context(|| format!("{text}: expected random or random:TOKENS"))?,
                    context,
                )
            }
            None => {
                let mut rows = Vec::new();
                for part in text.split('+') {
                    rows.extend(repeated(part, context)?);
                }
                rows
            }
        };
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
    let wrong = || format!("{part}: expected PROMPTSxTOKENS or PROMPTSxTOKENS@CONTEXT");
    let (shape, before) = match part.split_once('@') {
        Some((shape, before)) => (shape, before.parse().ok().with_context(wrong)?),
        None => (part, context),
    };
    let pair = shape.split_once('x').and_then(|(n, t)| Some((n.parse().ok()?, t.parse().ok()?)));
    let (prompts, tokens): (u32, u32) = pair.with_context(wrong)?;
    ensure!(prompts > 0 && tokens > 0, "{part}: prompts and tokens must be at least 1");
    Ok(vec![(tokens, before); prompts as usize])
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
