//! Structured output: which tokens may come next.
//!
//! A request's [`Grammar`] becomes a matcher over the model's vocabulary. Before each sampled token
//! the matcher yields a mask, one bit per token, that travels with the step; the mask depends on
//! the token before, so a row with a grammar has at most one sampled token in flight.

use crate::request::{Grammar, Reject, Token};
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use std::sync::Arc;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// The bytes of every token of a model, ready to build grammars over.
pub struct Vocabulary {
    factory: ParserFactory,
    eos: Vec<Token>,
}

impl Vocabulary {
    /// `bytes[t]` is what token `t` adds to the text; empty for tokens that never appear in it.
    /// Special tokens are named by `special` and match no text, whatever their bytes. `eos` are the
    /// tokens that may follow where a grammar can end.
    pub fn new(
        bytes: &[Vec<u8>],
        special: &[Token],
        eos: &[Token],
    ) -> Result<Vocabulary, GrammarError> {
        let Some(&first) = eos.first() else { return Err(GrammarError::NoEos) };
        if let Some(&out) = eos.iter().chain(special).find(|&&t| t as usize >= bytes.len()) {
            return Err(GrammarError::OutOfRange(out));
        }
        let mut words = bytes.to_vec();
        for &token in special {
            // The trie's marker for tokens that no text matches.
            let name = std::mem::take(&mut words[token as usize]);
            words[token as usize] = [&[TokTrie::SPECIAL_TOKEN_MARKER][..], &name].concat();
        }
        let info = TokRxInfo::new(words.len() as u32, first);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(eos);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env)
            .map_err(|error| GrammarError::Vocabulary(error.to_string()))?;
        factory.quiet();
        Ok(Vocabulary { factory, eos: eos.to_vec() })
    }

    pub(crate) fn matcher(&self, grammar: &Grammar) -> Result<Matcher, Reject> {
        let bad = |problem: String| Reject::BadParameter { field: "grammar", problem };
        let top = match grammar {
            Grammar::JsonObject => TopLevelGrammar::from_tagged_str("json_object", ""),
            Grammar::JsonSchema(schema) => TopLevelGrammar::from_tagged_str("json_schema", schema),
            Grammar::Regex(regex) => TopLevelGrammar::from_tagged_str("regex", regex),
            Grammar::Lark(lark) => TopLevelGrammar::from_tagged_str("lark", lark),
        }
        .map_err(|error| bad(error.to_string()))?;
        let inner = llguidance::Matcher::new(self.factory.create_parser(top));
        match inner.get_error() {
            Some(error) => Err(bad(error)),
            None => Ok(Matcher { inner, eos: self.eos.clone() }),
        }
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("eos", &self.eos).finish_non_exhaustive()
    }
}

/// Why a vocabulary cannot carry grammars.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// A grammar that may end needs a token to end with.
    #[error("the vocabulary has no end-of-text token")]
    NoEos,
    /// A token id past the last one.
    #[error("token {0} is not in the vocabulary")]
    OutOfRange(Token),
    /// The trie could not be built.
    #[error("no token trie: {0}")]
    Vocabulary(String),
}

/// Where one answer stands in its grammar.
#[derive(Clone)]
pub(crate) struct Matcher {
    inner: llguidance::Matcher,
    eos: Vec<Token>,
}

impl Matcher {
    /// One bit per token that may come next.
    pub(crate) fn mask(&mut self) -> Result<Vec<u32>, String> {
        let mask = self.inner.compute_mask_or_eos().map_err(|error| error.to_string())?;
        // The set keeps a spare word when the vocabulary fills its last one.
        Ok(mask.as_slice()[..mask.len().div_ceil(32)].to_vec())
    }

    /// Whether this token ends an answer, whatever the request's stop tokens are.
    pub(crate) fn ends_with(&self, token: Token) -> bool {
        self.eos.contains(&token)
    }

    /// Takes the chosen token; says whether the answer is complete.
    pub(crate) fn accept(&mut self, token: Token) -> Result<bool, String> {
        self.inner.consume_token(token).map_err(|error| error.to_string())?;
        Ok(self.inner.is_stopped())
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").finish_non_exhaustive()
    }
}
