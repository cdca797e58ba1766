//! What every handler sees: the model, the way to the engine, the limits, the counters.

use crate::answer::{Reasoning, ToolFormat};
use crate::budget::Budget;
use crate::config::{Limits, ServerConfig};
use crate::error::ApiError;
use crate::grammars::Grammars;
use crate::http::auth::Keys;
use crate::http::host::Hosts;
use crate::link::{Call, Health, Link, Reader, Refusal};
use crate::metrics::Metrics;
use crate::text::TextModel;
use crate::work::{Work, WorkConfig, WorkError};
use bytes::Bytes;
use engine::request::{Request, Sampling};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::sync::Semaphore;

/// Bytes of a working thread's stack: JSON and templates are nested to bounded depths.
const WORK_STACK: usize = 8 << 20;

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

    /// The most tokens of a prompt: one is left for the answer.
    pub(crate) fn most_prompt(&self) -> usize {
        usize::try_from(self.context.saturating_sub(1)).unwrap_or(usize::MAX)
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
    /// Under which names it is served.
    pub hosts: Hosts,
    /// Where large bodies are worked on.
    pub work: Work,
    /// Compiles what clients hold answers to.
    pub grammars: Grammars,
    /// When the server started, in seconds since 1970.
    pub started: u64,
    /// Bytes of bodies.
    pub(crate) bodies: Arc<Budget>,
    /// Bytes of answers that are gathered.
    pub(crate) answers: Arc<Budget>,
    /// Places for those who watch.
    pub(crate) watchers: Arc<Semaphore>,
    /// The OpenAPI document, once somebody asked for it.
    pub(crate) document: OnceLock<Bytes>,
    pub(crate) draining: AtomicBool,
}

impl App {
    /// The state of a server that has just started.
    pub fn new(
        model: Model,
        link: Link,
        config: &ServerConfig,
        metrics: Arc<Metrics>,
    ) -> io::Result<Self> {
        let limits = config.limits.clone();
        let work = WorkConfig {
            name: "work",
            threads: config.work_threads,
            stack: WORK_STACK,
            waiting: limits.work_waiting,
            trim: config.trim,
        };
        let watchers = usize::try_from(limits.watchers).unwrap_or(usize::MAX);
        let grammars = Grammars::new(Arc::clone(&model.text), &limits);
        Ok(Self {
            model,
            link,
            metrics,
            keys: Keys::new(&config.api_keys, !config.share_prefix_cache),
            hosts: Hosts::new(config),
            grammars,
            work: Work::start(&work)?,
            started: crate::openai::unix_time(),
            bodies: Budget::new(limits.body_budget_bytes),
            answers: Budget::new(limits.answer_budget_bytes),
            watchers: Arc::new(Semaphore::new(watchers.min(Semaphore::MAX_PERMITS))),
            document: OnceLock::new(),
            draining: AtomicBool::new(false),
            limits,
        })
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

    /// Does work over so many bytes where it holds up nobody; see [`Work::run`].
    pub(crate) async fn compute<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        self.work.run(bytes, work).await.map_err(|e| match e {
            WorkError::Full(_) => ApiError::too_much(e.to_string()),
            WorkError::Panicked => ApiError::internal(e.to_string()),
        })
    }
}
