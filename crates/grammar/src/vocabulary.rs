//! The tokens of a model, prepared for grammars.

use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use std::sync::Arc;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// A token id.
pub type Token = u32;

/// The bytes of every token of a model.
pub struct Vocabulary {
    pub(crate) factory: ParserFactory,
    pub(crate) eos: Arc<[Token]>,
    tokens: usize,
}

/// Why a vocabulary does not support grammars.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    /// Without an end token no answer could end.
    #[error("the vocabulary has no end-of-text token")]
    NoEos,
    /// A token id is out of range.
    #[error("token {0} is not in the vocabulary")]
    OutOfRange(Token),
    /// The trie could not be built.
    #[error("cannot build the token trie: {0}")]
    Trie(String),
}

/// The cost limits of one mask and of the automaton of an answer. llguidance states the speeds: 14
/// units of lexer fuel or 20 items per microsecond, up to 2 kB per state.
const PARSER_LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 4_000,
    initial_lexer_fuel: 1_000_000,
    step_lexer_fuel: 200_000,
    step_max_items: 50_000,
    max_lexer_states: 16_000,
    max_grammar_size: 200_000,
    precompute_large_lexemes: false,
    // Verbose errors would send the parser's state and the whole grammar to the client.
    verbose_errors: false,
};

impl Vocabulary {
    /// `bytes[t]` is the text of token `t`; empty for tokens that never appear in text. Tokens in
    /// `special` match no text. Tokens in `eos` are allowed where a grammar may end.
    pub fn new(
        bytes: &[Vec<u8>],
        special: &[Token],
        eos: &[Token],
    ) -> Result<Vocabulary, VocabularyError> {
        let Some(&first) = eos.first() else { return Err(VocabularyError::NoEos) };
        if let Some(&out) = eos.iter().chain(special).find(|&&t| t as usize >= bytes.len()) {
            return Err(VocabularyError::OutOfRange(out));
        }
        let mut words = bytes.to_vec();
        for &token in special {
            // The marker tells the trie that no text matches this token.
            let name = std::mem::take(&mut words[token as usize]);
            words[token as usize] = [&[TokTrie::SPECIAL_TOKEN_MARKER][..], &name].concat();
        }
        let info = TokRxInfo::new(words.len() as u32, first);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(eos);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env)
            .map_err(|error| VocabularyError::Trie(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = PARSER_LIMITS;
        Ok(Vocabulary { factory, eos: eos.into(), tokens: bytes.len() })
    }

    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary")
            .field("tokens", &self.tokens)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}
