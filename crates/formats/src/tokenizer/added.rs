//! Tokens that are recognised in a text before anything else looks at it: control tokens, and
//! what was added to a vocabulary later.

use super::effort::Effort;
use super::model::Model;
use super::normalise::Normaliser;
use crate::{Error, Result, limits};
use ahash::AHashMap;
use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::path::Path;

/// One added token as a file describes it.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct AddedToken {
    pub(super) id: u32,
    pub(super) content: String,
    /// Recognised only between characters that are no letters.
    pub(super) single_word: bool,
    /// Takes the spaces before it along.
    pub(super) lstrip: bool,
    /// Takes the spaces behind it along.
    pub(super) rstrip: bool,
    /// Recognised in the normalised text, in its own normalised form.
    pub(super) normalized: bool,
    /// A control token: left out of decoded text.
    pub(super) special: bool,
}

/// What a text is made of.
pub(super) enum Segment<'t> {
    Token(u32),
    Text(&'t str),
}

/// Finds tokens in texts, the leftmost first and of those the longest.
struct Matcher {
    automaton: AhoCorasick,
    tokens: Vec<AddedToken>,
}

/// All added tokens of a vocabulary.
pub(super) struct Added {
    plain: Option<Matcher>,
    normalised: Option<Matcher>,
    ids: AHashMap<String, u32>,
}

/// Refuses more tokens, or longer ones, than any published vocabulary has: recognising them takes
/// memory with the sum of their lengths.
pub(super) fn check(file: &Path, added: &[AddedToken]) -> Result<()> {
    if added.len() > limits::ADDED_TOKENS {
        let allowed = format!("at most {}", limits::ADDED_TOKENS);
        return Err(Error::invalid(file, 0, "added tokens", added.len(), allowed));
    }
    let mut sum = 0;
    for token in added {
        sum += token.content.len();
        if token.content.len() > limits::ADDED_TOKEN_BYTES {
            let field = format!("content of added token {}", token.id);
            let found = format!("{} bytes", token.content.len());
            let allowed = format!("at most {} bytes", limits::ADDED_TOKEN_BYTES);
            return Err(Error::invalid(file, 0, field, found, allowed));
        }
    }
    if sum > limits::ADDED_BYTES {
        let allowed = format!("at most {} bytes", limits::ADDED_BYTES);
        return Err(Error::invalid(file, 0, "added tokens", format!("{sum} bytes"), allowed));
    }
    Ok(())
}

impl Added {
    /// Checks that every token has the id that the model gives its text, or the next free one.
    pub(super) fn new(
        file: &Path,
        tokens: Vec<AddedToken>,
        model: &Model,
        normaliser: &Normaliser,
    ) -> Result<Self> {
        check(file, &tokens)?;
        let mut free = model.len() as u32;
        let mut last: Vec<AddedToken> = Vec::new();
        let mut places: AHashMap<String, usize> = AHashMap::new();
        for token in tokens {
            let place = places.get(&token.content).copied();
            let given =
                place.map(|place: usize| last[place].id).or_else(|| model.id_of(&token.content));
            let id = match given {
                Some(id) => Some(id),
                None if token.content.is_empty() => None,
                None => {
                    free += 1;
                    Some(free - 1)
                }
            };
            if id != Some(token.id) {
                let field = format!("id of added token {}", token.content);
                let allowed = id.map_or("a text".to_owned(), |id| id.to_string());
                return Err(Error::invalid(file, 0, field, token.id, allowed));
            }
            match place {
                Some(place) => last[place] = token,
                None => {
                    places.insert(token.content.clone(), last.len());
                    last.push(token);
                }
            }
        }
        let ids = last.iter().map(|token| (token.content.clone(), token.id)).collect();
        let (normalised, plain): (Vec<_>, Vec<_>) = last.into_iter().partition(|t| t.normalized);
        let spelled: Vec<String> = plain.iter().map(|token| token.content.clone()).collect();
        let plain = Matcher::new(file, plain, &spelled)?;
        let mut effort = Effort::for_text(limits::ADDED_BYTES);
        let spelled: Vec<String> = normalised
            .iter()
            .map(|token| Ok(normaliser.apply(&token.content, &mut effort)?.into_owned()))
            .collect::<Result<_>>()?;
        let normalised = Matcher::new(file, normalised, &spelled)?;
        Ok(Self { plain, normalised, ids })
    }

    fn tokens(&self) -> impl Iterator<Item = &AddedToken> {
        [&self.plain, &self.normalised].into_iter().flatten().flat_map(|matcher| &matcher.tokens)
    }

    /// Texts of the control tokens.
    pub(super) fn controls(&self) -> impl Iterator<Item = &str> {
        self.tokens().filter(|token| token.special).map(|token| token.content.as_str())
    }

    /// The id of the token written `text`.
    pub(super) fn id_of(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// Whether no token takes spaces along.
    pub(super) fn keeps_all(&self) -> bool {
        !self.tokens().any(|token| token.lstrip || token.rstrip)
    }

    /// Cuts a text at the tokens that stand in it as they are.
    pub(super) fn split_plain<'t>(
        &self,
        text: &'t str,
        each: impl FnMut(Segment<'t>) -> Result<()>,
    ) -> Result<()> {
        split(self.plain.as_ref(), text, each)
    }

    /// Cuts a normalised text at the tokens that are looked for in such.
    pub(super) fn split_normalised<'t>(
        &self,
        text: &'t str,
        each: impl FnMut(Segment<'t>) -> Result<()>,
    ) -> Result<()> {
        split(self.normalised.as_ref(), text, each)
    }
}

impl Matcher {
    fn new(file: &Path, tokens: Vec<AddedToken>, spelled: &[String]) -> Result<Option<Self>> {
        if tokens.is_empty() {
            return Ok(None);
        }
        let mut seen = BTreeSet::new();
        for text in spelled {
            if text.is_empty() || !seen.insert(text) {
                return Err(Error::invalid(file, 0, "added tokens", text, "distinct texts"));
            }
        }
        let sum: usize = spelled.iter().map(String::len).sum();
        if sum > limits::ADDED_BYTES {
            let allowed = format!("at most {} bytes", limits::ADDED_BYTES);
            return Err(Error::invalid(file, 0, "added tokens", format!("{sum} bytes"), allowed));
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(spelled)
            .map_err(|error| Error::invalid(file, 0, "added tokens", error, "fewer"))?;
        Ok(Some(Self { automaton, tokens }))
    }
}

fn split<'t>(
    matcher: Option<&Matcher>,
    text: &'t str,
    mut each: impl FnMut(Segment<'t>) -> Result<()>,
) -> Result<()> {
    let mut done = 0;
    if let Some(matcher) = matcher {
        for found in matcher.automaton.find_iter(text) {
            let token = &matcher.tokens[found.pattern()];
            let (before, after) = (&text[..found.start()], &text[found.end()..]);
            if token.single_word {
                let word = |c: Option<char>| c.is_some_and(regex_syntax::is_word_character);
                if word(before.chars().next_back()) || word(after.chars().next()) {
                    continue;
                }
            }
            let (mut start, mut end) = (found.start(), found.end());
            if token.lstrip {
                start = before.trim_end().len().max(done);
            }
            if token.rstrip {
                end += after.len() - after.trim_start().len();
            }
            if done < start {
                each(Segment::Text(&text[done..start]))?;
            }
            each(Segment::Token(token.id))?;
            done = end;
        }
    }
    if done < text.len() {
        each(Segment::Text(&text[done..]))?;
    }
    Ok(())
}
