//! Loads the model named on the command line onto a device.

mod bar;

use crate::cli::Global;
use crate::exit::bad_input;
use crate::graph_args::GraphArgs;
use crate::models::{self, DEFAULT, HubEnv, ModelName};
use crate::numbers::{self, TOKENS};
use crate::output::note;
use crate::profile;
use crate::sampling::SamplingArgs;
use anyhow::{Context, Result};
use bar::Bar;
use clap::{Args, ValueEnum};
use device::cpu::{Limit, Numerics};
use device::{Device, DeviceKind, Region};
use engine::exec::Geometry;
use engine::request::Sampling;
use engine::{Engine, EngineConfig};
use formats::chat::ChatTemplate;
use formats::checkpoint::Checkpoint;
use formats::tokenizer::Tokenizer;
use grammar::{Compiler, Vocabulary, VocabularyError};
use graph::config::Resolved;
use graph::program::{Pooling, Program};
use model::{
    AdapterRoom, Embedding, GraphExecutor, KeepOptions, LoadOptions, Method, ModelConfig,
    ModelSource, Precision, Speculation, Task, load_executor,
};
use serde::Serialize;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use text::CheckpointText;

/// The model, and how it is loaded.
#[derive(Args, Clone, Debug)]
pub(crate) struct LoadArgs {
    // Not a doc comment, because rustdoc would parse the brackets as a link.
    #[arg(default_value = DEFAULT, help = "A folder, a .gguf file, a hub id org/name[@revision], or `gemma3-270m`")]
    pub(crate) model: String,
    /// auto: the model's files; dummy: random weights for a bundled shape such as qwen3-0.6b
    #[arg(long, value_name = "FORMAT", default_value = "auto", help_heading = "Loading")]
    load_format: LoadFormat,
    /// Most tokens of prompt and answer together; the model's own limit still applies
    #[arg(long, value_name = "N", default_value_t = 8192, help_heading = "Loading")]
    #[arg(value_parser = clap::value_parser!(u32).range(16..=*TOKENS.end()))]
    max_context: u32,
    /// Fraction of the free device memory to use
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, help_heading = "Loading")]
    #[arg(value_parser = numbers::share)]
    memory_share: f64,
    // Not a doc comment, because rustdoc would parse the brackets as a link.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Loading")]
    #[arg(
        help = "Memory for the KV cache, such as 512MiB or 4GiB [default: the rest of --memory-share on \
                a GPU; on a CPU 1GiB, or one context of --max-context tokens if that is more]"
    )]
    kv_cache: Option<u64>,
    // Not doc comments, because rustdoc would parse the brackets as links.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Loading")]
    #[arg(
        help = "Keep evicted KV pages in so much pinned host memory, such as 16GiB [default: none]"
    )]
    kv_host_memory: Option<u64>,
    #[arg(long, value_name = "FOLDER:SIZE", value_parser = parse_disk, help_heading = "Loading")]
    #[arg(
        help = "Keep evicted KV pages in a file in this folder, such as /var/kv:64GiB [default: none]"
    )]
    kv_disk: Option<(PathBuf, u64)>,
    // Not doc comments, because rustdoc would parse the brackets as links.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Loading")]
    #[arg(
        help = "Memory for the state of recurrent layers behind shared prefixes [default: a sixteenth of what is \
                free, on a CPU at most 256MiB]"
    )]
    kv_states: Option<u64>,
    /// Keep all KV pages of layers that see a window of tokens, also those that no later token sees
    #[arg(long, help_heading = "Loading")]
    keep_windows: bool,
    /// Do not share KV pages between requests with equal prefixes
    #[arg(long, help_heading = "Loading")]
    no_prefix_cache: bool,
    // Not a doc comment, because rustdoc would parse the brackets as a link.
    #[arg(long, value_name = "METHOD[:K]", help_heading = "Loading")]
    #[arg(
        help = "Verify up to K drafts (1 to 8) of each answer in one step; ngram: what followed the last tokens earlier; \
                draft: from a smaller model; eagle3: from a head; mtp: \
                from a layer of the model's own [default K: 3]"
    )]
    spec: Option<Speculation>,
    /// The model that drafts, for --spec draft one with the same tokens, for --spec eagle3 a head
    #[arg(long, value_name = "MODEL", requires = "spec", help_heading = "Loading")]
    spec_model: Option<String>,
    /// Run these steps, such as 100-110, op by op and write the device times of their nodes to --profile-file
    #[arg(long, value_name = "A-B", value_parser = profile::parse_steps, help_heading = "Loading")]
    profile_steps: Option<RangeInclusive<u64>>,
    /// The file of --profile-steps, for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE", default_value = "profile.json", help_heading = "Loading")]
    profile_file: PathBuf,
    /// Load this adapter, a folder that peft saved, under a name that requests give as `model` (may be repeated)
    #[arg(long, value_name = "NAME=FOLDER", value_parser = parse_adapter, help_heading = "Loading")]
    lora: Vec<(String, PathBuf)>,
    // Not doc comments, because rustdoc would parse the brackets as links.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Loading")]
    #[arg(
        help = "Adapters on the device at once; others wait in host memory [default: those of --lora, at most 8]"
    )]
    max_loras: Option<u32>,
    /// The largest rank of an adapter
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Loading")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=512))]
    max_lora_rank: u32,
    /// auto: what the model's files say; embed: vectors of texts; rerank: scores of pairs by `yes` and `no`
    #[arg(long, value_name = "TASK", default_value = "auto", help_heading = "Loading")]
    task: TaskChoice,
    #[command(flatten)]
    graph: GraphArgs,
}

impl LoadArgs {
    /// Where evicted pages are kept.
    fn keep(&self) -> Result<KeepOptions> {
        let keep = KeepOptions { host_bytes: self.kv_host_memory, disk: self.kv_disk.clone() };
        if self.no_prefix_cache && keep != KeepOptions::default() {
            let what = "--kv-host-memory and --kv-disk keep pages of the prefix cache: remove --no-prefix-cache";
            return Err(bad_input(what));
        }
        Ok(keep)
    }

    /// Room for adapters, if some were asked for.
    fn adapters(&self) -> Option<AdapterRoom> {
        let given = self.lora.len().min(8) as u32;
        let slots = self.max_loras.or((given > 0).then_some(given))?;
        Some(AdapterRoom { slots, rank: self.max_lora_rank })
    }

    /// The same with so many slots for adapters, or none.
    pub(crate) fn with_slots(&self, slots: Option<u32>) -> LoadArgs {
        LoadArgs { lora: Vec::new(), max_loras: slots, ..self.clone() }
    }

    /// The adapters to load: names and folders.
    pub(crate) fn lora(&self) -> &[(String, PathBuf)] {
        &self.lora
    }

    /// Whether requests with equal prefixes share pages.
    pub(crate) fn shares_prefixes(&self) -> bool {
        !self.no_prefix_cache
    }

    /// The same with an equal share of the free memory, where `left` models are still to be loaded.
    pub(crate) fn one_of(&self, left: usize) -> LoadArgs {
        LoadArgs { memory_share: self.memory_share / left.max(1) as f64, ..self.clone() }
    }

    /// The same for another model, from its files.
    pub(crate) fn of_model(&self, model: &str) -> LoadArgs {
        LoadArgs { model: model.to_owned(), ..self.clone() }
    }

    /// The same with so many drafts of every sequence.
    pub(crate) fn with_drafts(&self, drafts: Option<u32>) -> LoadArgs {
        let ngram = |drafts| Speculation { method: Method::Ngram, drafts };
        LoadArgs { spec: drafts.map(ngram).or(self.spec), ..self.clone() }
    }

    /// Most drafts of a sequence in a step.
    pub(crate) fn drafts(&self) -> u32 {
        self.spec.map_or(0, |spec| spec.drafts)
    }

    /// The source of the model that drafts, if there is one. Refuses one whose tokens are others than those of `text`.
    fn drafter(&self, text: Option<&ModelText>) -> Result<Option<ModelSource>> {
        let Some(name) = &self.spec_model else { return Ok(None) };
        let source = source(name, self.load_format)?;
        let other = self.spec.is_some_and(|spec| spec.method == Method::Draft);
        if let (true, ModelSource::Checkpoint(path), Some(text)) = (other, &source, text) {
            let (own, wanted) = (read_text(path)?.tokenizer, &text.tokenizer);
            let differs = |id: &u32| own.token_bytes(*id) != wanted.token_bytes(*id);
            let most = own.vocab_size().max(wanted.vocab_size()) as u32;
            if let Some(id) = (0..most).find(differs) {
                let [own, wanted] =
                    [&own, wanted].map(|of| of.token_bytes(id).escape_ascii().to_string());
                return Err(bad_input(format!(
                    "{name} cannot draft for {}: token {id} is `{own}` there and `{wanted}` here",
                    self.model
                )));
            }
        }
        Ok(Some(source))
    }

    /// The same for contexts of so many tokens.
    pub(crate) fn for_context(&self, tokens: u32) -> LoadArgs {
        LoadArgs { max_context: tokens, ..self.clone() }
    }

    /// Where the weights come from.
    pub(crate) fn source(&self) -> Result<ModelSource> {
        source(&self.model, self.load_format)
    }

    /// The name of the format on the command line.
    pub(crate) fn format_name(&self) -> String {
        let value = self.load_format.to_possible_value();
        value.map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// What the plans of its graphs depend on, as flags of `dacapo graph`.
    pub(crate) fn graph_line(&self) -> Vec<String> {
        let mut line = vec!["--max-context".to_owned(), self.max_context.to_string()];
        if let Some(spec) = &self.spec {
            line.extend(["--spec".to_owned(), spec.to_string()]);
        }
        if let Some(model) = &self.spec_model {
            line.extend(["--spec-model".to_owned(), model.clone()]);
        }
        if let Some(config) = &self.graph.given.config {
            line.extend(["--graph-config".to_owned(), config.clone()]);
        }
        let flags = self.graph.given.flags.iter();
        line.extend(flags.flat_map(|(flag, value)| [format!("--{flag}"), value.clone()]));
        line
    }

    /// The same with one graph flag set.
    pub(crate) fn with_graph_flag(&self, flag: &str, value: &str) -> LoadArgs {
        let mut args = self.clone();
        args.graph.given.flags.insert(flag.into(), value.into());
        args
    }
}

/// How many sequences run at once for several users.
pub(crate) fn default_batch(kind: DeviceKind) -> u32 {
    match kind {
        DeviceKind::Cuda => 256,
        DeviceKind::Cpu => 32,
    }
}

/// A number of bytes, with or without a unit of 1024.
fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err("use bytes, or a size such as 512MiB or 4GiB".into()),
    };
    let number: u64 = number.parse().map_err(|_| "not a number of bytes")?;
    match number.checked_mul(1 << shift) {
        Some(0) => Err("the size must be more than 0".into()),
        // More than any machine has, and small enough that sums do not overflow.
        Some(size) if size <= 1 << 50 => Ok(size),
        _ => Err("the size is too large".into()),
    }
}

/// A name and a folder.
fn parse_adapter(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, folder)) if !name.is_empty() && !folder.is_empty() => {
            Ok((name.into(), folder.into()))
        }
        _ => Err("expected NAME=FOLDER, such as sql=adapters/sql".into()),
    }
}

/// A folder and a number of bytes.
fn parse_disk(text: &str) -> Result<(PathBuf, u64), String> {
    match text.rsplit_once(':') {
        Some((folder, size)) if !folder.is_empty() => Ok((folder.into(), parse_size(size)?)),
        _ => Err("expected FOLDER:SIZE, such as /var/kv:64GiB".into()),
    }
}

/// Where weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LoadFormat {
    /// From the model's files
    Auto,
    /// From a seed
    Dummy,
}

/// What a model is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TaskChoice {
    /// What its files say
    Auto,
    /// Vectors of texts: the last token's, of unit length
    Embed,
    /// Scores of pairs: the share of `yes` against `no` after a question
    Rerank,
}

impl TaskChoice {
    /// The task of a decoder with this tokenizer; `None` is what its files say.
    fn task(self, text: Option<&ModelText>) -> Result<Option<Task>> {
        match self {
            TaskChoice::Auto => Ok(None),
            TaskChoice::Embed => {
                Ok(Some(Task::Embed(Embedding { pooling: Pooling::Last, unit: true })))
            }
            TaskChoice::Rerank => {
                let text = text.ok_or_else(|| bad_input("dummy weights have no tokenizer"))?;
                let id = |word: &str| {
                    let missing = || bad_input(format!("--task rerank: no token `{word}`"));
                    text.tokenizer.id_of(word).ok_or_else(missing)
                };
                Ok(Some(Task::Compare { tokens: [id("no")?, id("yes")?] }))
            }
        }
    }
}

/// A model loaded on a device.
pub(crate) struct Loaded {
    pub(crate) name: String,
    /// A description of the device, in one line.
    pub(crate) device: String,
    pub(crate) config: ModelConfig,
    pub(crate) executor: GraphExecutor,
    /// The program.
    pub(crate) program: Program,
    /// The resolved graph configuration.
    pub(crate) graphs: Resolved,
    /// Whether requests with equal prefixes share pages.
    prefix_cache: bool,
    /// `None` for dummy weights.
    pub(crate) text: Option<ModelText>,
}

/// The tokenizer and chat template of a model.
pub(crate) struct ModelText {
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: Option<ChatTemplate>,
}

/// An engine for one user, with tokenizer and chat template.
pub(crate) struct Talk {
    pub(crate) engine: Engine<GraphExecutor>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: Option<ChatTemplate>,
}

/// Opens the device that the flags select; returns it with a description.
pub(crate) fn open_device(global: &Global) -> Result<(Device, String)> {
    let (device, line) = Device::open(global.device)?;
    let numerics = global.numerics.into();
    match device.kind() {
        DeviceKind::Cuda if numerics == Numerics::Ggml => {
            Err(bad_input("--numerics ggml works only on a CPU: add --device cpu"))
        }
        DeviceKind::Cpu if global.threads.is_some() || numerics != Numerics::Fast => {
            drop(device);
            let threads = global.threads.map(usize::from);
            let device = device::cpu::open_rounding(threads, numerics, Limit::None)?;
            let line = device.describe();
            Ok((device, line))
        }
        _ => Ok((device, line)),
    }
}

/// Finds the model, opens the device and loads it; `max_batch` sequences can run at once.
pub(crate) fn load(args: &LoadArgs, global: &Global, max_batch: u32) -> Result<Loaded> {
    load_sized(args, global, max_batch, None)
}

/// Like [`load()`], with a number of sequences that depends on the device.
pub(crate) fn load_suited(
    args: &LoadArgs,
    global: &Global,
    max_batch: impl FnOnce(DeviceKind) -> u32,
) -> Result<Loaded> {
    load_with(args, global, max_batch, None, None)
}

/// Like [`load()`], for prefill steps of up to `prefill_tokens` tokens; `None` is the device's
/// default.
pub(crate) fn load_sized(
    args: &LoadArgs,
    global: &Global,
    max_batch: u32,
    prefill_tokens: Option<u32>,
) -> Result<Loaded> {
    load_with(args, global, |_| max_batch, prefill_tokens, None)
}

/// Like [`load()`], in other numbers than the device's own choice.
pub(crate) fn load_precise(
    args: &LoadArgs,
    global: &Global,
    max_batch: u32,
    precision: Option<Precision>,
) -> Result<Loaded> {
    load_with(args, global, |_| max_batch, None, precision)
}

fn load_with(
    args: &LoadArgs,
    global: &Global,
    max_batch: impl FnOnce(DeviceKind) -> u32,
    prefill_tokens: Option<u32>,
    precision: Option<Precision>,
) -> Result<Loaded> {
    let source = args.source()?;
    let text = match &source {
        ModelSource::Checkpoint(path) => Some(read_text(path)?),
        ModelSource::Dummy { .. } => None,
    };
    let spec_model = args.drafter(text.as_ref())?;
    let profile = match &args.profile_steps {
        Some(steps) => Some(profile::to_file(steps.clone(), &args.profile_file)?),
        None => None,
    };
    let (device, line) = open_device(global)?;
    let options = LoadOptions {
        max_batch: max_batch(device.kind()),
        prefill_tokens,
        max_context: args.max_context,
        memory_share: args.memory_share,
        kv_bytes: args.kv_cache,
        state_bytes: if args.no_prefix_cache { Some(0) } else { args.kv_states },
        graphs: args.graph.given.clone(),
        keep_windows: args.keep_windows,
        keep: args.keep()?,
        precision: Some(precision.unwrap_or_else(|| global.precision(&*device.target()))),
        task: args.task.task(text.as_ref())?,
        spec: args.spec,
        spec_model,
        adapters: args.adapters(),
        ..LoadOptions::default()
    };
    let bar = Mutex::new(Bar::default());
    let report = |progress| bar.lock().expect("the lock is not poisoned").update(progress);
    let loaded = load_executor(&source, &device, &options, &report);
    bar.into_inner().expect("the lock is not poisoned").finish();
    let mut loaded = loaded.with_context(|| format!("loading {}", args.model))?;
    if let Some(profile) = profile {
        loaded.executor.profile(profile);
    }
    for warning in &loaded.graphs.warnings {
        note!("warning: {warning}");
    }
    Ok(Loaded {
        name: short_name(&args.model),
        device: line,
        config: loaded.config,
        executor: loaded.executor,
        graphs: loaded.graphs,
        program: loaded.program,
        prefix_cache: !args.no_prefix_cache,
        text,
    })
}

/// A model's name without its path, so that clients do not see folders of this machine.
fn short_name(model: &str) -> String {
    let path = Path::new(model);
    let name = match path.is_file() {
        true => path.file_stem(),
        false if path.is_dir() => path.file_name(),
        false => None,
    };
    name.map_or_else(|| model.to_owned(), |name| name.to_string_lossy().into_owned())
}

impl LoadArgs {
    /// Refuses a model whose name cannot be one.
    pub(crate) fn check_name(&self) -> Result<()> {
        let shape = self.load_format == LoadFormat::Dummy || bundled(&self.model).is_ok();
        if shape { Ok(()) } else { ModelName::parse(&self.model).map(drop) }
    }
}

/// The source of a model's weights.
pub(crate) fn source(model: &str, format: LoadFormat) -> Result<ModelSource> {
    if format == LoadFormat::Dummy {
        let config = match Path::new(model).is_dir() {
            true => ModelConfig::from_folder(Path::new(model))?,
            false => bundled(model)?,
        };
        return Ok(ModelSource::Dummy { config: Box::new(config), seed: 0 });
    }
    if !Path::new(model).exists() && bundled(model).is_ok() {
        return Err(bad_input(format!(
            "{model} is a bundled shape without weights: add --load-format dummy"
        )));
    }
    let files = models::locate(&ModelName::parse(model)?, &HubEnv::read())?;
    Ok(ModelSource::Checkpoint(files.path().clone()))
}

fn bundled(name: &str) -> Result<ModelConfig> {
    let names = || ModelConfig::bundled_names().collect::<Vec<_>>().join(", ");
    let unknown =
        || bad_input(format!("{name}: unknown shape; the bundled shapes are {}", names()));
    ModelConfig::bundled_names()
        .chain(ModelConfig::bundled_heads())
        .find(|known| known.eq_ignore_ascii_case(name))
        .ok_or_else(unknown)
        .and_then(|known| Ok(ModelConfig::bundled(known)?))
}

fn read_text(path: &Path) -> Result<ModelText> {
    let checkpoint = Checkpoint::open(path)?;
    let tokenizer = Arc::new(Tokenizer::of(&checkpoint)?);
    Ok(ModelText { tokenizer, template: ChatTemplate::of(&checkpoint)? })
}

/// The memory of a loaded model. All of it is allocated at the start.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Memory {
    weights: u64,
    kv_cache: u64,
    /// Tokens that fit in the KV cache, in sequences of the longest context.
    kv_tokens: u64,
    /// Pages, the one for padding rows included, and the bytes of each.
    kv_pages: (u32, u64),
    /// Layers that keep every token, and those that keep a window.
    kv_layers: (u32, u32),
    /// Tokens that the latter keep; 0 if there are none.
    kv_window: u32,
    /// Bytes of a sequence's recurrent states, with what drafts need.
    carries: u64,
    workspace: u64,
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [weights, kv, workspace] =
            [self.weights, self.kv_cache, self.workspace].map(graph::plan::bytes);
        let tokens = self.kv_tokens;
        write!(f, "weights {weights}, KV cache {kv} ({tokens} tokens")?;
        if self.kv_window > 0 {
            let (all, some) = self.kv_layers;
            write!(f, ", {some} of {} layers keep {}", all + some, self.kv_window)?;
        }
        if self.carries > 0 {
            let each = graph::plan::bytes(self.carries);
            write!(f, ", recurrent layers carry {each} a sequence")?;
        }
        write!(f, "), workspace {workspace}")
    }
}

impl Loaded {
    /// Its memory use.
    pub(crate) fn memory(&self) -> Memory {
        let arena = self.executor.runners().arena();
        let geometry = engine::exec::Executor::geometry(&self.executor);
        let Geometry { pages, page_size, pages_per_seat, kept, .. } = geometry;
        let coverage = engine::exec::Executor::coverage(&self.executor);
        let limits = &self.executor.runners().bindings().state.limits;
        // One page is reserved for padding rows.
        let there = u64::from(pages.saturating_sub(1));
        let each = kept.pages_of(pages_per_seat, page_size, coverage.prefill_tokens).max(1);
        let windowed = self.program.caches.iter().filter(|cache| cache.window().is_some());
        let windowed = if kept.windowed > 0 { windowed.count() as u32 } else { 0 };
        Memory {
            weights: arena.size(Region::Weights),
            kv_cache: arena.size(Region::Kv),
            kv_tokens: there * u64::from(pages_per_seat) / u64::from(each) * u64::from(page_size),
            kv_pages: (pages, graph::layout::page_bytes(&self.program, page_size)),
            kv_layers: (self.program.caches.len() as u32 - windowed, windowed),
            kv_window: kept.window,
            carries: self.program.seat_bytes(limits),
            workspace: [Region::State, Region::Workspace, Region::HostMapped]
                .map(|region| arena.size(region))
                .iter()
                .sum(),
        }
    }

    /// Takes the tokenizer and chat template; `None` for dummy weights.
    pub(crate) fn take_text(&mut self) -> Option<CheckpointText> {
        let ModelText { tokenizer, template } = self.text.take()?;
        let (eos, vocab) = (self.config.eos.clone(), self.config.vocab as u32);
        Some(CheckpointText::new(tokenizer, template, eos, vocab))
    }

    /// The engine configuration for this model.
    pub(crate) fn engine_config(&self) -> EngineConfig {
        let mut config = EngineConfig {
            eos: self.config.eos.clone(),
            // A token of a model without a causal mask depends on those after it, so prefixes are of no use.
            prefix_cache: self.prefix_cache && self.config.task == Task::Generate,
            ..EngineConfig::default()
        };
        if self.executor.device().kind() == DeviceKind::Cpu {
            // A CPU processes about a thousand prompt tokens a second, so longer steps would be
            // visible pauses.
            config.mixed_tokens = 128;
            // A launch returns when the step is done, so a second one would only delay the first
            // result.
            config.depth = 1;
        }
        config
    }

    /// The sampling parameters for this model, including the compiled grammar.
    pub(crate) fn sampling(&self, args: &SamplingArgs) -> Result<Sampling> {
        let mut sampling = args.sampling(&self.config)?;
        if let Some(source) = args.grammar()? {
            let refuse = |why: &dyn std::fmt::Display| bad_input(format!("invalid grammar: {why}"));
            let text = self.text.as_ref();
            let text = text.ok_or_else(|| refuse(&"dummy weights have no tokenizer"))?;
            let vocabulary = vocabulary(text, &self.config).map_err(|why| refuse(&why))?;
            let compiler = Compiler::new(vocabulary, grammar::Limits::default());
            let compiled = compiler.compile(&source).map_err(|why| refuse(&why))?;
            sampling.grammar = Some(compiled);
        }
        Ok(sampling)
    }

    /// An engine with the model's text; an error for dummy weights, which have no tokenizer.
    pub(crate) fn talk(self) -> Result<Talk> {
        let config = self.engine_config();
        let text = self.text.ok_or_else(|| {
            bad_input(
                "dummy weights have no tokenizer; they work with `bench`, `graph` and `serve` only",
            )
        })?;
        let engine = Engine::new(self.executor, config);
        Ok(Talk { engine, tokenizer: text.tokenizer, template: text.template })
    }
}

/// The vocabulary for grammars.
fn vocabulary(text: &ModelText, config: &ModelConfig) -> Result<Vocabulary, VocabularyError> {
    let tokenizer = &text.tokenizer;
    let vocab = config.vocab as u32;
    let bytes: Vec<_> = (0..vocab).map(|id| tokenizer.token_bytes(id).to_vec()).collect();
    let special: Vec<u32> = tokenizer.control_ids().filter(|&id| id < vocab).collect();
    Vocabulary::new(&bytes, &special, &config.eos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_or_have_a_unit() {
        for (text, bytes) in [("17", 17), ("512MiB", 512 << 20), ("4g", 4 << 30), ("1 KiB", 1024)] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for wrong in
            ["", "0", "0GiB", "x", "-1", "1.5GiB", "1TB", "99999999999999999999", "99999999999G"]
        {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }
}
