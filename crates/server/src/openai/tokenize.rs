//! `/tokenize` and `/detokenize`.

pub mod convert;
pub mod handler;
pub mod types;
pub mod validate;
