//! Converts text to tokens.

use super::types::TokenizeRequest;
use crate::app::Model;
use crate::openai::chat::convert::template_input;
use engine::request::Token;
use serde_json::Map;
use text::{Chat, TextError};

/// The tokens of a validated request; an error if there are more than `most`.
pub(crate) fn tokens(
    request: &TokenizeRequest,
    model: &Model,
    most: usize,
) -> Result<Vec<Token>, TextError> {
    if let Some(prompt) = &request.prompt {
        return model.text.encode(prompt, request.add_special_tokens.unwrap_or(true), most);
    }
    let messages = request.messages.as_deref().unwrap_or_default();
    let (messages, tools) = template_input(model, messages, request.tools.as_deref());
    let chat = Chat {
        messages,
        tools,
        generation_prompt: request.add_generation_prompt.unwrap_or(true),
        continue_final: request.continue_final_message == Some(true),
        extra: Map::new(),
    };
    Ok(model.text.render(&chat, most)?.tokens)
}
