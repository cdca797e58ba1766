//! What turns a word into ids: one of the kinds of vocabularies.

use super::bpe::{self, Bpe};
use super::ids::Ids;
use super::unigram::{self, Unigram};
use super::word_piece::WordPiece;
use crate::Result;

/// A vocabulary with its rule.
pub(super) enum Model {
    Bpe(Bpe),
    WordPiece(WordPiece),
    Unigram(Unigram),
}

/// Memory that one call uses for word after word.
#[derive(Default)]
pub(super) struct Room {
    bpe: bpe::Room,
    tokens: Vec<u32>,
    unigram: unigram::Room,
}

impl Model {
    pub(super) fn id_of(&self, text: &str) -> Option<u32> {
        match self {
            Model::Bpe(bpe) => bpe.id_of(text),
            Model::WordPiece(pieces) => pieces.id_of(text),
            Model::Unigram(unigram) => unigram.id_of(text),
        }
    }

    /// How many tokens differ in their text.
    pub(super) fn len(&self) -> usize {
        match self {
            Model::Bpe(bpe) => bpe.len(),
            Model::WordPiece(pieces) => pieces.len(),
            Model::Unigram(unigram) => unigram.len(),
        }
    }

    /// Whether no character of any text is lost, nor a run of them put into one unknown token.
    /// `alphabet` is what texts are written in, where that is known.
    pub(super) fn keeps_all(&self, alphabet: Option<&[char; 256]>) -> bool {
        match self {
            Model::Bpe(bpe) => bpe.keeps_all(alphabet),
            Model::WordPiece(_) | Model::Unigram(_) => false,
        }
    }

    /// Puts the ids of `word` into `ids`.
    pub(super) fn encode(&self, word: &str, room: &mut Room, ids: &mut Ids) -> Result<()> {
        match self {
            Model::Bpe(bpe) => bpe.encode(word, &mut room.bpe, ids),
            Model::WordPiece(pieces) => pieces.encode(word, &mut room.tokens, ids),
            Model::Unigram(unigram) => unigram.encode(word, &mut room.unigram, ids),
        }
    }
}
