//! What is done to a text before it is split: Unicode forms, replacements, prefixes.

use super::effort::Effort;
use super::expression::{Expression, Part};
use super::precompiled::Precompiled;
use crate::{Error, Result, limits};
use std::borrow::Cow;
use unicode_categories::UnicodeCategories;
use unicode_normalization_alignments::UnicodeNormalization;

#[derive(Debug)]
pub(super) enum Step {
    Nfc,
    Nfd,
    Nfkc,
    Nfkd,
    Lowercase,
    /// Drops control characters and makes every space a plain one.
    Clean,
    /// Puts spaces around Chinese characters.
    SpaceIdeographs,
    /// Drops marks that stand on other characters.
    StripAccents,
    Prepend(String),
    Replace {
        /// What is replaced.
        what: Expression,
        /// The bytes of `what`, where it is a fixed text.
        fixed: Option<usize>,
        with: String,
    },
    /// SentencePiece's table.
    Precompiled(Precompiled),
    Strip {
        left: bool,
        right: bool,
    },
}

/// A chain of steps, each of which sees what the one before made.
#[derive(Debug, Default)]
pub(super) struct Normaliser(pub(super) Vec<Step>);

impl Normaliser {
    /// `text` after every step. What the steps make is bounded by the length of `text`: published
    /// chains make at most three bytes of one.
    pub(super) fn apply<'t>(&self, text: &'t str, effort: &mut Effort) -> Result<Cow<'t, str>> {
        let cap = text.len().saturating_mul(limits::NORMALISED_GROWTH).saturating_add(1 << 12);
        let cap = cap.min(limits::NORMALISED_BYTES);
        let mut text = Cow::Borrowed(text);
        for step in &self.0 {
            text = step.apply(text, effort, cap)?;
        }
        Ok(text)
    }

    /// How many bytes of text one byte of the result may stand for; `None` without a bound.
    pub(super) fn shrinks(&self) -> Option<usize> {
        self.0.iter().try_fold(1usize, |factor, step| {
            let step = match step {
                Step::Prepend(_) => 1,
                // U+212A, three bytes, becomes K; its like in the compatibility forms have four.
                Step::Nfc | Step::Nfd | Step::Nfkc | Step::Nfkd | Step::Lowercase => 4,
                Step::SpaceIdeographs => 1,
                Step::Strip { .. } | Step::Clean | Step::StripAccents | Step::Precompiled(_) => {
                    return None;
                }
                Step::Replace { fixed, with, .. } => (*fixed).filter(|_| !with.is_empty())?,
            };
            factor.checked_mul(step.max(1))
        })
    }
}

impl Step {
    fn apply<'t>(
        &self,
        text: Cow<'t, str>,
        effort: &mut Effort,
        cap: usize,
    ) -> Result<Cow<'t, str>> {
        let grow = |out: &str, more: usize| {
            if out.len() + more <= cap {
                return Ok(());
            }
            let found = "the tokenizer's normaliser makes too much of this text";
            Err(Error::Tokenizer(format!("{found}: allowed: at most {cap} bytes")))
        };
        let collect = |chars: &mut dyn Iterator<Item = char>| {
            let mut out = String::with_capacity(text.len());
            for c in chars {
                grow(&out, c.len_utf8())?;
                out.push(c);
            }
            Ok(Cow::Owned(out))
        };
        match self {
            // ASCII is its own form.
            Step::Nfc | Step::Nfd | Step::Nfkc | Step::Nfkd if text.is_ascii() => Ok(text),
            Step::Nfc => collect(&mut text.nfc().map(|(c, _)| c)),
            Step::Nfd => collect(&mut text.nfd().map(|(c, _)| c)),
            Step::Nfkc => collect(&mut text.nfkc().map(|(c, _)| c)),
            Step::Nfkd => collect(&mut text.nfkd().map(|(c, _)| c)),
            Step::Lowercase => collect(&mut text.chars().flat_map(char::to_lowercase)),
            Step::Clean => {
                let kept = |c: &char| !matches!(c, '\0' | '\u{fffd}') && !is_control(*c);
                let plain = |c: char| if is_space(c) { ' ' } else { c };
                collect(&mut text.chars().filter(kept).map(plain))
            }
            Step::SpaceIdeographs if !text.chars().any(is_ideograph) => Ok(text),
            Step::SpaceIdeographs => collect(&mut text.chars().flat_map(|c| {
                let spaced = [Some(' '), Some(c), Some(' ')];
                let one = if is_ideograph(c) { spaced } else { [Some(c), None, None] };
                one.into_iter().flatten()
            })),
            Step::StripAccents => collect(&mut text.chars().filter(|c| !c.is_mark_nonspacing())),
            Step::Prepend(_) if text.is_empty() => Ok(text),
            Step::Prepend(prefix) => {
                grow(&text, prefix.len())?;
                Ok(Cow::Owned(prefix.clone() + &text))
            }
            Step::Precompiled(table) => {
                let mut out = String::with_capacity(text.len());
                table.apply(&text, |part| {
                    grow(&out, part.len())?;
                    out.push_str(part);
                    Ok(())
                })?;
                Ok(Cow::Owned(out))
            }
            Step::Strip { left, right } => {
                let mut rest: &str = &text;
                if *left {
                    rest = rest.trim_start();
                }
                if *right {
                    rest = rest.trim_end();
                }
                Ok(Cow::Owned(rest.to_owned()))
            }
            Step::Replace { what, with, .. } => {
                let mut out = String::with_capacity(text.len());
                what.parts(&text, effort, |_, Part { start, end, is_match }| {
                    let part = if is_match { with } else { &text[start..end] };
                    grow(&out, part.len())?;
                    out.push_str(part);
                    Ok(())
                })?;
                Ok(Cow::Owned(out))
            }
        }
    }
}

fn is_space(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r') || c.is_whitespace()
}

fn is_control(c: char) -> bool {
    !matches!(c, '\t' | '\n' | '\r') && c.is_other()
}

/// The blocks that BERT's normaliser calls Chinese.
fn is_ideograph(c: char) -> bool {
    matches!(
        u32::from(c),
        0x4E00..=0x9FFF
            | 0x3400..=0x4DBF
            | 0x20000..=0x2A6DF
            | 0x2A700..=0x2B73F
            | 0x2B740..=0x2B81F
            | 0x2B920..=0x2CEAF
            | 0xF900..=0xFAFF
            | 0x2F800..=0x2FA1F
    )
}
