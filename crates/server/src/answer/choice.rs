//! One choice: from tokens to deltas.

use super::{Delta, Reasoning, ReasoningSplit, ToolSplit};
use engine::request::Token;
use text::{Detokenize, StopFinder, TextModel};

/// How the text of a choice is processed.
#[derive(Clone, Debug)]
pub struct ChoiceSetup {
    /// Strings that end the answer and are not part of it.
    pub stops: Vec<String>,
    /// The model's reasoning tags, and whether the prompt already ended with the opening tag.
    pub reasoning: Option<(Reasoning, bool)>,
    /// Separates tool calls from text.
    pub tools: ToolSplit,
    /// Whether the answer ends after its first tool call.
    pub single_call: bool,
}

impl ChoiceSetup {
    /// Plain text, with these stop strings.
    pub fn plain(stops: Vec<String>) -> Self {
        Self { stops, reasoning: None, tools: ToolSplit::Off, single_call: false }
    }
}

/// Converts the tokens of one choice to deltas.
pub(crate) struct Choice {
    detokenizer: Box<dyn Detokenize>,
    stops: StopFinder,
    reasoning: Option<ReasoningSplit>,
    tools: ToolSplit,
    /// Buffers between two stages, kept to reuse their allocations.
    decoded: String,
    certain: String,
    /// Tokens of reasoning.
    pub reasoning_tokens: u32,
}

impl Choice {
    /// A choice without tokens.
    pub(crate) fn new(text: &dyn TextModel, setup: ChoiceSetup) -> Self {
        Self {
            detokenizer: text.detokenizer(),
            stops: StopFinder::new(setup.stops),
            reasoning: setup.reasoning.map(|(marks, opened)| ReasoningSplit::new(marks, opened)),
            tools: setup.tools,
            decoded: String::new(),
            certain: String::new(),
            reasoning_tokens: 0,
        }
    }

    /// Adds a token; true if it completed a stop string, which ends the choice.
    pub(crate) fn push(&mut self, token: Token, out: &mut Vec<Delta>) -> bool {
        self.decoded.clear();
        self.certain.clear();
        self.detokenizer.push(token, &mut self.decoded);
        let stopped = self.stops.push(&self.decoded, &mut self.certain);
        self.split(out);
        if self.reasoning.as_ref().is_some_and(ReasoningSplit::inside) {
            self.reasoning_tokens += 1;
        }
        if stopped {
            self.finish_split(false, out);
        }
        stopped
    }

    /// Ends the answer and emits all text held back; true if that completed a stop string. `cut`:
    /// the token limit ended it.
    pub(crate) fn finish(&mut self, cut: bool, out: &mut Vec<Delta>) -> bool {
        self.decoded.clear();
        self.certain.clear();
        self.detokenizer.flush(&mut self.decoded);
        let stopped = self.stops.push(&self.decoded, &mut self.certain);
        if !stopped {
            self.stops.flush(&mut self.certain);
        }
        self.split(out);
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
        self.tools.flush(cut, out);
    }
}
