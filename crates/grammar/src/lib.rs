//! Structured output: which tokens may come next.
//!
//! A client's [`Grammar`] is hostile text. [`Compiler::compile`] holds it to the bounds of
//! [`Limits`], compiles it on a thread of its own with a large stack and a time limit, and gives a
//! [`Compiled`] grammar over the model's [`Vocabulary`]. The engine takes a [`Matcher`] from it for
//! each answer: before each sampled token the matcher yields a mask, one bit per token, and then
//! takes the token that was chosen. What a mask may cost is bounded in steps, not in time, so that a
//! run of the engine can be repeated.
//!
//! This crate is the only one that knows llguidance.

mod bounds;
mod compile;
mod matcher;
mod regex;
mod schema;
mod source;
mod vocabulary;

pub use bounds::{Limits, TooLarge};
pub use compile::{CompileError, Compiler};
pub use matcher::{Compiled, Mask, MaskError, Matcher};
pub use source::Grammar;
pub use vocabulary::{Token, Vocabulary, VocabularyError};
