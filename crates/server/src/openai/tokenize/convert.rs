//! Converts text to tokens.

use super::types::TokenizeRequest;
use crate::openai::chat::convert::template_message;
use engine::request::Token;
use serde_json::{Map, Value, json};
use text::{Chat, TextError, TextModel};

/// The tokens of a validated request; an error if there are more than `most`.
pub(crate) fn tokens(
    request: &TokenizeRequest,
    text: &dyn TextModel,
    most: usize,
) -> Result<Vec<Token>, TextError> {
    if let Some(prompt) = &request.prompt {
        return text.encode(prompt, request.add_special_tokens.unwrap_or(true), most);
    }
    let messages = request.messages.as_deref().unwrap_or_default();
    let chat = Chat {
        messages: messages.iter().map(template_message).collect(),
        tools: request.tools.as_ref().map_or(Value::Null, |tools| json!(tools)),
        generation_prompt: request.add_generation_prompt.unwrap_or(true),
        extra: Map::new(),
    };
    Ok(text.render(&chat, most)?.tokens)
}
