//! Ollama's API: `/api/chat`, `/api/generate`, `/api/embed` and `/api/tags`. Requests are converted
//! to those of [`crate::openai`], which renders, restricts and submits them; answers are lines of
//! JSON, and errors have Ollama's format.

pub(crate) mod convert;
pub(crate) mod embed;
pub mod error;
pub(crate) mod handler;
pub(crate) mod tags;
mod time;
pub mod types;
mod write;
