//! `/v1/completions`.

pub(crate) mod convert;
pub(crate) mod handler;
mod stream;
pub mod types;
pub(crate) mod validate;
