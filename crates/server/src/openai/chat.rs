//! `/v1/chat/completions`.

pub mod convert;
pub mod handler;
mod schema;
mod stream;
pub mod types;
pub mod validate;
