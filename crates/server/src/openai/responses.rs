//! `/v1/responses`: a request is converted to a chat, which renders, restricts and submits it.
//! Finished responses are kept within limits, so that `previous_response_id` can continue them.

pub(crate) mod convert;
pub(crate) mod handler;
pub(crate) mod store;
mod stream;
pub mod types;
pub(crate) mod write;
