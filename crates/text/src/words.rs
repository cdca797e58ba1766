//! A tokenizer for models with random weights: each input byte is a token, and every other token of
//! the vocabulary decodes to a word, so that the cost over HTTP resembles that of a real model.

use super::bytes::ByteText;
use super::utf8::Utf8Stream;
use super::{Chat, Detokenize, Rendered, TextError, TextModel, Token};

/// A vocabulary of any size: bytes first, then words.
#[derive(Clone, Debug)]
pub struct WordText {
    vocab: u32,
    stop: Vec<Token>,
}

impl WordText {
    /// `stop` are the model's stop tokens.
    pub fn new(vocab: u32, stop: Vec<Token>) -> Self {
        Self { vocab, stop }
    }

    fn shown(&self, token: Token) -> bool {
        token < self.vocab && !self.stop.contains(&token)
    }
}

/// A space and a few letters, different for every token.
fn word(token: Token) -> Vec<u8> {
    let mut bytes = vec![b' '];
    let mut rest = token;
    loop {
        bytes.push(b'a' + (rest % 26) as u8);
        rest /= 26;
        if rest == 0 {
            return bytes;
        }
    }
}

fn bytes(token: Token) -> Vec<u8> {
    u8::try_from(token).map_or_else(|_| word(token), |byte| vec![byte])
}

impl TextModel for WordText {
    fn encode(&self, text: &str, _add_special: bool, most: usize) -> Result<Vec<Token>, TextError> {
        if text.len() > most {
            return Err(TextError::TooLong { most });
        }
        Ok(text.bytes().map(Token::from).collect())
    }

    fn longest_token(&self) -> Option<usize> {
        Some(1)
    }

    fn render(&self, chat: &Chat, most: usize) -> Result<Rendered, TextError> {
        let Rendered { text, .. } = ByteText.render(chat, most)?;
        let tokens = self.encode(&text, false, most)?;
        Ok(Rendered { text, tokens })
    }

    fn token_bytes(&self, token: Token) -> Option<Vec<u8>> {
        (token < self.vocab).then(|| bytes(token))
    }

    fn is_special(&self, token: Token) -> bool {
        !self.shown(token)
    }

    fn detokenizer(&self) -> Box<dyn Detokenize> {
        Box::new(Stream { text: self.clone(), held: Utf8Stream::default() })
    }

    fn stop_tokens(&self) -> &[Token] {
        &self.stop
    }

    fn vocab(&self) -> u32 {
        self.vocab
    }
}

struct Stream {
    text: WordText,
    held: Utf8Stream,
}

impl Detokenize for Stream {
    fn push(&mut self, token: Token, out: &mut String) {
        if self.text.shown(token) {
            self.held.push(&bytes(token), out);
        }
    }

    fn flush(&mut self, out: &mut String) {
        self.held.flush(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_token_is_a_different_word() {
        let text = WordText::new(5000, vec![4999]);
        let words: HashSet<_> = (256..4999).map(|token| text.decode(&[token])).collect();
        assert_eq!(words.len(), 4999 - 256);
        assert!(words.iter().all(|word| word.starts_with(' ') && word.len() > 1));
        assert_eq!(text.decode(&[4999]), "");
        assert_eq!(text.decode(&text.encode("Grüße", false, 99).unwrap()), "Grüße");
        assert_eq!(text.token_bytes(5000), None);
    }
}
