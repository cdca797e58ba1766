//! Regular expressions from a tokenizer file, matched in linear time.
//!
//! The expression comes from the file and the text from a client, so a backtracking matcher could be
//! made to run for ever. Expressions are compiled to an automaton that reads each byte once; the reading is counted
//! against the [`Effort`] of one call, because many matches that each look far ahead are quadratic
//! even so. The one look-ahead that published tokenizers use, `\s+(?!\S)` as an alternative of its
//! own, is not regular but easily decided once `\s+` has matched; all others are refused.

use super::effort::Effort;
use crate::{Error, Result, limits};
use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson;
use regex_automata::util::pool::Pool;
use regex_automata::{Anchored, Input, PatternID};
use regex_syntax::ast::{self, Ast};
use std::path::Path;

/// The alternative that means "spaces, but leave one to the word behind them".
const SPACES: &str = r"\s+(?!\S)";

pub(super) struct Expression {
    automaton: Box<DFA>,
    caches: Pool<Cache, Box<dyn Fn() -> Cache + Send + Sync>>,
    /// Which pattern of the automaton stands for [`SPACES`].
    spaces: Option<PatternID>,
    /// What is tried where [`SPACES`] does not match.
    after: Option<PatternID>,
}

impl std::fmt::Debug for Expression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Expression").finish_non_exhaustive()
    }
}

/// One part of a text: what matched, or what lies between two matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) is_match: bool,
}

impl Expression {
    /// Compiles `source`, which stands in `field` of `file`.
    pub(super) fn new(file: &Path, field: &str, source: &str) -> Result<Self> {
        let refuse = |found: &dyn std::fmt::Display| {
            let allowed = r"a regular expression, with no look-around but \s+(?!\S)";
            Error::unsupported(file, field, found, allowed)
        };
        if source.len() > limits::EXPRESSION_BYTES {
            let found = format!("{} bytes", source.len());
            let allowed = format!("at most {} bytes", limits::EXPRESSION_BYTES);
            return Err(Error::invalid(file, 0, field, found, allowed));
        }
        let alternatives = alternatives(source).ok_or_else(|| refuse(&source))?;
        let mut patterns = Vec::new();
        let (mut spaces, mut after) = (None, None);
        match alternatives.iter().position(|&alternative| alternative == SPACES) {
            None => patterns.push(source.to_owned()),
            Some(at) => {
                if at > 0 {
                    patterns.push(alternatives[..at].join("|"));
                }
                spaces = Some(PatternID::must(patterns.len()));
                patterns.push(r"\s+".to_owned());
                if at + 1 < alternatives.len() {
                    after = Some(PatternID::must(patterns.len()));
                    patterns.push(alternatives[at + 1..].join("|"));
                }
            }
        }
        for pattern in &patterns {
            check_syntax(pattern).map_err(|found| refuse(&found))?;
        }
        let automaton = DFA::builder()
            .configure(
                DFA::config()
                    .cache_capacity(limits::EXPRESSION_CACHE)
                    .skip_cache_capacity_check(true)
                    .starts_for_each_pattern(true)
                    // Texts of one language need a few hundred states; an expression that never
                    // stops making new ones would be slow, and is an error instead.
                    .minimum_cache_clear_count(Some(4))
                    .minimum_bytes_per_state(Some(256)),
            )
            .thompson(thompson::Config::new().nfa_size_limit(Some(limits::EXPRESSION_NFA)))
            .build_many(&patterns)
            .map_err(|error| refuse(&first_line(&error)))?;
        let make = automaton.clone();
        let caches: Box<dyn Fn() -> Cache + Send + Sync> = Box::new(move || make.create_cache());
        Ok(Self { automaton: Box::new(automaton), caches: Pool::new(caches), spaces, after })
    }

    /// The expression that matches `text` and nothing else.
    pub(super) fn literal(file: &Path, field: &str, text: &str) -> Result<Self> {
        Self::new(file, field, &regex_syntax::escape(text))
    }

    /// Calls `each` with every match and with what lies between matches, in order, without gaps.
    pub(super) fn parts(
        &self,
        text: &str,
        effort: &mut Effort,
        mut each: impl FnMut(&mut Effort, Part) -> Result<()>,
    ) -> Result<()> {
        let mut cache = self.caches.get();
        let (mut at, mut done) = (0, 0);
        let mut last_end = None;
        while at <= text.len() {
            let step = text[at..].chars().next().map_or(1, char::len_utf8);
            let Some(end) = self.match_at(&mut cache, text, at, effort)? else {
                at += step;
                continue;
            };
            if end == at && last_end == Some(end) {
                // An empty match right after another match does not count.
                at += step;
                continue;
            }
            if done < at {
                each(effort, Part { start: done, end: at, is_match: false })?;
            }
            each(effort, Part { start: at, end, is_match: true })?;
            (done, last_end) = (end, Some(end));
            at = if end == at { at + step } else { end };
        }
        if done < text.len() {
            each(effort, Part { start: done, end: text.len(), is_match: false })?;
        }
        Ok(())
    }

    /// Where the match that begins at `at` ends.
    fn match_at(
        &self,
        cache: &mut Cache,
        text: &str,
        at: usize,
        effort: &mut Effort,
    ) -> Result<Option<usize>> {
        let found = self.search(cache, text, at, Anchored::Yes, effort)?;
        let Some((pattern, end)) = found else { return Ok(None) };
        if self.spaces != Some(pattern) || text[end..].is_empty() {
            return Ok(Some(end));
        }
        // Greedy `\s+` stopped before something that is no space: it has to give one back.
        let last = text[at..end].chars().next_back().map_or(0, char::len_utf8);
        if end - last > at {
            return Ok(Some(end - last));
        }
        let Some(after) = self.after else { return Ok(None) };
        let found = self.search(cache, text, at, Anchored::Pattern(after), effort)?;
        Ok(found.map(|(_, end)| end))
    }

    /// Runs the automaton from `at`, and pays for every byte it reads.
    fn search(
        &self,
        cache: &mut Cache,
        text: &str,
        at: usize,
        anchored: Anchored,
        effort: &mut Effort,
    ) -> Result<Option<(PatternID, usize)>> {
        let gave_up = || {
            let words = "an expression of the tokenizer needs too many states for this text";
            Error::Tokenizer(words.to_owned())
        };
        let (dfa, bytes) = (&self.automaton, text.as_bytes());
        let input = Input::new(text).range(at..).anchored(anchored);
        let mut state = dfa.start_state_forward(cache, &input).map_err(|_| gave_up())?;
        let mut found = None;
        let mut read = at;
        // A match state is entered one byte after the match.
        while read < bytes.len() {
            state = dfa.next_state(cache, state, bytes[read]).map_err(|_| gave_up())?;
            if state.is_tagged() {
                if state.is_match() {
                    found = Some((dfa.match_pattern(cache, state, 0), read));
                } else if state.is_dead() {
                    effort.spend(read - at + 1)?;
                    return Ok(found);
                } else if state.is_quit() {
                    return Err(gave_up());
                }
            }
            read += 1;
        }
        effort.spend(read - at + 1)?;
        state = dfa.next_eoi_state(cache, state).map_err(|_| gave_up())?;
        if state.is_match() {
            found = Some((dfa.match_pattern(cache, state, 0), read));
        }
        Ok(found)
    }
}

fn first_line(error: &dyn std::error::Error) -> String {
    let cause = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    cause.lines().last().unwrap_or_default().to_owned()
}

/// Refuses syntax that the `regex` dialect reads differently from the dialect of tokenizer files:
/// `a++` is possessive there and twice a repetition here.
fn check_syntax(pattern: &str) -> std::result::Result<(), String> {
    struct Possessive;
    impl ast::Visitor for Possessive {
        type Output = ();
        type Err = String;

        fn finish(self) -> std::result::Result<(), String> {
            Ok(())
        }

        fn visit_pre(&mut self, ast: &Ast) -> std::result::Result<(), String> {
            match ast {
                Ast::Repetition(outer) if matches!(*outer.ast, Ast::Repetition(_)) => {
                    Err("a possessive repetition".to_owned())
                }
                _ => Ok(()),
            }
        }
    }
    let mut parser = ast::parse::ParserBuilder::new().nest_limit(64).build();
    let ast = parser.parse(pattern).map_err(|error| error.kind().to_string())?;
    ast::visit(&ast, Possessive)
}

/// The alternatives of `source` at its outermost level; nothing where flags that are set in one
/// would reach into the next.
fn alternatives(source: &str) -> Option<Vec<&str>> {
    let (mut depth, mut class) = (0usize, 0usize);
    let mut found = Vec::new();
    let mut start = 0;
    let mut chars = source.char_indices();
    let mut flags = false;
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => {
                chars.next();
            }
            '[' => class += 1,
            ']' => class = class.saturating_sub(1),
            _ if class > 0 => {}
            '(' => {
                depth += 1;
                let rest = &source[at + 1..];
                let inside = rest.split_once(')').map_or(rest, |(inside, _)| inside);
                flags |= inside
                    .strip_prefix('?')
                    .is_some_and(|inside| inside.chars().all(|c| c.is_alphabetic() || c == '-'));
            }
            ')' => depth = depth.saturating_sub(1),
            '|' if depth == 0 => {
                found.push(&source[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found.push(&source[start..]);
    if flags && found.contains(&SPACES) { None } else { Some(found) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(source: &str, text: &str) -> Vec<String> {
        let expression = Expression::new(Path::new("t"), "pattern", source).unwrap();
        let mut found = Vec::new();
        let mut effort = Effort::for_text(text.len());
        let gather = |_: &mut Effort, part: Part| {
            let mark = if part.is_match { "" } else { "~" };
            found.push(format!("{mark}{}", &text[part.start..part.end]));
            Ok(())
        };
        expression.parts(text, &mut effort, gather).unwrap();
        found
    }

    #[test]
    fn matches_and_gaps_come_in_order() {
        assert_eq!(parts("b+|a", "abbc"), ["a", "bb", "~c"]);
        assert_eq!(parts("x*", "axb"), ["", "~a", "x", "~b", ""]);
        assert_eq!(parts(r"\p{L}+| ?\d", "é 12"), ["é", " 1", "2"]);
        assert_eq!(parts("[|]|a", "|a"), ["|", "a"]);
    }

    #[test]
    fn spaces_leave_one_to_the_word_behind_them() {
        let words = r" ?\w+|\s+(?!\S)|\s+";
        assert_eq!(parts(words, "a   b  "), ["a", "  ", " b", "  "]);
        assert_eq!(parts(words, "a\n!"), ["a", "\n", "~!"]);
        assert_eq!(parts(r"\s+(?!\S)", "a  !"), ["~a", " ", "~ !"]);
    }

    #[test]
    fn what_could_be_slow_is_refused() {
        let refused = |source: &str| {
            let error = Expression::new(Path::new("t"), "pattern", source).unwrap_err();
            error.to_string()
        };
        assert!(refused("(?=a*b)a").contains("look-around"));
        assert!(refused(r"(a)\1").contains("backreferences"));
        assert!(refused(r"(?i)a|\s+(?!\S)").contains("not supported"));
        assert!(refused("a++b").contains("possessive"));
        assert!(refused(r"\bword").contains("not supported"));
        assert!(refused(r"\w{1,999999}").contains("not supported"));
        assert!(refused(r"((((a{9}){9}){9}){9}){9}{9}{9}").contains("not supported"));
        assert!(refused(&"(".repeat(500)).contains("not supported"));
        assert!(refused(&"a|".repeat(9_000)).contains("at most"));
        // Each match looks at all that follows.
        let text = "a".repeat(1 << 20);
        let expression = Expression::new(Path::new("t"), "pattern", ".*x|a").unwrap();
        let found = expression.parts(&text, &mut Effort::for_text(text.len()), |_, _| Ok(()));
        assert!(found.unwrap_err().to_string().contains("too long"));
    }
}
