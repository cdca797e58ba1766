//! Checks tokenize and detokenize requests.

use super::types::{DetokenizeRequest, TokenizeRequest};
use crate::app::Model;
use crate::config::Limits;
use crate::error::ApiError;
use crate::openai::chat;
use crate::openai::sampling::at_most;

/// Checks that there is text or a valid conversation.
pub(crate) fn tokenize(
    request: &TokenizeRequest,
    model: &Model,
    limits: &Limits,
) -> Result<(), ApiError> {
    model.check_served(request.model.as_deref())?;
    chat::validate::tools(request.tools.as_deref().unwrap_or_default(), limits)?;
    match (&request.prompt, &request.messages) {
        (Some(_), _) => Ok(()),
        (None, Some(messages)) => chat::validate::conversation(messages, limits),
        (None, None) => Err(ApiError::invalid("prompt", "set either prompt or messages")),
    }
}

/// Checks that the tokens are in the vocabulary.
pub(crate) fn detokenize(
    request: &DetokenizeRequest,
    model: &Model,
    limits: &Limits,
) -> Result<(), ApiError> {
    model.check_served(request.model.as_deref())?;
    at_most("tokens", "entries", request.tokens.len(), limits.tokenize_tokens)?;
    match request.tokens.iter().find(|token| **token >= model.text.vocab()) {
        None => Ok(()),
        Some(token) => {
            let text = format!("{token} is not a token id of this model");
            Err(ApiError::invalid("tokens", text))
        }
    }
}
