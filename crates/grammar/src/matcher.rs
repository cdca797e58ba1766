//! A compiled grammar, and where one answer stands in it.

use crate::source::Grammar;
use crate::vocabulary::Token;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A grammar that was found usable, ready to guide answers. Cheap to clone.
#[derive(Clone)]
pub struct Compiled {
    inner: Arc<Prototype>,
}

struct Prototype {
    source: Grammar,
    /// Counts against the limit while it lives.
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

    /// What it was compiled from.
    pub fn source(&self) -> &Grammar {
        &self.inner.source
    }

    /// How many tokens the vocabulary has that it was compiled over.
    pub fn tokens(&self) -> usize {
        self.inner.tokens
    }

    /// A matcher at the beginning of an answer. It shares nothing with others: the states its
    /// lexer collects go with it, and count against its own limit.
    pub fn matcher(&self) -> Matcher {
        Matcher { inner: self.inner.matcher.deep_clone(), eos: Arc::clone(&self.inner.eos) }
    }

    /// Whether both are the same compilation.
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

/// Which tokens may come next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    /// One bit per token, 32 to a word.
    pub words: Vec<u32>,
    /// What it cost to find out, in steps of about a microsecond.
    pub cost: u64,
}

/// A grammar that cannot be followed further: a step would cost more than it may.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the grammar cannot be followed further: {0}")]
pub struct MaskError(pub(crate) String);

/// Where one answer stands in its grammar.
#[derive(Clone)]
pub struct Matcher {
    inner: llguidance::Matcher,
    eos: Arc<[Token]>,
}

impl Matcher {
    /// Which tokens may come next.
    pub fn mask(&mut self) -> Result<Mask, MaskError> {
        let mask = self.inner.compute_mask_or_eos().map_err(|e| MaskError(reason(&e)))?;
        let cost = self.inner.last_step_stats().map_or(0, |stats| {
            let (fuel, items) = (stats.lexer_cost / 14, stats.all_items as u64 / 20);
            // A node of the trie takes some five nanoseconds.
            1 + fuel + items + stats.trie_nodes_walked as u64 / 200
        });
        // The set keeps a spare word when the vocabulary fills its last one.
        let words = mask.as_slice()[..mask.len().div_ceil(32)].to_vec();
        Ok(Mask { words, cost })
    }

    /// Whether this token ends an answer, whatever the request's stop tokens are.
    pub fn ends_with(&self, token: Token) -> bool {
        self.eos.contains(&token)
    }

    /// Takes the chosen token; says whether the answer is complete.
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

/// What a compiled grammar counts for among all that live.
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

/// What llguidance says, in words for whoever wrote the grammar.
pub(crate) fn reason(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    let has = |word: &str| text.contains(word);
    if has("items; max is") || has("too many items") {
        return "it has too many alternatives in one place; make it simpler".into();
    }
    if has("too many expressions") || has("fuel") || has("lexer error") || has("lexer states") {
        return "its regular expressions are too complex; make them simpler".into();
    }
    if has("NoExtension") {
        return "no text satisfies it".into();
    }
    if has("panic") {
        return "it cannot be compiled".into();
    }
    plain(&text)
}

/// The first line of a message, without control characters, of bounded length: the rest may be a
/// dump of the parser.
pub(crate) fn plain(error: &impl std::fmt::Display) -> String {
    const MOST: usize = 200;
    let text = error.to_string();
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("no reason was given");
    let mut out: String = line.trim().chars().filter(|c| !c.is_control()).take(MOST).collect();
    if line.trim().chars().count() > MOST {
        out.push('…');
    }
    out
}
