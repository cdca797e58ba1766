//! `/tokenize` and `/detokenize`.

pub(crate) mod convert;
pub(crate) mod handler;
pub(crate) mod types;
pub(crate) mod validate;
