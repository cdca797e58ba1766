//! One choice: from tokens to deltas.

use super::{Delta, HarmonySplit, Mark, Marks, Reasoning, ReasoningSplit, ToolSplit};
use engine::request::Token;
use text::{Detokenize, StopFinder};

/// How the text of a choice is processed.
#[derive(Clone, Debug)]
pub struct ChoiceSetup {
    /// Strings that end the answer and are not part of it.
    pub stops: Vec<String>,
    /// The model's reasoning tags, and whether the prompt already ended with the opening tag.
    pub reasoning: Option<(Reasoning, bool)>,
    /// Separates the messages of an answer that has several; then tags of reasoning are not looked for.
    pub messages: Option<HarmonySplit>,
    /// Separates tool calls from text.
    pub tools: ToolSplit,
    /// Whether the answer ends after its first tool call.
    pub single_call: bool,
}

impl ChoiceSetup {
    /// Plain text, with these stop strings.
    pub fn plain(stops: Vec<String>) -> Self {
        let tools = ToolSplit::Off;
        Self { stops, reasoning: None, messages: None, tools, single_call: false }
    }

    /// The answer to a chat without tools: its reasoning is separated if the tokenizer, in which `id_of` finds a token by
    /// its spelling, has tokens around it. `prompt` is the rendered chat.
    pub fn of_chat(
        id_of: impl Fn(&str) -> Option<Token>,
        prompt: &str,
        stops: Vec<String>,
    ) -> Self {
        let marks = Marks::in_use(&id_of, prompt);
        let messages = marks.map(|marks| HarmonySplit::new(marks, prompt, false));
        let reasoning = Reasoning::in_use(id_of, prompt);
        Self { messages, reasoning, ..Self::plain(stops) }
    }
}

/// Converts the tokens of one choice to deltas.
pub struct Choice {
    detokenizer: Box<dyn Detokenize>,
    stops: StopFinder,
    reasoning: Option<ReasoningSplit>,
    messages: Option<HarmonySplit>,
    tools: ToolSplit,
    /// Buffers between two stages, kept to reuse their allocations.
    decoded: String,
    certain: String,
    /// Tokens of reasoning.
    pub reasoning_tokens: u32,
}

impl Choice {
    /// A choice without tokens.
    pub fn new(detokenizer: Box<dyn Detokenize>, setup: ChoiceSetup) -> Self {
        Self {
            detokenizer,
            stops: StopFinder::new(setup.stops),
            reasoning: setup
                .reasoning
                .filter(|_| setup.messages.is_none())
                .map(|(marks, opened)| ReasoningSplit::new(marks, opened)),
            messages: setup.messages,
            tools: setup.tools,
            decoded: String::new(),
            certain: String::new(),
            reasoning_tokens: 0,
        }
    }

    /// Adds a token; true if it completed a stop string, which ends the choice.
    pub fn push(&mut self, token: Token, out: &mut Vec<Delta>) -> bool {
        if let Some(mark) = self.messages.as_ref().and_then(|messages| messages.mark_of(token)) {
            return self.mark(mark, out);
        }
        self.decoded.clear();
        self.certain.clear();
        self.detokenizer.push(token, &mut self.decoded);
        let stopped = match self.in_header() {
            true => {
                self.certain.push_str(&self.decoded);
                false
            }
            false => self.stops.push(&self.decoded, &mut self.certain),
        };
        self.split(out);
        let thinks = self.reasoning.as_ref().is_some_and(ReasoningSplit::inside)
            || self.messages.as_ref().is_some_and(HarmonySplit::reasons);
        self.reasoning_tokens += u32::from(thinks);
        if stopped {
            self.finish_split(false, out);
        }
        stopped
    }

    /// Whether the stream is in the header of a message, which has no stop strings.
    fn in_header(&self) -> bool {
        self.messages.as_ref().is_some_and(|messages| !messages.in_message())
    }

    /// The text before a mark of messages is complete; true if it or the mark ended the answer.
    fn mark(&mut self, mark: Mark, out: &mut Vec<Delta>) -> bool {
        let stopped = self.complete(out);
        let ends = self.messages.as_mut().is_some_and(|messages| messages.mark(mark, out));
        if stopped || ends {
            self.finish_split(false, out);
        }
        stopped || ends
    }

    /// Emits the text held back; true if that completed a stop string.
    fn complete(&mut self, out: &mut Vec<Delta>) -> bool {
        self.decoded.clear();
        self.certain.clear();
        self.detokenizer.flush(&mut self.decoded);
        let stopped = self.stops.push(&self.decoded, &mut self.certain);
        if !stopped {
            self.stops.flush(&mut self.certain);
        }
        self.split(out);
        stopped
    }

    /// Ends the answer and emits all text held back; true if that completed a stop string. `cut`:
    /// the token limit ended it.
    pub fn finish(&mut self, cut: bool, out: &mut Vec<Delta>) -> bool {
        let stopped = self.complete(out);
        self.finish_split(cut, out);
        stopped
    }

    /// The stop string that ended the answer.
    pub(crate) fn stop_string(&self) -> Option<&str> {
        self.stops.found()
    }

    fn split(&mut self, out: &mut Vec<Delta>) {
        if self.certain.is_empty() {
            return;
        }
        if let Some(messages) = &mut self.messages {
            let answer = messages.text(&self.certain, out);
            return self.tools.push(&answer, out);
        }
        match &mut self.reasoning {
            Some(reasoning) => {
                let answer = reasoning.push(&self.certain, out);
                self.tools.push(&answer, out);
            }
            None => self.tools.push(&self.certain, out),
        }
    }

    fn finish_split(&mut self, cut: bool, out: &mut Vec<Delta>) {
        if let Some(reasoning) = &mut self.reasoning {
            let answer = reasoning.flush(out);
            self.tools.push(&answer, out);
        }
        if let Some(messages) = &mut self.messages {
            let answer = messages.flush(out);
            self.tools.push(&answer, out);
        }
        self.tools.flush(cut, out);
    }
}
