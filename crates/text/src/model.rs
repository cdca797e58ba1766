//! The tokenizer and the chat template of a checkpoint.

use super::{Chat, Detokenize, Rendered, TextError, TextModel, Token};
use formats::chat::ChatTemplate;
use formats::tokenizer::{Detokenizer, Tokenizer};
use serde_json::Value;
use std::sync::Arc;

/// The tokenizer and the chat template of a checkpoint.
pub struct CheckpointText {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    stop: Vec<Token>,
    vocab: u32,
    /// Kinds of tokens.
    kinds: u32,
}

impl CheckpointText {
    /// `stop` are the model's stop tokens; `vocab` is the model's size, which may be larger than
    /// the tokenizer's.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        template: Option<ChatTemplate>,
        stop: Vec<Token>,
        vocab: u32,
    ) -> Self {
        Self { tokenizer, template, stop, vocab, kinds: 1 }
    }

    /// The same for a model that tells `kinds` kinds of tokens apart.
    pub fn with_kinds(self, kinds: u32) -> Self {
        Self { kinds: kinds.max(1), ..self }
    }

    /// The id of the token that is spelled like this.
    pub fn id_of(&self, token: &str) -> Option<Token> {
        self.tokenizer.id_of(token)
    }
}

impl TextModel for CheckpointText {
    fn encode(&self, text: &str, add_special: bool, most: usize) -> Result<Vec<Token>, TextError> {
        self.check_bytes(text.len(), most)?;
        self.tokenizer.encode_limited(text, add_special, most).map_err(explain)
    }

    fn longest_token(&self) -> Option<usize> {
        self.tokenizer.longest_token()
    }

    fn render(&self, chat: &Chat, most: usize) -> Result<Rendered, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        let tools = (!chat.tools.is_null()).then_some(&chat.tools);
        let escaper = self.tokenizer.escaper();
        let marked = chat.continue_final.then(|| mark_end(chat.messages.clone()));
        let messages = marked.as_ref().unwrap_or(&chat.messages);
        let opens = chat.generation_prompt && !chat.continue_final;
        let mut rendered = template
            .render_escaped(messages, tools, opens, &chat.extra, escaper)
            .map_err(|e| TextError::Template(e.to_string()))?;
        if chat.continue_final && !rendered.cut_at(FINAL_END) {
            return Err(TextError::Hidden);
        }
        let tokens = self.tokenizer.encode_chat_limited(&rendered, most).map_err(explain)?;
        Ok(Rendered { text: rendered.visible(), tokens })
    }

    fn encode_pair(&self, first: &str, second: &str, most: usize) -> Result<Vec<Token>, TextError> {
        let pair = self.tokenizer.encode_pair(first, second, most).map_err(explain)?;
        Ok(pair
            .into_iter()
            .map(|token| token.id + token.kind.min(self.kinds - 1) * self.vocab)
            .collect())
    }

    fn closing(&self) -> usize {
        self.tokenizer.closing()
    }

    fn template(&self) -> Option<&str> {
        self.template.as_ref().map(ChatTemplate::source)
    }

    fn token_bytes(&self, token: Token) -> Option<Vec<u8>> {
        (token < self.vocab).then(|| self.tokenizer.token_bytes(token).to_vec())
    }

    fn is_special(&self, token: Token) -> bool {
        self.tokenizer.is_control(token)
    }

    fn detokenizer(&self) -> Box<dyn Detokenize> {
        detokenizer(&self.tokenizer)
    }

    fn stop_tokens(&self) -> &[Token] {
        &self.stop
    }

    fn vocab(&self) -> u32 {
        self.vocab
    }
}

/// Marks the end of the last message while it is rendered: private-use characters, which no
/// template treats specially.
const FINAL_END: &str = "\u{f0f0}\u{f0f1}";

/// Appends [`FINAL_END`] to the last message.
fn mark_end(mut messages: Value) -> Value {
    let last = messages.as_array_mut().and_then(|list| list.last_mut());
    if let Some(content) = last.and_then(|message| message.get_mut("content")) {
        *content = format!("{}{FINAL_END}", content.as_str().unwrap_or_default()).into();
    }
    messages
}

fn explain(error: formats::Error) -> TextError {
    match error {
        formats::Error::TooLong { max_tokens } => TextError::TooLong { most: max_tokens },
        other => TextError::Encode(other.to_string()),
    }
}

/// A decoder for one answer.
pub fn detokenizer(tokenizer: &Arc<Tokenizer>) -> Box<dyn Detokenize> {
    Box::new(Stream(Detokenizer::new(tokenizer.clone())))
}

struct Stream(Detokenizer);

impl Detokenize for Stream {
    fn push(&mut self, token: Token, out: &mut String) {
        out.push_str(self.0.push(token));
    }

    fn flush(&mut self, out: &mut String) {
        out.push_str(self.0.finish());
    }
}
