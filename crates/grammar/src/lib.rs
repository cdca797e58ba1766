//! Structured output: restricts the next token so that an answer matches a grammar.
//!
//! A [`Grammar`] comes from a client and is untrusted. [`Compiler::compile`] checks it against
//! [`Limits`], compiles it on a separate thread with a large stack and a time limit, and returns a
//! [`Compiled`] grammar for the model's [`Vocabulary`]. The engine creates a [`Matcher`] for each
//! answer: before a token is sampled the matcher returns a [`Mask`] with one bit per token, and
//! afterwards it accepts the chosen token. The cost of a mask is bounded in steps, not in time, so
//! that a run of the engine can be repeated.
//!
//! This is the only crate that uses llguidance.
//!
//! ```
//! use grammar::{Compiler, Grammar, Limits, Vocabulary};
//!
//! // A vocabulary of two letters and an end token.
//! let bytes = [b"a".to_vec(), b"b".to_vec(), b"<end>".to_vec()];
//! let vocabulary = Vocabulary::new(&bytes, &[2], &[2])?;
//! let compiler = Compiler::new(vocabulary, Limits::default());
//! let compiled = compiler.compile(&Grammar::Regex("ab".into()))?;
//!
//! let mut matcher = compiled.matcher();
//! assert_eq!(matcher.mask()?.words, [0b001], "only \"a\" is allowed first");
//! assert!(!matcher.accept(0)?);
//! assert_eq!(matcher.mask()?.words, [0b010]);
//! assert!(matcher.accept(1)?, "the answer is complete");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bounds;
mod compile;
mod matcher;
mod regex;
mod rewrite;
mod schema;
mod source;
mod vocabulary;

pub use bounds::{Limits, TooLarge};
pub use compile::{CompileError, Compiler};
pub use matcher::{Compiled, Mask, MaskError, Matcher};
pub use source::Grammar;
pub use vocabulary::{Token, Vocabulary, VocabularyError};
