//! A tokenizer without a vocabulary file: every byte is a token. For tests and the mock.

use super::utf8::Utf8Stream;
use super::{Chat, Detokenize, Rendered, TextError, TextModel, Token};
use serde_json::Value;

/// Opens a message.
pub(crate) const START: Token = 256;
/// Closes a message and ends an answer.
pub const END: Token = 257;
/// Ends a document.
pub(crate) const END_OF_TEXT: Token = 258;
const SPECIALS: [(&str, Token); 3] =
    [("<|im_start|>", START), ("<|im_end|>", END), ("<|endoftext|>", END_OF_TEXT)];

/// 256 byte tokens and three specials, with a ChatML template written in Rust.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByteText;

impl TextModel for ByteText {
    fn encode(&self, text: &str, _add_special: bool, most: usize) -> Result<Vec<Token>, TextError> {
        self.check_bytes(text.len(), most)?;
        let mut tokens = Vec::with_capacity(text.len().min(most));
        let mut rest = text;
        'scan: while let Some(&byte) = rest.as_bytes().first() {
            if tokens.len() >= most {
                return Err(TextError::TooLong { most });
            }
            if byte == b'<' {
                for (word, token) in SPECIALS {
                    if let Some(after) = rest.strip_prefix(word) {
                        tokens.push(token);
                        rest = after;
                        continue 'scan;
                    }
                }
            }
            let end = rest.char_indices().nth(1).map_or(rest.len(), |(i, _)| i);
            tokens.extend(rest[..end].bytes().map(Token::from));
            rest = &rest[end..];
        }
        if tokens.len() > most { Err(TextError::TooLong { most }) } else { Ok(tokens) }
    }

    fn longest_token(&self) -> Option<usize> {
        SPECIALS.iter().map(|(word, _)| word.len()).max()
    }

    fn render(&self, chat: &Chat, most: usize) -> Result<Rendered, TextError> {
        let mut text = String::new();
        if let Value::Array(tools) = &chat.tools {
            text.push_str("<|im_start|>system\n<tools>");
            for tool in tools {
                text.push('\n');
                text.push_str(&tool.to_string());
            }
            text.push_str("\n</tools><|im_end|>\n");
        }
        let messages = chat.messages.as_array().map_or(&[][..], Vec::as_slice);
        for message in messages {
            let role = message["role"].as_str().unwrap_or("user");
            let content = message["content"].as_str().unwrap_or("");
            text.push_str(&format!("<|im_start|>{role}\n{content}<|im_end|>\n"));
        }
        if chat.continue_final {
            text.truncate(text.len() - "<|im_end|>\n".len());
        } else if chat.generation_prompt {
            text.push_str("<|im_start|>assistant\n");
        }
        let tokens = self.encode(&text, false, most)?;
        Ok(Rendered { text, tokens })
    }

    fn token_bytes(&self, token: Token) -> Option<Vec<u8>> {
        match u8::try_from(token) {
            Ok(byte) => Some(vec![byte]),
            Err(_) => SPECIALS
                .iter()
                .find(|(_, special)| *special == token)
                .map(|(word, _)| word.as_bytes().to_vec()),
        }
    }

    fn is_special(&self, token: Token) -> bool {
        token >= 256
    }

    fn detokenizer(&self) -> Box<dyn Detokenize> {
        Box::new(ByteStream::default())
    }

    fn stop_tokens(&self) -> &[Token] {
        &[END, END_OF_TEXT]
    }

    fn vocab(&self) -> u32 {
        259
    }
}

#[derive(Default)]
struct ByteStream(Utf8Stream);

impl Detokenize for ByteStream {
    fn push(&mut self, token: Token, out: &mut String) {
        if let Ok(byte) = u8::try_from(token) {
            self.0.push(&[byte], out);
        }
    }

    fn flush(&mut self, out: &mut String) {
        self.0.flush(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        let text = "<|im_start|>é日<|im_end";
        let tokens = ByteText.encode(text, false, 16).unwrap();
        assert_eq!(tokens[0], START);
        assert_eq!(ByteText.decode(&tokens), "é日<|im_end");
        assert_eq!(tokens.len(), 14);
        assert!(ByteText.encode(text, false, 14).is_ok());
        assert_eq!(ByteText.encode(text, false, 13), Err(TextError::TooLong { most: 13 }));
        let long = "x".repeat(100);
        let refused = TextError::TooManyBytes { bytes: 100, most: 7 };
        assert_eq!(ByteText.encode(&long, false, 7), Err(refused));
    }
}
