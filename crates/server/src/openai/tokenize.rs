//! `/tokenize` and `/detokenize`.

pub(crate) mod convert;
pub(crate) mod handler;
pub mod types;
pub(crate) mod validate;
