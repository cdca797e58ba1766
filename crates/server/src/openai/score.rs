//! `/v1/rerank`, `/v1/score` and `/v1/classify`: numbers about texts and pairs of texts. The shapes are those of Jina and
//! Cohere (rerank) and of vLLM (score and classify).

pub(crate) mod convert;
pub(crate) mod handler;
pub mod types;
pub(crate) mod validate;
