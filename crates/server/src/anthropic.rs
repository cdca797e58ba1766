//! Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`. A request is converted to a
//! chat of [`crate::openai`], which renders, restricts and submits it; answers and errors have
//! Anthropic's format.

pub(crate) mod convert;
pub mod error;
pub(crate) mod handler;
mod stream;
pub mod types;
