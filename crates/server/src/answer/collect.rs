//! A complete answer in its parts, for APIs whose answers are lists of parts.

use super::{Delta, Piece, Run};
use crate::app::App;
use crate::error::ApiError;
use crate::openai::new_id;
use crate::openai::whole::ResponseSize;
use engine::request::TokenLogprob;
use std::time::Instant;

/// One part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Reasoning.
    Reasoning(String),
    /// Text.
    Text(String),
    /// A call: its id, the function's name and its arguments as JSON text.
    Call(String, String, String),
}

/// One complete answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Collected {
    /// Its parts, in order.
    pub(crate) parts: Vec<Part>,
    /// OpenAI's `finish_reason`.
    pub(crate) reason: &'static str,
    /// The stop string that ended it.
    pub(crate) stop: Option<String>,
    /// When the prompt was processed.
    pub(crate) prompt_done: Option<Instant>,
    /// The log-probabilities of its tokens, if requested.
    pub(crate) logprobs: Vec<TokenLogprob>,
}

impl Collected {
    /// Adds a delta.
    pub(crate) fn add(&mut self, delta: Delta) {
        match (delta, self.parts.last_mut()) {
            (Delta::Text(more), Some(Part::Text(text)))
            | (Delta::Reasoning(more), Some(Part::Reasoning(text)))
            | (Delta::ToolArguments(more), Some(Part::Call(_, _, text))) => text.push_str(&more),
            (Delta::Text(text), _) => self.parts.push(Part::Text(text)),
            (Delta::Reasoning(text), _) => self.parts.push(Part::Reasoning(text)),
            (Delta::ToolStart { name }, _) => {
                self.parts.push(Part::Call(new_id("call"), name, String::new()));
            }
            (Delta::ToolArguments(_) | Delta::ToolEnd, _) => {}
        }
    }

    /// Whether this delta begins a new part.
    pub(crate) fn begins(&self, delta: &Delta) -> bool {
        match (delta, self.parts.last()) {
            (Delta::Text(_), Some(Part::Text(_)))
            | (Delta::Reasoning(_), Some(Part::Reasoning(_)))
            | (Delta::ToolArguments(_) | Delta::ToolEnd, _) => false,
            (Delta::Text(_) | Delta::Reasoning(_) | Delta::ToolStart { .. }, _) => true,
        }
    }

    /// The text of all text parts.
    pub(crate) fn text(&self) -> String {
        let text = |part: &Part| match part {
            Part::Text(text) => Some(text.clone()),
            Part::Reasoning(_) | Part::Call(..) => None,
        };
        self.parts.iter().filter_map(text).collect()
    }
}

/// Runs a call with one choice to its end.
pub(crate) async fn collect(app: &App, run: &mut Run) -> Result<Collected, ApiError> {
    let (mut whole, mut size) = (Collected::default(), ResponseSize::new(app));
    while !run.is_over() {
        run.next(&mut |piece| match piece {
            Piece::Prompt { .. } => whole.prompt_done = Some(Instant::now()),
            Piece::Delta { delta, logprobs, .. } => {
                size.add(delta.len(), &logprobs);
                whole.logprobs.extend(logprobs);
                whole.add(delta);
            }
            Piece::End { reason, stop, logprobs, .. } => {
                whole.logprobs.extend(logprobs);
                (whole.reason, whole.stop) = (reason, stop);
            }
        })
        .await?;
        size.check()?;
    }
    Ok(whole)
}

/// The arguments of a call as an object; empty if the answer was cut inside them.
pub(crate) fn arguments(text: &str) -> serde_json::Map<String, serde_json::Value> {
    serde_json::from_str(text).unwrap_or_default()
}
