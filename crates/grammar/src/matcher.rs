//! Compiled grammars and the matchers of single answers.

use crate::source::Grammar;
use crate::vocabulary::Token;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A compiled grammar. Cheap to clone.
#[derive(Clone)]
pub struct Compiled {
    inner: Arc<Prototype>,
}

struct Prototype {
    source: Grammar,
    /// Counts against `live_bytes` until it is dropped.
    _weight: Weight,
    matcher: llguidance::Matcher,
    eos: Arc<[Token]>,
    tokens: usize,
}

impl Compiled {
    pub(crate) fn new(
        source: Grammar,
        weight: Weight,
        matcher: llguidance::Matcher,
        eos: Arc<[Token]>,
        tokens: usize,
    ) -> Self {
        Self { inner: Arc::new(Prototype { source, _weight: weight, matcher, eos, tokens }) }
    }

    /// The source.
    pub fn source(&self) -> &Grammar {
        &self.inner.source
    }

    /// The size of the vocabulary.
    pub fn tokens(&self) -> usize {
        self.inner.tokens
    }

    /// A matcher for a new answer. Matchers share no state: each has its own lexer states and
    /// limits.
    pub fn matcher(&self) -> Matcher {
        Matcher { inner: self.inner.matcher.deep_clone(), eos: Arc::clone(&self.inner.eos) }
    }

    /// Whether both are the result of the same compilation.
    pub fn is_same(&self, other: &Compiled) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Compiled").field(&self.inner.source).finish()
    }
}

impl PartialEq for Compiled {
    fn eq(&self, other: &Self) -> bool {
        self.inner.source == other.inner.source && self.inner.tokens == other.inner.tokens
    }
}

/// The tokens allowed next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    /// One bit per token, 32 per word.
    pub words: Vec<u32>,
    /// The cost of computing it, in steps of about a microsecond.
    pub cost: u64,
}

/// The next mask would exceed the cost limit, or the token is not allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot apply the grammar further: {0}")]
pub struct MaskError(pub(crate) String);

/// The state of one answer in its grammar.
#[derive(Clone)]
pub struct Matcher {
    inner: llguidance::Matcher,
    eos: Arc<[Token]>,
}

impl Matcher {
    /// The tokens allowed next.
    pub fn mask(&mut self) -> Result<Mask, MaskError> {
        let mask = self.inner.compute_mask_or_eos().map_err(|e| MaskError(reason(&e)))?;
        let cost = self.inner.last_step_stats().map_or(0, |stats| {
            let (fuel, items) = (stats.lexer_cost / 14, stats.all_items as u64 / 20);
            // A trie node takes about five nanoseconds.
            1 + fuel + items + stats.trie_nodes_walked as u64 / 200
        });
        // The bit set has an extra word when the vocabulary size is a multiple of 32.
        let words = mask.as_slice()[..mask.len().div_ceil(32)].to_vec();
        Ok(Mask { words, cost })
    }

    /// Whether this token ends an answer, independent of the request's stop tokens.
    pub fn ends_with(&self, token: Token) -> bool {
        self.eos.contains(&token)
    }

    /// Advances by the chosen token; returns whether the answer is complete.
    pub fn accept(&mut self, token: Token) -> Result<bool, MaskError> {
        self.inner.consume_token(token).map_err(|e| MaskError(reason(&e)))?;
        Ok(self.inner.is_stopped())
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").finish_non_exhaustive()
    }
}

/// The bytes that a compiled grammar adds to the total; subtracted on drop.
#[derive(Debug)]
pub(crate) struct Weight {
    total: Arc<AtomicU64>,
    bytes: u64,
}

impl Weight {
    pub(crate) fn new(total: &Arc<AtomicU64>, bytes: u64) -> Self {
        total.fetch_add(bytes, Ordering::Relaxed);
        Self { total: Arc::clone(total), bytes }
    }
}

impl Drop for Weight {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Translates an error of llguidance for the author of the grammar.
pub(crate) fn reason(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    let has = |word: &str| text.contains(word);
    if has("items; max is") || has("too many items") {
        return "the grammar has too many alternatives at one point; simplify it".into();
    }
    if has("too many expressions") || has("fuel") || has("lexer error") || has("lexer states") {
        return "the regular expressions of the grammar are too complex; simplify them".into();
    }
    if has("NoExtension") {
        return "no text satisfies the grammar".into();
    }
    if has("panic") {
        return "the grammar cannot be compiled".into();
    }
    plain(&text)
}

/// The first line of a message, without control characters and of bounded length, because the rest
/// may be a dump of the parser.
pub(crate) fn plain(error: &impl std::fmt::Display) -> String {
    const MOST: usize = 200;
    let text = error.to_string();
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("no reason given");
    let mut out: String = line.trim().chars().filter(|c| !c.is_control()).take(MOST).collect();
    if line.trim().chars().count() > MOST {
        out.push('…');
    }
    out
}
