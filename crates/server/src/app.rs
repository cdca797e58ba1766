//! What every handler sees: the model, the way to the engine, the limits, the counters.

use crate::answer::{Reasoning, ToolFormat};
use crate::config::Limits;
use crate::error::ApiError;
use crate::grammars::Grammars;
use crate::http::auth::Keys;
use crate::link::{Call, Health, Link, Reader, Refusal};
use crate::metrics::Metrics;
use crate::text::TextModel;
use engine::request::{Request, Sampling};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Text longer than this is rendered and tokenized off the threads that carry streams.
const LONG_TEXT: usize = 8 * 1024;

/// What is served.
#[derive(Clone)]
pub struct Model {
    /// Its name in `/v1/models` and in every answer.
    pub name: String,
    /// Other names by which clients may ask for it.
    pub aliases: Vec<String>,
    /// The most tokens of prompt and answer together.
    pub context: u64,
    /// Tokenizer and chat template.
    pub text: Arc<dyn TextModel>,
    /// Used where a request says nothing (the model's own generation defaults).
    pub defaults: Sampling,
    /// How it writes tool calls.
    pub tools: ToolFormat,
    /// Its marks around thinking, if it thinks.
    pub reasoning: Option<Reasoning>,
    /// The width of the vectors it makes of texts, if it makes any.
    pub embedding: Option<u32>,
}

impl Model {
    /// A model with OpenAI's defaults: temperature 1, no tools, no thinking.
    pub fn new(name: impl Into<String>, context: u64, text: Arc<dyn TextModel>) -> Self {
        Self {
            name: name.into(),
            aliases: Vec::new(),
            context,
            text,
            defaults: Sampling { temperature: 1.0, ..Sampling::default() },
            tools: ToolFormat::None,
            reasoning: None,
            embedding: None,
        }
    }

    /// 404 when another model is asked for.
    pub(crate) fn check_name(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(name) if name != self.name && !self.aliases.iter().any(|a| a == name) => {
                Err(ApiError::no_model(name, &self.name))
            }
            _ => Ok(()),
        }
    }

    /// Tokens left for the answer after a prompt of this length; at least one.
    pub(crate) fn room(&self, param: &str, prompt: usize) -> Result<u32, ApiError> {
        let prompt = prompt as u64;
        if prompt == 0 {
            return Err(ApiError::invalid(param, "the prompt is empty"));
        }
        if prompt >= self.context {
            return Err(ApiError::too_long(param, prompt, self.context.saturating_sub(1)));
        }
        Ok(u32::try_from(self.context - prompt).unwrap_or(u32::MAX))
    }
}

/// The server's state, shared by all handlers.
pub struct App {
    /// What is served.
    pub model: Model,
    /// The way to the engine.
    pub link: Link,
    /// How much of everything.
    pub limits: Limits,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Who may call.
    pub keys: Keys,
    /// Compiles what clients hold answers to.
    pub grammars: Grammars,
    /// When the server started, in seconds since 1970.
    pub started: u64,
    pub(crate) draining: AtomicBool,
}

impl App {
    /// The state of a server that has just started.
    pub fn new(
        model: Model,
        link: Link,
        limits: Limits,
        metrics: Arc<Metrics>,
        keys: Keys,
    ) -> Self {
        let started = crate::openai::unix_time();
        let grammars = Grammars::new(Arc::clone(&model.text), &limits);
        let draining = AtomicBool::new(false);
        Self { model, link, limits, metrics, keys, grammars, started, draining }
    }

    /// Whether new requests are taken, and if not, why.
    pub fn ready(&self) -> Result<(), &'static str> {
        if self.draining.load(Ordering::Relaxed) {
            return Err("the server is shutting down");
        }
        match self.link.health() {
            Health::Ready => Ok(()),
            other => Err(other.as_str()),
        }
    }

    /// Refuses early, before a body is read, when there is no room at all.
    pub(crate) fn check_room(&self) -> Result<(), ApiError> {
        self.ready().map_err(ApiError::unavailable)?;
        self.link.check_room(1).map_err(|refusal| self.refused(refusal))
    }

    /// Hands requests to the engine.
    pub(crate) fn submit(&self, requests: Vec<Request>, reader: Reader) -> Result<Call, ApiError> {
        self.ready().map_err(ApiError::unavailable)?;
        self.link.submit(requests, reader).map_err(|refusal| self.refused(refusal))
    }

    pub(crate) fn refused(&self, refusal: Refusal) -> ApiError {
        match refusal {
            Refusal::Full { inflight } => {
                self.metrics.requests_refused.inc();
                ApiError::busy(inflight)
            }
            Refusal::Down(health) => ApiError::unavailable(health.as_str()),
        }
    }

    /// Runs work over `size` bytes of text here, or on a thread of its own when it is long.
    pub(crate) async fn compute<T: Send + 'static>(
        &self,
        size: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        if size < LONG_TEXT {
            return Ok(work());
        }
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|_| ApiError::internal("the text could not be processed"))
    }
}
