//! The steps from text to ids: split off added tokens, normalise, pre-tokenize, merge.

use super::refuse_long;
use crate::{Error, Result, limits};
use std::path::Path;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{AddedToken, AddedVocabulary, Model, OffsetReferential, OffsetType, PreTokenizer};

/// A BPE model as a file describes it, not yet believed.
#[derive(Default)]
pub(super) struct Bpe {
    pub(super) vocab: Vec<(String, u32)>,
    pub(super) merges: Vec<(String, String)>,
    pub(super) unknown: Option<String>,
    pub(super) fuse_unknown: bool,
    pub(super) byte_fallback: bool,
    pub(super) ignore_merges: bool,
}

impl Bpe {
    /// Checks what the crate takes on trust: it indexes with these numbers and lengths.
    pub(super) fn build(self, file: &Path) -> Result<BPE> {
        for (text, id) in &self.vocab {
            if u64::from(*id) >= limits::VOCAB {
                let allowed = format!("below {}", limits::VOCAB);
                return Err(Error::invalid(file, 0, format!("id of token {text}"), id, allowed));
            }
            if text.len() > limits::TOKEN_BYTES {
                let found = format!("{} bytes", text.len());
                let allowed = format!("at most {} bytes", limits::TOKEN_BYTES);
                return Err(Error::invalid(file, 0, format!("token {id}"), found, allowed));
            }
        }
        // The first of two equal texts is the one that encodes.
        let mut vocab = Vocab::default();
        for (text, id) in self.vocab {
            vocab.entry(text).or_insert(id);
        }
        let mut whole = String::new();
        for (number, (left, right)) in self.merges.iter().enumerate() {
            whole.clear();
            whole.push_str(left);
            whole.push_str(right);
            let parts = [left.as_str(), right.as_str(), whole.as_str()];
            if let Some(part) = parts.into_iter().find(|&part| !vocab.contains_key(part)) {
                let field = format!("merge {number}");
                return Err(Error::invalid(file, 0, field, part, "tokens of the vocabulary"));
            }
        }
        if let Some(unknown) = self.unknown.as_ref().filter(|text| !vocab.contains_key(*text)) {
            let allowed = "a token of the vocabulary";
            return Err(Error::invalid(file, 0, "unknown token", unknown, allowed));
        }
        let mut builder = BPE::builder()
            .vocab_and_merges(vocab, self.merges)
            .fuse_unk(self.fuse_unknown)
            .byte_fallback(self.byte_fallback)
            .ignore_merges(self.ignore_merges);
        if let Some(unknown) = self.unknown {
            builder = builder.unk_token(unknown);
        }
        builder.build().map_err(|error| Error::invalid(file, 0, "BPE model", error, "a whole one"))
    }
}

/// Everything needed to encode.
pub(super) struct Pipeline {
    bpe: BPE,
    added: AddedVocabulary,
    normaliser: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    /// Ids put before a whole text.
    prefix: Vec<u32>,
    /// Ids put after a whole text.
    suffix: Vec<u32>,
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pipeline")
            .field("tokens", &self.bpe.get_vocab_size())
            .finish_non_exhaustive()
    }
}

impl Pipeline {
    /// Puts the parts together. Every added token must end up with the id the file gave it.
    pub(super) fn new(
        file: &Path,
        bpe: BPE,
        added: Vec<(u32, AddedToken)>,
        normaliser: Option<NormalizerWrapper>,
        pre_tokenizer: Option<PreTokenizerWrapper>,
    ) -> Result<Self> {
        if added.len() > limits::ADDED_TOKENS {
            let allowed = format!("at most {}", limits::ADDED_TOKENS);
            return Err(Error::invalid(file, 0, "added tokens", added.len(), allowed));
        }
        let mut vocabulary = AddedVocabulary::new();
        let tokens = added.iter().map(|(_, token)| token.clone());
        vocabulary
            .add_tokens(tokens, &bpe, normaliser.as_ref())
            .map_err(|error| Error::invalid(file, 0, "added tokens", error, "distinct texts"))?;
        for (id, token) in &added {
            let given = vocabulary.token_to_id(&token.content, &bpe);
            if given != Some(*id) {
                let field = format!("id of added token {}", token.content);
                let allowed = given.map_or("a text".to_owned(), |id| id.to_string());
                return Err(Error::invalid(file, 0, field, id, allowed));
            }
        }
        let (prefix, suffix) = (Vec::new(), Vec::new());
        Ok(Self { bpe, added: vocabulary, normaliser, pre_tokenizer, prefix, suffix })
    }

    /// Sets the ids put around a whole text.
    pub(super) fn around(mut self, prefix: Vec<u32>, suffix: Vec<u32>) -> Self {
        (self.prefix, self.suffix) = (prefix, suffix);
        self
    }

    /// Ids of `text`. A `marker` is taken out after added tokens have been recognised and before
    /// anything else looks at the text.
    pub(super) fn encode(
        &self,
        text: &str,
        marker: Option<char>,
        add_special: bool,
    ) -> Result<Vec<u32>> {
        refuse_long(text)?;
        let fail = |error: tokenizers::Error| Error::Tokenizer(error.to_string());
        let mut pieces = self.added.extract_and_normalize(self.normaliser.as_ref(), text);
        if let Some(marker) = marker.filter(|&marker| text.contains(marker)) {
            pieces
                .normalize(|piece| {
                    piece.filter(|c| c != marker);
                    Ok(())
                })
                .map_err(fail)?;
        }
        if let Some(pre_tokenizer) = &self.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut pieces).map_err(fail)?;
        }
        pieces.tokenize(|piece| self.bpe.tokenize(piece.get())).map_err(fail)?;

        let mut ids = if add_special { self.prefix.clone() } else { Vec::new() };
        for (_, _, tokens) in pieces.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            ids.extend(tokens.iter().flatten().map(|token| token.id));
        }
        if add_special {
            ids.extend_from_slice(&self.suffix);
        }
        Ok(ids)
    }

    pub(super) fn id_of(&self, text: &str) -> Option<u32> {
        self.added.token_to_id(text, &self.bpe)
    }

    /// Texts of the control tokens.
    pub(super) fn control_texts(&self) -> impl Iterator<Item = &str> {
        let tokens = self.added.get_added_tokens_decoder().values();
        tokens.filter(|token| token.special).map(|token| token.content.as_str())
    }
}
