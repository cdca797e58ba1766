//! Compiles the grammars of requests, away from the HTTP threads.

use crate::config::Limits;
use crate::error::ApiError;
use engine::request::Token;
use grammar::{CompileError, Compiled, Compiler, Grammar, Vocabulary};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use text::TextModel;
use tokio::sync::Semaphore;

/// Requests that may wait for a grammar at once; each occupies a thread while it waits.
const WAITING: usize = 32;

/// Compiles grammars for the vocabulary of the served model. The compiler is built at the first
/// grammar, because building it is slow and many servers never need one.
pub struct Grammars {
    shared: Arc<Shared>,
    waiting: Semaphore,
}

struct Shared {
    text: Arc<dyn TextModel>,
    limits: grammar::Limits,
    compiler: OnceLock<Result<Compiler, String>>,
}

impl Grammars {
    /// Stores the settings; builds nothing yet.
    pub fn new(text: Arc<dyn TextModel>, limits: &Limits) -> Self {
        let limits = grammar::Limits {
            bytes: limits.schema_bytes,
            time: Duration::from_millis(limits.grammar_ms),
            ..grammar::Limits::default()
        };
        let shared = Arc::new(Shared { text, limits, compiler: OnceLock::new() });
        Self { shared, waiting: Semaphore::new(WAITING) }
    }

    /// Compiles a grammar or returns it from the cache; `param` is the request field for errors.
    pub async fn compile(&self, param: &str, source: Grammar) -> Result<Compiled, ApiError> {
        let Ok(_waiting) = self.waiting.try_acquire() else {
            return Err(ApiError::unavailable("too many grammars are being compiled; retry later"));
        };
        let shared = Arc::clone(&self.shared);
        let done = tokio::task::spawn_blocking(move || {
            let make = || compiler(&*shared.text, shared.limits.clone());
            let compiler = shared.compiler.get_or_init(make);
            let compiler = compiler.as_ref().map_err(|why| CompileError::Invalid(why.clone()))?;
            compiler.compile(&source)
        });
        let done = done
            .await
            .map_err(|_| ApiError::internal("internal error: the grammar compiler panicked"))?;
        done.map_err(|error| match error {
            CompileError::Invalid(_) | CompileError::TooLarge(_) | CompileError::TooSlow(_) => {
                ApiError::invalid(param, error.to_string())
            }
            CompileError::Busy | CompileError::Full => ApiError::unavailable(error.to_string()),
        })
    }
}

/// A compiler for the vocabulary of a model, which takes a while to make.
pub fn compiler(text: &dyn TextModel, limits: grammar::Limits) -> Result<Compiler, String> {
    let tokens = 0..text.vocab();
    let bytes: Vec<Vec<u8>> =
        tokens.clone().map(|token| text.token_bytes(token).unwrap_or_default()).collect();
    let special: Vec<Token> = tokens.filter(|&token| text.is_special(token)).collect();
    let vocabulary = Vocabulary::new(&bytes, &special, text.stop_tokens())
        .map_err(|why| format!("this model does not support grammars: {why}"))?;
    Ok(Compiler::new(vocabulary, limits))
}
