//! `/v1/completions`.

pub mod convert;
pub mod handler;
mod stream;
pub mod types;
pub mod validate;
