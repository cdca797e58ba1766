//! One continuation on its way to a client.

use super::{Delta, Reasoning, ReasoningSplit, StopFinder, ToolSplit};
use crate::text::{Detokenize, TextModel};
use engine::request::Token;

/// What a choice's text goes through.
#[derive(Clone, Debug)]
pub struct ChoiceSetup {
    /// Strings that end the answer and are not part of it.
    pub stops: Vec<String>,
    /// The model's marks around thinking, and whether the prompt opened them already.
    pub reasoning: Option<(Reasoning, bool)>,
    /// How tool calls are told from text.
    pub tools: ToolSplit,
    /// The answer ends after its first tool call, whatever the model would go on to write.
    pub single_call: bool,
}

impl ChoiceSetup {
    /// Plain text, with these stop strings.
    pub fn plain(stops: Vec<String>) -> Self {
        Self { stops, reasoning: None, tools: ToolSplit::Off, single_call: false }
    }
}

/// Tokens in, deltas out.
pub struct Choice {
    detokenizer: Box<dyn Detokenize>,
    stops: StopFinder,
    reasoning: Option<ReasoningSplit>,
    tools: ToolSplit,
    /// Text between two stages, kept for its allocation.
    decoded: String,
    certain: String,
    /// Tokens that were thinking.
    pub reasoning_tokens: u32,
}

impl Choice {
    /// The start of an answer.
    pub fn new(text: &dyn TextModel, setup: ChoiceSetup) -> Self {
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

    /// Takes a token; true when a stop string was completed, after which the choice is over.
    pub fn push(&mut self, token: Token, out: &mut Vec<Delta>) -> bool {
        self.decoded.clear();
        self.certain.clear();
        self.detokenizer.push(token, &mut self.decoded);
        let stopped = self.stops.push(&self.decoded, &mut self.certain);
        self.split(out);
        if self.reasoning.as_ref().is_some_and(ReasoningSplit::inside) {
            self.reasoning_tokens += 1;
        }
        if stopped {
            self.finish_split(out);
        }
        stopped
    }

    /// The engine ended the answer: gives out all that was held back. True when that completed a
    /// stop string.
    pub fn finish(&mut self, out: &mut Vec<Delta>) -> bool {
        self.decoded.clear();
        self.certain.clear();
        self.detokenizer.flush(&mut self.decoded);
        let stopped = self.stops.push(&self.decoded, &mut self.certain);
        if !stopped {
            self.stops.flush(&mut self.certain);
        }
        self.split(out);
        self.finish_split(out);
        stopped
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

    fn finish_split(&mut self, out: &mut Vec<Delta>) {
        if let Some(reasoning) = &mut self.reasoning {
            let answer = reasoning.flush(out);
            self.tools.push(&answer, out);
        }
        self.tools.flush(out);
    }
}
