//! `dacapo serve`: serves a model with the OpenAI API and a live page.

mod backend;
mod open_files;
mod tokenizer_folder;
mod watched;

pub(crate) use backend::Serving;

use crate::cli::Global;
use crate::exit::bad_input;
use crate::loading::{self, LoadArgs, Loaded};
use crate::log;
use crate::numbers::SEQUENCES;
use crate::output::note;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use engine::EngineConfig;
use engine::request::Sampling;
use graph::runner::Ran;
use model::{
    Adapter, AdapterError, AdapterReader, GraphExecutor, ModelConfig, ModelSource, Parts,
    SharedTensor, SharedUpdate, SleepError, Task, Update, UpdateError,
};
use server::answer::{Reasoning, ToolFormat};
use server::link::{self, ConfigRow, GraphInfo, PlanPicture, Rest};
use server::{EventForm, Grpc, KvEvents, Limits, Model, Reserved, Scorer, ServerConfig};
use std::hash::{BuildHasher, Hasher};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use text::{TextModel, WordText};

/// Serve a model with the OpenAI API and a live page
///
/// Listens on loopback by default; see --host. SIGTERM or Ctrl-C lets running requests finish; a
/// second signal exits at once.
#[derive(Args, Debug)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// Address or name to listen on; 0.0.0.0 is every interface
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 picks a free one
    #[arg(long, value_name = "N", default_value_t = 8000)]
    port: u16,
    /// Require this API key (may be repeated)
    #[arg(long, value_name = "KEY", env = "DACAPO_API_KEY", hide_env_values = true)]
    api_key: Vec<String>,
    /// Accept this name in the Host header (may be repeated)
    #[arg(long, value_name = "NAME", long_help = ALLOWED_HOST)]
    allowed_host: Vec<String>,
    /// Let web pages of this origin use the server, such as `https://example.com`; `*` is every origin
    /// (may be repeated)
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// Let clients with different API keys share cached prefixes
    ///
    /// By default each key has its own prefix cache, because the time that a prompt takes would
    /// reveal whether another client sent the same prefix.
    #[arg(long)]
    share_prefix_cache: bool,
    // Not a doc comment, because rustdoc would parse the brackets as a link.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(SEQUENCES))]
    #[arg(help = "Most sequences that run at once [default: 256 on a GPU, 32 on a CPU]")]
    max_batch: Option<u32>,
    /// Feed prompts in parts so small that the gap between two tokens of other answers stays below this
    ///
    /// How many prompt tokens ride with the rows that decode follows the traffic, and the times of steps measured while
    /// serving. Without it a step has as many prompt tokens as fit: prompts are done sooner, gaps are longer.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    target_itl: Option<u32>,
    /// The model name for clients [default: the model's own]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Serve the operator's routes, which change the model's memory and weights: /sleep, /wake_up, /is_sleeping,
    /// /update_weights, /v1/load_lora_adapter, /v1/unload_lora_adapter
    ///
    /// Whoever may use the server may use them, too: set an API key. SGLang's names are served as well:
    /// /release_memory_occupation, /resume_memory_occupation and /update_weights_from_disk.
    #[arg(long)]
    admin_api: bool,
    /// Let /update_weights and /v1/load_lora_adapter read from this folder and those below it (may be repeated)
    #[arg(long, value_name = "FOLDER", requires = "admin_api")]
    weight_root: Vec<PathBuf>,
    /// Give the device's memory back when no request came for so long; the next request brings it back
    ///
    /// Weights are kept in host memory meanwhile; what the prefix cache holds is forgotten, except what --kv-host-memory
    /// and --kv-disk keep.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    sleep_after: Option<u64>,
    /// Set a limit, such as inflight=64 (may be repeated)
    #[arg(long, value_name = "NAME=N", long_help = limits_help())]
    limit: Vec<String>,
    // Not a doc comment, because rustdoc would parse the address as a link.
    #[arg(long, value_name = "tcp://HOST:PORT", help_heading = "Fleet", value_parser = kv_address)]
    #[arg(
        help = "Publish what the prefix cache holds on this address, as vLLM does over ZMQ, for routers; \
                tcp://*:5557 is every interface"
    )]
    kv_events: Option<SocketAddr>,
    /// Repeat missed KV events on this address
    #[arg(long, value_name = "tcp://HOST:PORT", help_heading = "Fleet", value_parser = kv_address)]
    #[arg(requires = "kv_events")]
    kv_events_replay: Option<SocketAddr>,
    /// The topic of KV events, such as kv@POD@MODEL for llm-d
    #[arg(long, value_name = "TOPIC", help_heading = "Fleet", default_value = "")]
    kv_events_topic: String,
    /// map: events as vLLM from 0.24 on writes them; array: as before
    #[arg(long, value_name = "FORM", help_heading = "Fleet", default_value = "map")]
    kv_events_form: Form,
    /// Serve vLLM's gRPC services on this address, such as 127.0.0.1:50051, for Dynamo's sidecar and other clients
    ///
    /// A model that is one GGUF file gets a folder with its tokenizer in Dacapo's cache. Keys, limits and draining are
    /// those of HTTP.
    #[arg(long, value_name = "HOST:PORT", help_heading = "Fleet", value_parser = grpc_address)]
    grpc: Option<SocketAddr>,
    /// Write a record of every step to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Log as JSON, one object per line
    #[arg(long)]
    log_json: bool,
}

/// How KV events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// Maps
    Map,
    /// Arrays
    Array,
}

/// The address of `HOST:PORT`.
fn grpc_address(text: &str) -> Result<SocketAddr, String> {
    if !server::HAS_GRPC {
        return Err("this build cannot serve gRPC: build it with --features grpc".into());
    }
    let form = "expected HOST:PORT, such as 127.0.0.1:50051";
    let (host, port) = text.rsplit_once(':').ok_or(form)?;
    let port = port.parse().map_err(|_| form)?;
    listen_address(host, port).map_err(|_| format!("{host}: no such address"))
}

/// The address of `tcp://HOST:PORT`; `*` is every interface.
fn kv_address(text: &str) -> Result<SocketAddr, String> {
    let form = "expected tcp://HOST:PORT, such as tcp://*:5557";
    let (host, port) =
        text.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or(form)?;
    let port = port.parse().map_err(|_| form)?;
    let host = if host == "*" { "0.0.0.0" } else { host };
    listen_address(host, port).map_err(|_| format!("{host}: no such address"))
}

const ALLOWED_HOST: &str = "\
Accept this name in the Host header (may be repeated).

On loopback without API keys, only IP addresses, localhost and these names are accepted; others get
421, because a web page could otherwise use DNS rebinding to read responses. With keys, or on another
address, every name is accepted unless some are listed here.";

fn limits_help() -> String {
    let rows = Limits::TABLE
        .iter()
        .map(|row| format!("  {}={}\n      {}", row.name, row.default, row.doc));
    let rows: Vec<String> = rows.collect();
    format!("Set a limit (may be repeated). The limits and their defaults:\n{}", rows.join("\n"))
}

pub(crate) fn run(args: &ServeArgs, global: &Global) -> Result<()> {
    let mut config = server_config(args)?;
    config.log_lines_dropped = log::start(args.log_json).context("starting the log thread")?;
    open_files::raise_limit(&mut config.limits);
    // Before the model is loaded, so that a port in use is found at once.
    let reserved = Reserved::new(&config)?;
    let max_batch = |kind| args.max_batch.unwrap_or_else(|| loading::default_batch(kind));
    let mut loaded = loading::load_suited(&args.load, global, max_batch)?;
    let memory = loaded.memory();
    if !args.log_json {
        note!("{}", loaded.graphs.table().trim_end());
        note!("{}", loaded.executor.runners().recording());
    }
    note!("memory: {memory}");
    // Random, so that clients cannot construct prompts that collide in the prefix tree.
    let prefix_seed = std::hash::RandomState::new().build_hasher().finish();
    let target_gap = args.target_itl.map(|ms| 1000 * u64::from(ms));
    let cache_events = config.kv_events.is_some();
    let engine = EngineConfig { prefix_seed, target_gap, cache_events, ..loaded.engine_config() };
    if let Some(grpc) = &mut config.grpc {
        grpc.model_id = model_id(&args.load, &loaded)?;
    }
    let info = about(&loaded);
    let model = model(args, &mut loaded);
    load_adapters(args, &mut loaded, &model)?;
    if !model.generates && config.limits.inflight == Limits::default().inflight {
        // One call may have as many texts as are allowed, each of which takes a few milliseconds.
        config.limits.inflight = 2 * config.limits.inputs;
    }
    let backend = Serving::new(loaded.executor, engine, info);
    let name = model.name.clone();
    server::serve(config, reserved, link::once(backend), model, |address| {
        let url = url(address);
        note!("serving {name} at {url} (a page; the OpenAI API is at {url}v1)");
    })?;
    Ok(())
}

/// Loads the adapters that the command line names.
fn load_adapters(args: &ServeArgs, loaded: &mut Loaded, model: &Model) -> Result<()> {
    for (name, folder) in args.load.lora() {
        let adapter = loaded.executor.read_adapter(folder);
        let adapter = adapter.map_err(|error| bad_input(format!("--lora {name}: {error}")))?;
        // Random, so that no page of another adapter is ever taken for one of this.
        let number = std::hash::RandomState::new().build_hasher().finish() | 1;
        note!("adapter {name}: rank {}", adapter.rank());
        loaded.executor.add_adapter(number, adapter);
        if *name == model.name || !model.adapters.insert(name, number) {
            return Err(bad_input(format!("--lora {name}: the name is used twice")));
        }
    }
    Ok(())
}

/// The model as routers find it: a folder with its tokenizer, or, of random weights, its name.
fn model_id(load: &LoadArgs, loaded: &Loaded) -> Result<String> {
    match load.source()? {
        ModelSource::Checkpoint(path) => {
            let folder = tokenizer_folder::of(&path, &loaded.config)?;
            folder.into_os_string().into_string().map_err(|name| {
                bad_input(format!("{}: --grpc needs a path in UTF-8", name.to_string_lossy()))
            })
        }
        ModelSource::Dummy { .. } => Ok(loaded.name.clone()),
    }
}

/// The URL of a bound address; one of every interface is shown as this machine.
fn url(address: SocketAddr) -> String {
    match address.ip().is_unspecified() {
        true => format!("http://localhost:{}/", address.port()),
        false => format!("http://{address}/"),
    }
}

/// The address of an IP address or a name, IPv4 if it has both.
fn listen_address(host: &str, port: u16) -> Result<SocketAddr> {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let found: Vec<SocketAddr> = match (host, port).to_socket_addrs() {
        Ok(found) => found.collect(),
        Err(error) => return Err(bad_input(format!("--host {host}: {error}"))),
    };
    let four = found.iter().find(|address| address.is_ipv4());
    let first = four.or(found.first());
    first.copied().ok_or_else(|| bad_input(format!("--host {host}: no such address")))
}

fn server_config(args: &ServeArgs) -> Result<ServerConfig> {
    args.api_key.iter().try_for_each(|key| check_key(key))?;
    let mut config = ServerConfig {
        listen: listen_address(&args.host, args.port)?,
        api_keys: args.api_key.clone(),
        allowed_hosts: args.allowed_host.clone(),
        allow_origins: args.allow_origin.clone(),
        share_prefix_cache: args.share_prefix_cache,
        admin: args.admin_api,
        weight_roots: weight_roots(&args.weight_root)?,
        sleep_after: args.sleep_after.map(Duration::from_secs),
        // The model is known when it is loaded.
        grpc: args.grpc.map(|listen| Grpc { listen, model_id: String::new() }),
        kv_events: kv_events(args)?,
        trim: Some(device::return_memory),
        trace: args.trace.clone(),
        ..ServerConfig::default()
    };
    for limit in &args.limit {
        let parsed = limit.split_once('=').and_then(|(name, n)| Some((name, n.parse().ok()?)));
        let (name, value) =
            parsed.ok_or_else(|| bad_input(format!("--limit {limit}: expected NAME=NUMBER")))?;
        config.limits.set(name, value).map_err(|why| bad_input(format!("--limit {why}")))?;
    }
    Ok(config)
}

/// The folders without links.
fn weight_roots(roots: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let real = |root: &PathBuf| {
        let real = root.canonicalize();
        real.map_err(|error| bad_input(format!("--weight-root {}: {error}", root.display())))
    };
    roots.iter().map(real).collect()
}

fn kv_events(args: &ServeArgs) -> Result<Option<KvEvents>> {
    let Some(listen) = args.kv_events else { return Ok(None) };
    if !args.load.shares_prefixes() {
        return Err(bad_input("--kv-events has nothing to tell with --no-prefix-cache"));
    }
    let form = match args.kv_events_form {
        Form::Map => EventForm::Map,
        Form::Array => EventForm::Array,
    };
    let topic = args.kv_events_topic.clone();
    Ok(Some(KvEvents { listen, replay: args.kv_events_replay, topic, form }))
}

/// Refuses a key that is empty or cannot be sent in a header.
fn check_key(key: &str) -> Result<()> {
    let wrong = match key {
        key if key.trim().is_empty() => "is empty: set a key, or omit it to serve without one",
        key if key.trim() != key => "begins or ends with white space, which clients cannot send",
        key if key.chars().any(char::is_control) => {
            "has a control character, which clients cannot send"
        }
        _ => return Ok(()),
    };
    Err(bad_input(format!("--api-key (or DACAPO_API_KEY) {wrong}")))
}

/// The served model, as clients see it.
fn model(args: &ServeArgs, loaded: &mut Loaded) -> Model {
    let name = args.served_model_name.clone().unwrap_or_else(|| loaded.name.clone());
    let geometry = engine::exec::Executor::geometry(&loaded.executor);
    let whole = engine::exec::Executor::whole_prompts(&loaded.executor);
    let pages = u64::from(geometry.pages_per_seat) * u64::from(geometry.page_size);
    let (context, generates) = (whole.map_or(pages, u64::from), whole.is_none());
    let at_once = geometry.seats;
    let embedding = engine::exec::Executor::hidden(&loaded.executor);
    let vocab = loaded.config.vocab as u32;
    let Some(text) = loaded.take_text() else {
        let text = WordText::new(vocab, loaded.config.eos.clone());
        let plain = Model::new(name, context, Arc::new(text));
        return Model { embedding, generates, at_once, ..plain };
    };
    let text = text.with_kinds(loaded.config.token_types as u32);
    let scorer = scorer(&loaded.config, embedding.is_some());
    let (tools, reasoning) = (ToolFormat::of(&text), Reasoning::of(&text));
    let suggested = loaded.config.sampling;
    let plain = Model::new(name, context, Arc::new(text) as Arc<dyn TextModel>);
    let defaults = Sampling {
        temperature: suggested.temperature.unwrap_or(plain.defaults.temperature),
        top_p: suggested.top_p.unwrap_or(plain.defaults.top_p),
        top_k: suggested.top_k.unwrap_or(plain.defaults.top_k),
        min_p: suggested.min_p.unwrap_or(plain.defaults.min_p),
        ..plain.defaults.clone()
    };
    Model { defaults, tools, reasoning, embedding, scorer, generates, at_once, ..plain }
}

/// How a model scores texts.
fn scorer(config: &ModelConfig, embeds: bool) -> Option<Scorer> {
    match config.task {
        Task::Classify(classes) => {
            Some(Scorer::Classes { labels: config.labels.clone(), apart: classes.apart })
        }
        Task::Compare { .. } => Some(Scorer::Compare),
        Task::Generate | Task::Embed(_) => embeds.then_some(Scorer::Cosine),
    }
}

/// Constant data for the page.
pub(crate) fn about(loaded: &Loaded) -> GraphInfo {
    let row = |key: &str, value: String, reason: &str| ConfigRow {
        key: key.into(),
        value,
        reason: reason.into(),
    };
    let config = &loaded.config;
    let geometry = engine::exec::Executor::geometry(&loaded.executor);
    let about = vec![
        row("model", loaded.name.clone(), config.family),
        row("device", loaded.device.clone(), ""),
        row("layers", config.layers.to_string(), ""),
        row("memory", loaded.memory().to_string(), "at most; --kv-cache"),
        row("pages", geometry.pages.to_string(), "--kv-cache"),
        row("page size", geometry.page_size.to_string(), "tokens"),
        row("seats", geometry.seats.to_string(), "--max-batch"),
    ];
    let decisions = loaded.graphs.decisions.iter().map(|decision| ConfigRow {
        key: decision.path.into(),
        value: decision.value.clone(),
        reason: match decision.why.is_empty() {
            true => decision.source.to_string(),
            false => format!("{}: {}", decision.source, decision.why),
        },
    });
    let runners = loaded.executor.runners();
    let plans = runners.decode.plans().chain(runners.prefill.plans());
    // A graph of several steps has the same nodes as the graph of one step.
    let plans = plans.filter(|plan| plan.key.form != graph::Form::Repeated);
    let plans = plans.map(|plan| PlanPicture { bucket: plan.key.to_string(), svg: plan.svg() });
    GraphInfo { about, config: decisions.collect(), plans: plans.collect() }
}

impl watched::Traced for GraphExecutor {
    fn last(&self) -> Option<&Ran> {
        self.last_ran()
    }

    fn ran_within(&self) -> Option<Duration> {
        let on_its_own = self.device().gpu().is_some();
        (!on_its_own).then(|| self.runners().replay_call())
    }

    fn spec_use(&self) -> Option<&model::SpecUse> {
        GraphExecutor::spec_use(self)
    }

    fn sleep(&mut self, parts: link::Parts, keep: bool) -> Result<(), SleepError> {
        GraphExecutor::sleep(self, parts_of(parts), keep)
    }

    fn wake(&mut self, parts: link::Parts, reload: bool) -> Result<(), SleepError> {
        GraphExecutor::wake(self, parts_of(parts), reload)
    }

    fn check_update(&self, path: &Path) -> Result<Update, UpdateError> {
        GraphExecutor::check_update(self, path)
    }

    fn check_shared(&self, tensors: &[SharedTensor]) -> Result<SharedUpdate, UpdateError> {
        self.check_shared(tensors)
    }

    fn update_shared(&mut self, update: SharedUpdate) -> Result<(), UpdateError> {
        self.update_shared(update)
    }

    fn update(&mut self, update: Update) -> Result<(), UpdateError> {
        GraphExecutor::update(self, update)
    }

    fn adapter_reader(&self) -> Result<AdapterReader, AdapterError> {
        self.adapter_reader()
    }

    fn load_adapter(&mut self, number: u64, adapter: Arc<Adapter>) {
        self.add_adapter(number, adapter);
    }

    fn unload_adapter(&mut self, number: u64) {
        self.remove_adapter(number);
    }

    fn rest(&self) -> Rest {
        match (self.asleep(), self.lacks_weights()) {
            (Parts::NONE, false) => Rest::Awake,
            (Parts::NONE, true) => Rest::NoWeights,
            _ => Rest::Asleep,
        }
    }

    fn expert_loads(&self) -> Vec<graph::runner::ExpertLoad> {
        self.expert_loads().unwrap_or_else(|error| {
            tracing::warn!(%error, "what experts did cannot be read");
            Vec::new()
        })
    }
}

fn parts_of(parts: link::Parts) -> Parts {
    Parts { weights: parts.weights, kv: parts.kv }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_to_listen_on() {
        for (host, shown) in [
            ("127.0.0.1", "http://127.0.0.1:80/"),
            ("localhost", "http://127.0.0.1:80/"),
            ("0.0.0.0", "http://localhost:80/"),
            ("::1", "http://[::1]:80/"),
            ("[::1]", "http://[::1]:80/"),
        ] {
            assert_eq!(url(listen_address(host, 80).unwrap()), shown, "{host}");
        }
        let error = listen_address("no such host", 80).unwrap_err();
        assert_eq!(crate::exit::code(&error), crate::exit::BAD_INPUT);
    }

    #[test]
    fn invalid_keys_are_refused() {
        for wrong in ["", " ", "\n", "key\n", " key", "a\u{7f}b"] {
            let error = check_key(wrong).unwrap_err();
            assert_eq!(crate::exit::code(&error), crate::exit::BAD_INPUT, "{wrong:?}");
            assert!(
                !error.to_string().contains(wrong) || wrong.trim().is_empty(),
                "keys are not shown"
            );
        }
        check_key("sk-1").unwrap();
        check_key("two words").unwrap();
    }
}
