//! The state that all handlers share: model, engine link, limits, metrics.

use crate::answer::{Reasoning, ToolFormat};
use crate::budget::Budget;
use crate::config::{Limits, ServerConfig};
use crate::error::ApiError;
use crate::grammars::Grammars;
use crate::http::auth::Keys;
use crate::http::cors::Origins;
use crate::http::host::Hosts;
use crate::link::{Call, Consumer, Health, Link, Refusal};
use crate::metrics::Metrics;
use crate::openai::responses::store::Store;
use crate::openai::structured::Sourced;
use crate::work::{Work, WorkConfig, WorkError};
use bytes::Bytes;
use engine::request::{Request, Sampling};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, RwLock};
use text::TextModel;
use tokio::sync::Semaphore;

/// Stack size of a worker thread, enough for the bounded nesting of JSON and templates.
const WORK_STACK: usize = 8 << 20;

/// How a model scores texts and pairs of texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scorer {
    /// The cosine between the vectors of two texts.
    Cosine,
    /// The probabilities of labels.
    Classes {
        /// The labels' names.
        labels: Vec<String>,
        /// Whether labels are independent of each other; else their probabilities add up to 1.
        apart: bool,
    },
    /// The second one's share of the probabilities of two tokens.
    Compare,
}

/// Most adapters that have a label of their own in metrics.
const MOST_LABELS: usize = 256;
/// The label of the others.
const OTHERS: &str = "(others)";

/// The adapters that are loaded: the number of each by its name.
#[derive(Clone, Debug, Default)]
pub struct AdapterNames(Arc<RwLock<BTreeMap<String, Named>>>);

/// An adapter that has a name.
#[derive(Clone, Copy, Debug)]
struct Named {
    number: u64,
    /// It has a label of its own in metrics.
    labelled: bool,
}

impl AdapterNames {
    /// The number of an adapter.
    pub(crate) fn get(&self, name: &str) -> Option<u64> {
        let names = self.0.read().unwrap_or_else(|e| e.into_inner());
        names.get(name).map(|named| named.number)
    }

    /// Adds an adapter; false if the name is taken.
    pub fn insert(&self, name: &str, number: u64) -> bool {
        let mut names = self.0.write().unwrap_or_else(|e| e.into_inner());
        let free = !names.contains_key(name);
        if free {
            let labelled = names.values().filter(|named| named.labelled).count() < MOST_LABELS;
            names.insert(name.into(), Named { number, labelled });
        }
        free
    }

    /// The label of an adapter in metrics: its name, or [`OTHERS`] if there are too many.
    pub(crate) fn label(&self, number: u64) -> Option<String> {
        let names = self.0.read().unwrap_or_else(|e| e.into_inner());
        let (name, named) = names.iter().find(|(_, named)| named.number == number)?;
        Some(if named.labelled { name.clone() } else { OTHERS.into() })
    }

    /// Takes an adapter away.
    pub(crate) fn remove(&self, name: &str) {
        self.0.write().unwrap_or_else(|e| e.into_inner()).remove(name);
    }

    /// The names, in order.
    pub(crate) fn names(&self) -> Vec<String> {
        self.0.read().unwrap_or_else(|e| e.into_inner()).keys().cloned().collect()
    }
}

/// The served model.
#[derive(Clone)]
pub struct Model {
    /// The name in `/v1/models` and in every response.
    pub name: String,
    /// Other names that clients may send as `model`.
    pub aliases: Vec<String>,
    /// The most tokens of prompt and answer together (the context length).
    pub context: u64,
    /// Tokenizer and chat template.
    pub text: Arc<dyn TextModel>,
    /// The model's generation defaults, for fields that a request leaves out.
    pub defaults: Sampling,
    /// The format of its tool calls.
    pub tools: ToolFormat,
    /// The tags around its reasoning, if it has any.
    pub reasoning: Option<Reasoning>,
    /// The width of its embeddings, if it supports them.
    pub embedding: Option<u32>,
    /// How it scores texts and pairs of texts, if it does.
    pub scorer: Option<Scorer>,
    /// Whether it generates text; if not, it only makes vectors of texts.
    pub generates: bool,
    /// Sequences that run at once; others wait.
    pub at_once: u32,
    /// Its adapters, which clients name as `model`.
    pub adapters: AdapterNames,
}

impl Model {
    /// A model with OpenAI's defaults: temperature 1, no format of tool calls of its own, no
    /// reasoning.
    pub fn new(name: impl Into<String>, context: u64, text: Arc<dyn TextModel>) -> Self {
        Self {
            name: name.into(),
            aliases: Vec::new(),
            context,
            text,
            defaults: Sampling { temperature: 1.0, ..Sampling::default() },
            tools: ToolFormat::Generic { system: true },
            reasoning: None,
            embedding: None,
            scorer: None,
            generates: true,
            at_once: u32::MAX,
            adapters: AdapterNames::default(),
        }
    }

    /// 404 if the request names another model.
    pub(crate) fn check_name(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(name) if name != self.name && !self.aliases.iter().any(|a| a == name) => {
                Err(ApiError::no_model(name, &self.name))
            }
            _ => Ok(()),
        }
    }

    /// 404 if the request names neither this model nor one of its adapters.
    pub(crate) fn check_served(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked.and_then(|name| self.adapters.get(name)) {
            Some(_) => Ok(()),
            None => self.check_name(asked),
        }
    }

    /// The number of the adapter that a request names; 0 for the model itself.
    pub(crate) fn adapter(&self, asked: Option<&str>) -> u64 {
        asked.and_then(|name| self.adapters.get(name)).unwrap_or(0)
    }

    /// The longest prompt in tokens: one token must remain for the answer, if there is one.
    pub(crate) fn most_prompt(&self) -> usize {
        let answer = u64::from(self.generates);
        usize::try_from(self.context.saturating_sub(answer)).unwrap_or(usize::MAX)
    }

    /// Tokens that remain for the answer after a prompt of this length; at least one, if it generates.
    pub(crate) fn room(&self, param: &str, prompt: usize) -> Result<u32, ApiError> {
        let prompt = prompt as u64;
        if prompt == 0 {
            return Err(ApiError::invalid(param, "the prompt is empty"));
        }
        let most = self.most_prompt() as u64;
        if prompt > most {
            return Err(ApiError::too_long(param, prompt, most));
        }
        Ok(u32::try_from(self.context - prompt).unwrap_or(u32::MAX))
    }
}

/// The server's state, shared by all handlers.
pub struct App {
    /// The served model.
    pub model: Model,
    /// The connection to the engine's thread.
    pub link: Link,
    /// The limits in force.
    pub limits: Limits,
    /// Counters and gauges.
    pub metrics: Arc<Metrics>,
    /// The accepted API keys.
    pub keys: Keys,
    /// The accepted names in the `Host` header.
    pub hosts: Hosts,
    /// The origins whose pages may use the server.
    pub(crate) origins: Origins,
    /// The worker threads for large bodies.
    pub work: Work,
    /// The compiler for grammars and schemas of clients.
    pub grammars: Grammars,
    /// The start time, in seconds since 1970.
    pub started: u64,
    /// The memory budget of request bodies.
    pub(crate) bodies: Arc<Budget>,
    /// The memory budget of responses that are not streamed.
    pub(crate) answers: Arc<Budget>,
    /// Finished responses, for requests that continue them.
    pub(crate) responses: Store,
    /// Limits the number of open live views.
    pub(crate) watchers: Arc<Semaphore>,
    /// The OpenAPI document, built at the first request for it.
    pub(crate) document: OnceLock<Bytes>,
    /// Whether the operator's routes are served.
    pub(crate) admin: bool,
    /// Folders that weights may be read from.
    pub(crate) weight_roots: Vec<PathBuf>,
    /// Health checks fail, so that routers send no more requests; those that come are still accepted.
    pub(crate) leaving: AtomicBool,
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
            origins: Origins::new(&config.allow_origins),
            grammars,
            work: Work::start(&work)?,
            started: crate::openai::unix_time(),
            bodies: Budget::new(limits.body_budget_bytes),
            answers: Budget::new(limits.answer_budget_bytes),
            responses: Store::new(limits.responses, limits.responses_bytes),
            watchers: Arc::new(Semaphore::new(watchers.min(Semaphore::MAX_PERMITS))),
            document: OnceLock::new(),
            admin: config.admin,
            weight_roots: config.weight_roots.clone(),
            leaving: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            limits,
        })
    }

    /// Whether new requests are accepted; if not, the reason.
    pub fn ready(&self) -> Result<(), &'static str> {
        if self.draining.load(Ordering::Relaxed) {
            return Err("the server is shutting down");
        }
        match self.link.health() {
            Health::Ready => Ok(()),
            other => Err(other.as_str()),
        }
    }

    /// Refuses a request before its body is read if the server cannot accept any.
    pub(crate) fn check_room(&self) -> Result<(), ApiError> {
        self.ready().map_err(ApiError::unavailable)?;
        self.link.check_room(1).map_err(|refusal| self.refused(refusal))
    }

    /// Compiles the grammar of a call's answers and submits its requests to the engine.
    pub(crate) async fn submit(
        &self,
        mut requests: Vec<Request>,
        grammar: Option<Sourced>,
        consumer: Consumer,
    ) -> Result<Call, ApiError> {
        if let Some((param, source)) = grammar {
            let compiled = self.grammars.compile(param, source).await?;
            for request in &mut requests {
                request.sampling.grammar = Some(compiled.clone());
            }
        }
        if !self.model.generates && requests.iter().any(|request| request.embed.is_none()) {
            return Err(ApiError::no_generation());
        }
        self.ready().map_err(ApiError::unavailable)?;
        self.link.submit(requests, consumer).map_err(|refusal| self.refused(refusal))
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

    /// Runs `work` over `bytes` bytes without blocking an HTTP thread; see [`Work::run`].
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
