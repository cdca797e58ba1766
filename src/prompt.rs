//! Converts the user's text to prompt tokens.

use crate::exit::bad_input;
use anyhow::{Context, Result};
use engine::request::{Sampling, Token};
use formats::chat::ChatTemplate;
use formats::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use server::answer::ChoiceSetup;
use std::sync::Arc;

/// The tokens of a prompt.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<Token>,
    /// The rendered chat, if it is one.
    chat: Option<String>,
}

impl Prompt {
    /// How its answer is read: one to a chat may begin with reasoning, unless a grammar says what it is.
    pub(crate) fn setup(
        &self,
        tokenizer: &Tokenizer,
        sampling: &Sampling,
        stops: Vec<String>,
    ) -> ChoiceSetup {
        match self.chat.as_ref().filter(|_| sampling.grammar.is_none()) {
            Some(chat) => ChoiceSetup::of_chat(|token| tokenizer.id_of(token), chat, stops),
            None => ChoiceSetup::plain(stops),
        }
    }
}

/// A conversation, rendered with the model's chat template.
pub(crate) struct Conversation {
    tokenizer: Arc<Tokenizer>,
    /// `None` for a model without a chat template: its prompt is the plain text.
    template: Option<ChatTemplate>,
    system: Option<String>,
    turns: Vec<Value>,
}

impl Conversation {
    /// An empty conversation.
    pub(crate) fn new(
        tokenizer: Arc<Tokenizer>,
        template: Option<ChatTemplate>,
        system: Option<String>,
    ) -> Self {
        Self { tokenizer, template, system, turns: Vec::new() }
    }

    /// Whether the model has a chat template.
    pub(crate) fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// Clears the conversation, but keeps the system message.
    pub(crate) fn reset(&mut self) {
        self.turns.clear();
    }

    /// Sets the system message from the next answer on.
    pub(crate) fn set_system(&mut self, system: Option<String>) {
        self.system = system;
    }

    /// The system message.
    pub(crate) fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Adds a turn of the user and returns the prompt.
    pub(crate) fn ask(&mut self, text: &str) -> Result<Prompt> {
        self.turns.push(json!({ "role": "user", "content": text }));
        let prompt = self.prompt();
        if prompt.is_err() {
            self.turns.pop();
        }
        prompt
    }

    /// Adds the model's turn.
    pub(crate) fn answered(&mut self, text: &str) {
        self.turns.push(json!({ "role": "assistant", "content": text }));
    }

    /// Removes the last turn of the user, if it got no answer.
    pub(crate) fn take_back(&mut self) {
        self.turns.pop();
    }

    fn prompt(&self) -> Result<Prompt> {
        let Some(template) = &self.template else { return self.plain() };
        let system = self.system.iter().map(|text| json!({ "role": "system", "content": text }));
        let messages = Value::Array(system.chain(self.turns.iter().cloned()).collect());
        chat(&self.tokenizer, template, &messages)
    }

    fn plain(&self) -> Result<Prompt> {
        let turns = self.turns.iter().filter_map(|turn| turn["content"].as_str());
        let text: Vec<&str> = self.system.as_deref().into_iter().chain(turns).collect();
        raw(&self.tokenizer, &text.join("\n"))
    }
}

/// A system message and one turn of the user.
pub(crate) fn messages(system: Option<&str>, text: &str) -> Value {
    let system = system.map(|text| json!({ "role": "system", "content": text }));
    let user = json!({ "role": "user", "content": text });
    Value::Array(system.into_iter().chain([user]).collect())
}

/// A conversation, up to the start of the model's turn.
pub(crate) fn chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &Value,
) -> Result<Prompt> {
    let escaper = tokenizer.escaper();
    let rendered = template.render_escaped(messages, None, true, &Map::new(), escaper)?;
    Ok(Prompt { tokens: tokenizer.encode_chat(&rendered)?, chat: Some(rendered.visible()) })
}

/// A plain text; control tokens spelled out in it are recognized.
pub(crate) fn raw(tokenizer: &Tokenizer, text: &str) -> Result<Prompt> {
    let tokens = tokenizer.encode(text, true)?;
    match tokens.is_empty() {
        true => Err(bad_input("the prompt is empty")),
        false => Ok(Prompt { tokens, chat: None }),
    }
}

/// The prompt from the flag, or from standard input if it is not a terminal.
pub(crate) fn from_flag_or_stdin(flag: Option<&str>) -> Result<String> {
    use std::io::{IsTerminal, Read};
    if let Some(text) = flag {
        return match text.is_empty() {
            true => Err(bad_input("the prompt is empty")),
            false => Ok(text.to_owned()),
        };
    }
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        return Err(bad_input("no prompt: use -p TEXT, or write it to standard input"));
    }
    let mut bytes = Vec::new();
    stdin.lock().take(MAX_PROMPT + 1).read_to_end(&mut bytes).context("reading the prompt")?;
    if bytes.len() as u64 > MAX_PROMPT {
        return Err(bad_input(format!("the prompt is longer than {MAX_PROMPT} bytes")));
    }
    let text = String::from_utf8(bytes).map_err(|_| bad_input("the prompt is not UTF-8"))?;
    // The newline that `echo` adds is not part of the prompt.
    let text = text.strip_suffix('\n').unwrap_or(&text);
    match text.trim().is_empty() {
        true => Err(bad_input("the prompt is empty")),
        false => Ok(text.to_owned()),
    }
}

/// The longest prompt read from standard input, in bytes.
const MAX_PROMPT: u64 = 64 << 20;
