//! `/v1/chat/completions`.

pub(crate) mod convert;
pub(crate) mod handler;
mod schema;
mod stream;
pub mod types;
pub(crate) mod validate;
