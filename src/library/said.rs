//! The text of an answer: complete characters, without stop strings.

use engine::request::Token;
use text::{Detokenize, StopFinder};

/// Converts tokens to text: complete characters, without stop strings.
pub(super) struct Text {
    characters: Box<dyn Detokenize>,
    /// The characters of one token, kept for its memory.
    piece: String,
    stops: StopFinder,
    pub(super) whole: String,
    shown: usize,
    /// A stop string was found, which ends the text.
    stopped: bool,
}

impl Text {
    pub(super) fn new(characters: Box<dyn Detokenize>, stop: Vec<String>) -> Self {
        Self {
            characters,
            piece: String::new(),
            stops: StopFinder::new(stop),
            whole: String::new(),
            shown: 0,
            stopped: false,
        }
    }

    /// Adds a token; true if a stop string is complete.
    pub(super) fn push(&mut self, token: Token) -> bool {
        self.piece.clear();
        self.characters.push(token, &mut self.piece);
        self.stopped |= self.stops.push(&self.piece, &mut self.whole);
        self.stopped
    }

    /// Appends the text held back.
    pub(super) fn finish(&mut self) {
        if self.stopped {
            return;
        }
        self.piece.clear();
        self.characters.flush(&mut self.piece);
        if !self.stops.push(&self.piece, &mut self.whole) {
            self.stops.flush(&mut self.whole);
        }
    }

    /// The stop string that was found.
    pub(super) fn found(&self) -> Option<&str> {
        self.stops.found()
    }

    /// The text since the last call.
    pub(super) fn fresh(&mut self) -> &str {
        let from = std::mem::replace(&mut self.shown, self.whole.len());
        &self.whole[from..]
    }
}
