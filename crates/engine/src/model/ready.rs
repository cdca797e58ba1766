//! From a model's name to a device that is ready to run it: lay out, seal, fill, record. Nothing is
//! estimated: weights, state and workspace are counted exactly, and pages take what is left.

use super::executor::GraphExecutor;
use super::fill::HeadRows;
use super::place::{Placed, device_dtype, sources, stored_dtype};
use super::weights::{WeightSpec, specs};
use super::{LoadError, dense, fill, rope};
use device::cpu::Numerics;
use device::{DType, Device, DeviceKind, StepLimits};
use formats::checkpoint::Checkpoint;
use formats::config::ModelConfig;
use formats::tensor_names::Role;
use graph::config::{Facts, Given, Resolved};
use graph::layout::{Layout, pages_that_fit, recording_room};
use graph::program::Program;
use graph::runner::Runners;
use graph::{CompileTarget, Phase, ShapeKey};
use std::path::PathBuf;

/// Where a model comes from.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// A folder with a checkpoint, or a `.gguf` or `.safetensors` file.
    Checkpoint(PathBuf),
    /// Weights of real size drawn from a seed.
    Dummy {
        /// The shape.
        config: Box<ModelConfig>,
        /// Same seed, same weights.
        seed: u64,
    },
}

/// How a model is put on a device.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Most sequences that run at once.
    pub max_batch: u32,
    /// Most tokens of a sequence; the model's own limit is never exceeded.
    pub max_context: u32,
    /// Most tokens of a prefill step; `None` takes what keeps running answers smooth on the device: a
    /// few tens of milliseconds.
    pub prefill_tokens: Option<u32>,
    /// Tokens per page.
    pub page_size: u32,
    /// Pages; `None` takes what is left of `memory_share`.
    pub pages: Option<u32>,
    /// Share of the free device memory to use.
    pub memory_share: f64,
    /// Whether penalty counts are kept (seats × vocab × 4 bytes).
    pub penalties: bool,
    /// What was asked for about graphs; the rest is decided by the device and the limits.
    pub graphs: Given,
    /// Activations, pages and weights in other numbers than the device's own choice.
    pub numbers: Option<dense::Numbers>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            max_batch: 32,
            max_context: 8192,
            prefill_tokens: None,
            page_size: 16,
            pages: None,
            memory_share: 0.9,
            penalties: true,
            graphs: Given::default(),
            numbers: None,
        }
    }
}

/// What load tells while it works.
#[derive(Clone, Copy, Debug)]
pub enum Progress {
    /// Weights: bytes done, bytes in all.
    Weights(u64, u64),
    /// Graphs recorded, graphs in all.
    Graphs(u64, u64),
}

/// A model on a device.
pub struct LoadedExecutor {
    /// Ready for steps.
    pub executor: GraphExecutor,
    /// The model's shape.
    pub config: ModelConfig,
    /// What it computes.
    pub program: Program,
    /// How its graphs were configured, every decision with its reason.
    pub graphs: Resolved,
}

/// The numbers a device computes with.
pub fn numbers(kind: DeviceKind) -> dense::Numbers {
    match kind {
        DeviceKind::Cpu => dense::Numbers { act: DType::F32, kv: DType::F16, weights: None },
        DeviceKind::Cuda => dense::Numbers { act: DType::BF16, kv: DType::BF16, weights: None },
    }
}

/// The program of a model with its weights stored as `kind` of device stores them. Needs no memory.
/// `part_dtype` tells the type of each checkpoint tensor; dummy weights have the config's.
pub fn program(
    config: &ModelConfig,
    kind: DeviceKind,
    numbers: dense::Numbers,
    max_positions: u32,
    part_dtype: &dyn Fn(Role) -> DType,
) -> Result<(Program, Vec<WeightSpec>), LoadError> {
    let specs = specs(config);
    let stored = |name: &str| {
        // A table that is also the head is kept once, as the head wants it.
        let name = if name == "embed" && config.tied { "lm_head" } else { name };
        let spec =
            specs.iter().find(|spec| spec.name == name).expect("the builder knows the specs");
        let parts: Vec<DType> = spec.parts.iter().map(|part| part_dtype(part.role)).collect();
        numbers.weights.unwrap_or_else(|| stored_dtype(kind, spec, &parts))
    };
    let program = dense::program(config, numbers, max_positions, &stored)?;
    Ok((program, specs))
}

/// Puts a model on a device: lays out, seals, fills, records.
pub fn load_executor(
    source: &ModelSource,
    device: &Device,
    options: &LoadOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<LoadedExecutor, LoadError> {
    let kind = device.kind();
    let checkpoint = match source {
        ModelSource::Checkpoint(path) => Some(Checkpoint::open(path)?),
        ModelSource::Dummy { .. } => None,
    };
    let config = match (&checkpoint, source) {
        (Some(checkpoint), _) => ModelConfig::of(checkpoint)?,
        (None, ModelSource::Dummy { config, .. }) => (**config).clone(),
        (None, ModelSource::Checkpoint(_)) => unreachable!("opened above"),
    };
    let tensors = checkpoint.as_ref().map(|c| sources(c, &specs(&config))).transpose()?;
    let part_dtype = |role: Role| match &tensors {
        Some(tensors) => {
            device_dtype(tensors[&role].dtype).expect("sources() refused every other type")
        }
        None => DType::BF16,
    };
    let context = options.max_context.min(config.max_position as u32);
    let numbers = options.numbers.unwrap_or_else(|| numbers(kind));
    let (mut program, specs) = program(&config, kind, numbers, context, &part_dtype)?;
    let numerics = device.numerics();
    if let (Numerics::Ggml, Some(checkpoint)) = (numerics, &checkpoint) {
        // Sums over a head's elements are in the file's order.
        program.pairs = fill::pairs_of(checkpoint);
    }
    let chunk = match kind {
        DeviceKind::Cpu => 512,
        DeviceKind::Cuda => 2048,
    };
    let limits = StepLimits {
        seats: options.max_batch,
        rows: options.max_batch,
        tokens: options.prefill_tokens.unwrap_or(chunk).max(options.max_batch),
        pages_per_seat: context.div_ceil(options.page_size),
        page_size: options.page_size,
        vocab: config.vocab as u32,
        penalties: options.penalties,
    };
    let mut target = match device.target() {
        Some(target) => CompileTarget::cuda(target),
        None => CompileTarget::cpu(),
    };
    let facts = Facts {
        gpu: kind == DeviceKind::Cuda,
        capability: device.target().map_or((0, 0), |target| target.capability),
        records: true,
        sequences: limits.rows,
        tokens: limits.tokens,
        weights: program.weight_bytes(),
    };
    let graphs = graph::config::resolve(&options.graphs, &facts)?;
    target.merge = graphs.merge;
    let decode = graphs.runner(Phase::Decode, &limits)?;
    let prefill = graphs.runner(Phase::Prefill, &limits)?;
    let keys: Vec<ShapeKey> =
        [&decode, &prefill].iter().flat_map(|config| config.keys(&limits)).collect();
    let mut layout = Layout::new(&program, &target, limits, &keys)?;
    layout.add_inputs(graphs.prep)?;
    let pages = match options.pages {
        Some(pages) => pages,
        None => {
            let free = (device.memory_free()? as f64 * options.memory_share) as u64;
            let room = || recording_room(&program, &target, keys.len());
            let taken = layout.arena.report().device_total() + graphs.budget.unwrap_or_else(room);
            // No more than every seat can fill.
            let useful = u64::from(limits.seats) * u64::from(limits.pages_per_seat) + 1;
            u64::from(pages_that_fit(&program, limits.page_size, free.saturating_sub(taken)))
                .min(useful) as u32
        }
    };
    if pages < 2 {
        return Err(LoadError::NoRoom { needed: layout.arena.report().device_total() });
    }
    layout.add_pages(&program, pages);
    let Layout { arena, bindings } = layout;
    let arena = device.seal(arena)?;
    let placed: Vec<Placed> = specs
        .into_iter()
        .filter_map(|spec| bindings.weights.get(&spec.name).map(|&tensor| Placed { spec, tensor }))
        .collect();
    match (source, &checkpoint, &tensors) {
        (ModelSource::Dummy { seed, .. }, ..) => fill::from_seed(device, &arena, &placed, *seed)?,
        (_, Some(checkpoint), Some(tensors)) => {
            let total = checkpoint.total_bytes();
            let report = |done| progress(Progress::Weights(done, total));
            let heads = HeadRows::new(checkpoint, config.head_dim, program.pairs);
            fill::from_checkpoint(device, &arena, &placed, checkpoint, tensors, heads, &report)?;
        }
        _ => unreachable!("a checkpoint was opened with its tensors"),
    }
    let table: Vec<u8> = rope::table(&config, context as usize, numerics)
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    device.write(&arena, bindings.rope.span, &table)?;
    let mut runners =
        Runners::new(device, &arena, program.clone(), target, bindings, decode, prefill)?;
    let total = keys.len() as u64;
    let mut done = 0;
    runners.record_all(&mut |_, _| {
        done += 1;
        progress(Progress::Graphs(done, total));
    })?;
    Ok(LoadedExecutor { executor: GraphExecutor::new(runners), config, program, graphs })
}
