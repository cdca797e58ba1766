//! `truncate_prompt_tokens`: keeps the end of prompts that are too long.

use crate::app::Model;
use crate::config::Limits;
use crate::error::ApiError;
use engine::request::Token;

/// The value of `truncate_prompt_tokens`: the most tokens of a prompt that are kept, or -1 for as
/// many as fit.
#[derive(Clone, Copy)]
pub(crate) struct Truncation(pub(crate) Option<i64>);

impl Truncation {
    /// An error if the value is out of range.
    pub(crate) fn check(self, model: &Model) -> Result<(), ApiError> {
        let most = model.most_prompt();
        match self.0 {
            Some(keep)
                if keep != -1 && !usize::try_from(keep).is_ok_and(|n| 1 <= n && n <= most) =>
            {
                let text = format!("truncate_prompt_tokens must be -1 or between 1 and {most}");
                Err(ApiError::invalid("truncate_prompt_tokens", text))
            }
            _ => Ok(()),
        }
    }

    /// The most tokens that a prompt may have before it is truncated.
    pub(crate) fn most_prompt(self, model: &Model, limits: &Limits) -> usize {
        match self.0 {
            None => model.most_prompt(),
            Some(_) => usize::try_from(limits.tokenize_tokens).unwrap_or(usize::MAX),
        }
    }

    /// Removes the beginning of a prompt that is too long; of a model that makes vectors the end of the text, as
    /// such models are trained, and not the special tokens behind it.
    pub(crate) fn apply(self, model: &Model, prompt: &mut Vec<Token>) {
        let keep = match self.0 {
            None => return,
            Some(keep) => usize::try_from(keep).unwrap_or(model.most_prompt()),
        };
        let extra = prompt.len().saturating_sub(keep);
        match model.generates {
            true => drop(prompt.drain(..extra)),
            false => {
                let end = prompt.len() - model.text.closing().min(keep);
                drop(prompt.drain(end.saturating_sub(extra)..end));
            }
        }
    }
}
