//! Checks completion requests.

use super::types::{CompletionRequest, Prompt};
use crate::app::Model;
use crate::config::Limits;
use crate::error::ApiError;
use crate::openai::sampling::at_most;

/// Checks every field; the error names the first invalid one.
pub(crate) fn validate(
    request: &CompletionRequest,
    model: &Model,
    limits: &Limits,
) -> Result<(), ApiError> {
    model.check_served(request.model.as_deref())?;
    request.shared().validate(limits, model)?;
    request.structured().grammar(limits)?;
    if request.logprobs.is_some_and(|top| u64::from(top) > limits.top_logprobs) {
        let text = format!("logprobs must be between 0 and {}", limits.top_logprobs);
        return Err(ApiError::invalid("logprobs", text));
    }
    if request.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::invalid(
            "suffix",
            "suffix is not supported: this model cannot fill in the middle",
        ));
    }
    if request.best_of.is_some_and(|best_of| best_of != request.n.unwrap_or(1)) {
        let text = "best_of is not supported unless it equals n: every candidate is returned";
        return Err(ApiError::invalid("best_of", text));
    }
    prompt("prompt", &request.prompt, model, limits.batch)?;
    let choices = u64::from(request.n.unwrap_or(1));
    let sequences = (request.prompt.count() as u64).saturating_mul(choices);
    if sequences > limits.sequences {
        let most = limits.sequences;
        let text = format!("prompts × n is {sequences}; at most {most} choices are allowed");
        return Err(ApiError::invalid("n", text));
    }
    Ok(())
}

/// Checks prompts given as text or as token ids.
pub(crate) fn prompt(
    name: &str,
    prompt: &Prompt,
    model: &Model,
    most: u64,
) -> Result<(), ApiError> {
    let empty = match prompt {
        Prompt::Text(text) => text.is_empty(),
        Prompt::Tokens(tokens) => tokens.is_empty(),
        Prompt::Texts(list) => list.is_empty() || list.iter().any(String::is_empty),
        Prompt::TokenLists(list) => list.is_empty() || list.iter().any(Vec::is_empty),
    };
    if empty {
        return Err(ApiError::invalid(name, format!("{name} must not be empty")));
    }
    at_most(name, "entries", prompt.count(), most)?;
    let lists = match prompt {
        Prompt::Tokens(tokens) => std::slice::from_ref(tokens),
        Prompt::TokenLists(lists) => lists.as_slice(),
        _ => &[],
    };
    match lists.iter().flatten().find(|token| **token >= model.text.vocab()) {
        Some(token) => {
            Err(ApiError::invalid(name, format!("{token} is not a token id of this model")))
        }
        None => Ok(()),
    }
}
