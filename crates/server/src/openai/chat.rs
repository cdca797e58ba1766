//! `/v1/chat/completions`.

pub(crate) mod convert;
mod generic_tools;
pub(crate) mod handler;
pub(crate) mod schema;
mod stream;
pub mod types;
pub(crate) mod validate;
