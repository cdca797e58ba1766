//! Parses untrusted model files into checked values, and writes safetensors ([`write`](mod@write)).
//!
//! A model's files come from untrusted sources: safetensors or GGUF weights, a tokenizer, a chat
//! template. This crate turns them into plain values and promises three things:
//!
//! - every size is compared with the file's length, and with a named cap in [`limits`], before
//!   anything is allocated for it;
//! - every error is one line with file, offset, field, what was found and what is allowed
//!   ([`Error`]);
//! - there is no `unsafe` and no memory map. Weights are read with positioned reads straight into
//!   memory the caller owns, so a file that shrinks meanwhile is an error and never a signal.
//!
//! ```no_run
//! use formats::{checkpoint::Checkpoint, tokenizer::Tokenizer};
//!
//! # fn main() -> Result<(), formats::Error> {
//! let checkpoint = Checkpoint::open("SmolLM2-135M-Instruct.Q4_1.gguf".as_ref())?;
//! let tokenizer = Tokenizer::of(&checkpoint)?;
//! let ids = tokenizer.encode("The capital of France is", true)?;
//! # let _ = ids; Ok(())
//! # }
//! ```

pub mod chat;
pub mod checkpoint;
pub mod config;
pub mod dtype;
mod error;
pub mod gguf;
pub mod limits;
pub mod quant;
pub mod safetensors;
pub mod scaled;
pub mod tokenizer;
pub mod write;

pub use error::Error;

/// The result of every fallible call in this crate.
pub type Result<T> = std::result::Result<T, Error>;
