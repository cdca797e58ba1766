//! `/v1/embeddings`.

pub(crate) mod convert;
pub(crate) mod handler;
pub mod types;
pub(crate) mod validate;
