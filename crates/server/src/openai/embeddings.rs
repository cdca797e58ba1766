//! `/v1/embeddings`.

pub mod convert;
pub mod handler;
pub mod types;
pub mod validate;
