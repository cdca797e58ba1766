//! From a model's name to a device that is ready to run it: lay out, seal, fill, record. Nothing is
//! estimated: weights, state and workspace are counted exactly, and pages take what is left of a GPU, or
//! a modest part of a host's memory, which other programs use too.

use crate::LoadError;
use crate::adapter::AdapterRoom;
use crate::builder::Written;
use crate::config::{ModelConfig, Task};
use crate::executor::{self, GraphExecutor, draft_pages};
use crate::open::{ModelSource, OpenModel};
use crate::precision::Precision;
use crate::sleep::Origin;
use crate::spec::{Ask, Drafted, Method, Speculation};
use crate::store::{Disk, DiskError, KeepOptions, PageStore, Shape, Stores, identity, state_bytes};
use crate::weights::WeightSpec;
use device::cpu::Numerics;
use device::op::KvLayer;
use device::{Arena, Device, DeviceKind, Region, StepLimits, Target, nvtx};
use graph::config::{Facts, Given, Resolved};
use graph::layout::{Layout, pages_that_fit, recording_room};
use graph::program::Program;
use graph::runner::{Fallback, RunnerConfig, Runners};
use graph::{Bindings, CompileTarget, Phase, Prep, ShapeKey};
use std::sync::Arc;

/// Bytes of KV pages in a host's memory by default.
pub(crate) const CPU_KV_BYTES: u64 = 1 << 30;
/// Bytes of copies of recurrent states on a CPU, if none are asked for.
const CPU_STATE_BYTES: u64 = 256 << 20;

/// Tokens of a step of a model that makes vectors, at least.
const VECTOR_TOKENS: u32 = 1024;
/// Tokens of a short prompt: there are seats for a step of such.
const VECTOR_ROW: u32 = 16;

/// Tokens of a step that verifies drafts, at most where there are no more rows.
const VERIFIED: u32 = 256;

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
    /// Pages; `None` takes as many as fit `kv_bytes`.
    pub pages: Option<u32>,
    /// Bytes of KV pages at most. `None` takes what is left of `memory_share` on a GPU; on a CPU
    /// `CPU_KV_BYTES`, or one whole context where that is more.
    pub kv_bytes: Option<u64>,
    /// Bytes for copies of the state of recurrent layers behind cached prefixes; 0 caches none. `None` takes a part of the
    /// free memory.
    pub state_bytes: Option<u64>,
    /// Share of the free device memory to use.
    pub memory_share: f64,
    /// Whether penalty counts are kept (seats × vocab × 4 bytes).
    pub penalties: bool,
    /// What was asked for about graphs; the rest is decided by the device and the limits.
    pub graphs: Given,
    /// Whether layers with a window keep all tokens.
    pub keep_windows: bool,
    /// Where evicted pages are kept.
    pub keep: KeepOptions,
    /// Activations, pages and weights in other numbers than the device's own choice.
    pub precision: Option<Precision>,
    /// What the model is to be used for; `None` is what its files say.
    pub task: Option<Task>,
    /// Whether steps verify drafts, and of which kind.
    pub spec: Option<Speculation>,
    /// The model that drafts, where another one does.
    pub spec_model: Option<ModelSource>,
    /// Room for adapters, if requests may have some.
    pub adapters: Option<AdapterRoom>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            max_batch: 32,
            max_context: 8192,
            prefill_tokens: None,
            page_size: 16,
            pages: None,
            kv_bytes: None,
            state_bytes: None,
            memory_share: 0.9,
            penalties: true,
            graphs: Given::default(),
            keep_windows: false,
            keep: KeepOptions::default(),
            precision: None,
            task: None,
            spec: None,
            spec_model: None,
            adapters: None,
        }
    }
}

impl LoadOptions {
    /// Whether layers with a window keep all tokens: a store for evicted pages, inputs that the host prepares and drafters
    /// with pages of their own know one page table per sequence.
    fn keeps_all(&self, prep: Prep) -> bool {
        let drafter = self.spec.is_some_and(|spec| spec.method != Method::Ngram);
        let kept = self.keep != KeepOptions::default();
        self.keep_windows || kept || drafter || prep != Prep::Device
    }
}

/// The progress of a load.
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
    /// What its weights are made of.
    pub weights: Vec<WeightSpec>,
    /// How its graphs were configured, every decision with its reason.
    pub graphs: Resolved,
}

/// The precision a target computes with by default.
pub fn precision(target: &dyn Target) -> Precision {
    let (act, kv) = (target.activations(), target.cache());
    Precision { act, kv, weights: None, quantise: None, few_rows: false }
}

/// The number of KV pages, where the device has room for `there`.
fn kv_pages(
    program: &Program,
    limits: &StepLimits,
    kind: DeviceKind,
    asked: Option<u64>,
    there: u32,
) -> Result<u32, LoadError> {
    // No more than every seat can fill.
    let each = sequence_pages(program, limits);
    let useful = u64::from(limits.seats) * u64::from(each) + 1;
    let useful = u32::try_from(useful).unwrap_or(u32::MAX);
    let context = each + 1;
    let fit = |bytes| pages_that_fit(program, limits.page_size, bytes);
    let Some(bytes) = asked else {
        let modest = match kind {
            DeviceKind::Cpu => fit(CPU_KV_BYTES).max(context),
            DeviceKind::Cuda => u32::MAX,
        };
        return Ok(there.min(useful).min(modest));
    };
    let wanted = fit(bytes).min(useful);
    let wrong = |problem: String| Err(LoadError::KvSize { asked: bytes, problem });
    if wanted < context {
        let tokens = limits.pages_per_seat * limits.page_size;
        return wrong(format!(
            "does not hold one context of {tokens} tokens: take more, or a smaller --max-context"
        ));
    }
    if wanted > there {
        return wrong("does not fit into the device's free memory: take less".into());
    }
    Ok(wanted)
}

/// Copies of recurrent states to make room for: as many as `asked` bytes hold. Without that, a sixteenth of the device's
/// free memory, a modest part of a host's.
fn state_copies(
    program: &Program,
    limits: &StepLimits,
    kind: DeviceKind,
    asked: Option<u64>,
    free: u64,
) -> u32 {
    let usual = match kind {
        DeviceKind::Cpu => CPU_STATE_BYTES.min(free / 16),
        DeviceKind::Cuda => free / 16,
    };
    let fit = asked.unwrap_or(usual).checked_div(program.copy_bytes(limits)).unwrap_or(0);
    // More are of little use: each prompt leaves two.
    let useful = if asked.is_some() { u32::MAX } else { 8 * limits.seats };
    u32::try_from(fit).unwrap_or(u32::MAX).min(useful)
}

/// Pages that the longest sequence takes.
fn sequence_pages(program: &Program, limits: &StepLimits) -> u32 {
    let kept = executor::kept(program);
    // Pages of the prefix tree that a sequence publishes below, and that are not its own.
    let others = if kept.windowed > 0 { kept.width() } else { 0 };
    kept.pages_of(limits.pages_per_seat, limits.page_size, limits.tokens) + others
}

/// The largest step, where one of prompts has `chunk` tokens if nothing else is asked for.
fn step_limits(
    options: &LoadOptions,
    program: &Program,
    chunk: u32,
    context: u32,
    vectors: bool,
) -> StepLimits {
    let tokens_per_row = options.spec.map_or(1, |spec| spec.drafts + 1);
    let mut rows = options.max_batch;
    let mut tokens = options.prefill_tokens.unwrap_or(chunk).max(rows * tokens_per_row);
    if vectors {
        // Every prompt is fed whole; short ones fill a step.
        tokens = tokens.max(context).max(VECTOR_TOKENS);
        rows = rows.max(tokens / VECTOR_ROW);
    }
    let mut limits = StepLimits {
        seats: rows,
        rows,
        tokens,
        pages_per_seat: context.div_ceil(options.page_size),
        page_size: options.page_size,
        vocab: program.shape.vocab,
        penalties: options.penalties && !vectors,
        tokens_per_row,
        tables: 1,
    };
    limits.pages_per_seat += draft_pages(&limits);
    limits
}

/// Why a store of pages is refused.
const NO_COPIES: &str = "evicted pages cannot be used without their states; give --kv-states room, or leave --kv-host-memory and \
     --kv-disk out";

/// Where evicted pages are kept, if anywhere: its memory is laid out with the rest. `how` is what pages depend on besides
/// the model's files.
fn page_store(
    source: &ModelSource,
    options: &LoadOptions,
    how: &str,
    layout: &mut Layout,
) -> Result<Option<Stores>, LoadError> {
    if options.keep == KeepOptions::default() {
        return Ok(None);
    }
    let caches: Vec<u64> = layout.bindings.kv.iter().map(KvLayer::page_bytes).collect();
    let copies = &layout.bindings.carry_copies;
    let states: Vec<u64> = copies.iter().map(state_bytes).collect();
    let parts = if states.is_empty() { 1 } else { 2 };
    // Drafts change what a seat carries, and how it lies.
    let carried = format!("{how} states {:?}", states);
    let pages = one_store(source, options, (how, parts), layout, caches)?;
    let states = match parts {
        1 => None,
        _ => Some(one_store(source, options, (&carried, parts), layout, states)?),
    };
    Ok(Some(Stores { pages, states }))
}

/// A store of things that have so many bytes in each cache or layer, in one of so many equal parts of the memory.
fn one_store(
    source: &ModelSource,
    options: &LoadOptions,
    (how, parts): (&str, u64),
    layout: &mut Layout,
    caches: Vec<u64>,
) -> Result<PageStore, LoadError> {
    let page_bytes = caches.iter().sum::<u64>().max(1);
    let host = options.keep.host_bytes.map(|bytes| {
        let bytes = (bytes / parts / page_bytes).max(1) * page_bytes;
        layout.arena.alloc(Region::HostMapped, "kept pages", bytes)
    });
    let disk = match &options.keep.disk {
        None => None,
        Some((folder, bytes)) => {
            let identity = identity(source, how);
            let identity = identity.map_err(|error| DiskError::Io(folder.clone(), error))?;
            let shape = Shape { identity, page_bytes, page_tokens: options.page_size };
            Some(Disk::open(folder, bytes / parts, shape)?)
        }
    };
    Ok(PageStore::new(host, disk, caches))
}

/// A model with everything decided that takes no memory: what is loaded, and what tools explain and verify.
#[derive(Debug)]
pub struct Configured {
    /// Its program, weights and rotations, and those of what drafts.
    drafted: Drafted,
    /// Programs over the same weights that make vectors of prompts; none if that is all the model does.
    pub others: Vec<Program>,
    /// The largest step.
    pub limits: StepLimits,
    /// How graphs are configured, every decision with its reason.
    pub graphs: Resolved,
    /// What plans are made for.
    pub target: CompileTarget,
    /// How decode steps run.
    pub decode: RunnerConfig,
    /// How prefill steps run.
    pub prefill: RunnerConfig,
}

impl Configured {
    /// What it computes.
    pub fn program(&self) -> &Program {
        &self.drafted.written.program
    }

    /// What its weights are made of.
    pub(crate) fn weights(&self) -> &[WeightSpec] {
        &self.drafted.written.weights
    }

    /// Every graph, decode first.
    pub fn keys(&self) -> Vec<ShapeKey> {
        let both = [&self.decode, &self.prefill];
        both.iter().flat_map(|config| config.keys(&self.limits)).collect()
    }

    /// Everything in memory but pages.
    pub fn layout(&self) -> Result<Layout, LoadError> {
        let (program, keys) = (self.program(), self.keys());
        let mut layout =
            Layout::with_others(program, &self.others, &self.target, self.limits, &keys)?;
        layout.add_inputs(self.graphs.prep)?;
        Ok(layout)
    }

    /// Fills all weights and tables, those of a model that drafts included; `report` gets the bytes done.
    pub fn fill(
        &self,
        model: &OpenModel,
        device: &Device,
        arena: &Arena,
        bindings: &Bindings,
        report: &(dyn Fn(u64) + Sync),
    ) -> Result<(), LoadError> {
        self.drafted.fill(model, device, arena, bindings, report)
    }
}

/// Decides how a model runs on a target.
pub fn configure(
    source: &ModelSource,
    model: &OpenModel,
    target: Arc<dyn Target>,
    numerics: Numerics,
    options: &LoadOptions,
) -> Result<Configured, LoadError> {
    let config = &model.config;
    let context = options.max_context.min(config.max_position as u32);
    let vectors = config.task != Task::Generate;
    if options.spec.is_some() && vectors {
        return Err(LoadError::NoText);
    }
    let chosen = chosen_precision(config, &*target, options);
    let written = model.write(&*target, numerics, chosen, context)?;
    let chunk = target.prefill_tokens();
    let limits = step_limits(options, &written.program, chunk, context, vectors);
    // Not many more rows of logits than without drafts: with many sequences they do not pay.
    let most_verified = limits.rows.max(VERIFIED);
    let ask = Ask {
        verifier: config,
        own: source,
        source: options.spec_model.as_ref(),
        target: &*target,
        numerics,
        precision: chosen,
        context,
        most_rows: most_verified / 2,
    };
    let mut drafted = Drafted::new(written, options.spec, &ask)?;
    let program = &drafted.written.program;
    let facts = Facts {
        capability: target.compute_capability(),
        sequences: limits.rows,
        tokens: limits.tokens,
        weights: program.weight_bytes(),
    };
    let graphs = graph::config::resolve(&options.graphs, &facts)?;
    let keeps_all = options.keeps_all(graphs.prep);
    if keeps_all {
        drafted.written.program.keep_all();
    }
    let program = &drafted.written.program;
    let mut target = CompileTarget::new(target);
    target.merge = graphs.merge;
    let mut decode = graphs.runner(Phase::Decode, &limits)?;
    if !program.phases.contains(&Phase::Decode) {
        decode.buckets.sizes.clear();
    }
    if let Some(spec) = options.spec {
        decode.q_lens = spec.q_lens();
        decode.most_verified = most_verified;
    }
    let mut prefill = graphs.runner(Phase::Prefill, &limits)?;
    (decode.adapters, prefill.adapters) = (options.adapters.is_some(), options.adapters.is_some());
    // Vectors of prompts are asked of generating models, too.
    let mut others = match vectors {
        true => Vec::new(),
        false => model.write_vectors(&*target.device, numerics, chosen, context)?,
    };
    others.iter_mut().filter(|_| keeps_all).for_each(Program::keep_all);
    Ok(Configured { drafted, others, limits, graphs, target, decode, prefill })
}

/// Sequences up to which a GPU multiplies faster by blocks of GGUF files than by the same weights in bf16. A step of
/// Qwen3-8B with four takes 2.80 ms in Q4_K_M and 3.53 in Q8_0, with eight 3.97 and 7.00, and 4.13 in bf16.
const FEW_ROWS: u32 = 4;

/// The numbers that a model computes with.
fn chosen_precision(config: &ModelConfig, target: &dyn Target, options: &LoadOptions) -> Precision {
    let mut chosen = options.precision.unwrap_or_else(|| precision(target));
    if config.task != Task::Generate {
        // Pages live for one step: rounding them would save nothing.
        chosen.kv = chosen.act;
    }
    chosen.few_rows = options.max_batch <= FEW_ROWS && options.spec.is_none();
    chosen
}

/// Says which graphs the memory budget has no room for. Without any of a phase every step of it would be refused, where
/// steps without a graph are.
fn report_dropped(runners: &Runners, graphs: &mut Resolved) -> Result<(), LoadError> {
    let phases = [
        (runners.decode.dropped(), runners.decode.coverage()),
        (runners.prefill.dropped(), runners.prefill.coverage()),
    ];
    for (dropped, coverage) in phases {
        let names = || dropped.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        if !dropped.is_empty() && coverage == 0 && graphs.fallback == Fallback::Error {
            return Err(LoadError::Budget { graphs: names() });
        }
        if !dropped.is_empty() {
            let then = if coverage == 0 { "run op by op" } else { "use larger graphs" };
            let names = names();
            let warning = format!("memory.budget has no room for {names}: their steps {then}");
            graphs.warnings.push(warning);
        }
    }
    Ok(())
}

/// Puts a model on a device: lays out, seals, fills, records.
pub fn load_executor(
    source: &ModelSource,
    device: &Device,
    options: &LoadOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<LoadedExecutor, LoadError> {
    let _range = nvtx::range(|| "load");
    let kind = device.kind();
    let mut model = OpenModel::open(source)?;
    model.config.task = options.task.unwrap_or(model.config.task);
    if options.adapters.is_some() && (model.config.gguf || model.config.task != Task::Generate) {
        return Err(LoadError::NoAdapters);
    }
    model.adapters = options.adapters;
    let config = &model.config;
    let vectors = config.task != Task::Generate;
    let configured = configure(source, &model, device.target(), device.numerics(), options)?;
    let keys = configured.keys();
    let mut layout = configured.layout()?;
    let (program, limits, target) = (configured.program(), configured.limits, &configured.target);
    let free = (device.memory_free()? as f64 * options.memory_share) as u64;
    let slots = state_copies(program, &limits, kind, options.state_bytes, free);
    if options.keep != KeepOptions::default() && program.carry_bytes() > 0 && slots == 0 {
        return Err(LoadError::Recurrent(NO_COPIES));
    }
    layout.add_carry_copies(program, slots);
    let pages = match options.pages {
        Some(pages) => pages,
        // The prompts of two steps.
        None if vectors => {
            2 * (limits.tokens.div_ceil(limits.page_size) + limits.rows) + limits.pages_per_seat + 1
        }
        None => {
            let room = || recording_room(program, target, &keys);
            let taken = layout.arena.report().device_total()
                + configured.graphs.budget.unwrap_or_else(room);
            let there = pages_that_fit(program, limits.page_size, free.saturating_sub(taken));
            kv_pages(program, &limits, kind, options.kv_bytes, there)?
        }
    };
    if pages < 2 {
        return Err(LoadError::NoRoom { needed: layout.arena.report().device_total() });
    }
    layout.add_pages(program, pages);
    let chosen = chosen_precision(config, &*target.device, options);
    let mut how = format!("{config:?} {chosen:?} {:?} {kind:?}", device.numerics());
    if let Some(beside) = &configured.drafted.beside {
        // Pages hold what it keeps of tokens, too.
        how = format!("{how} {:?} {:?}", beside.model.config, options.spec_model);
    }
    let store = page_store(source, options, &how, &mut layout)?;
    let Layout { arena, bindings } = layout;
    let arena = device.seal(arena)?;
    let total = model.bytes() + configured.drafted.bytes();
    let report = |done| progress(Progress::Weights(done, total));
    let filling = nvtx::range(|| "load weights");
    configured.fill(&model, device, &arena, &bindings, &report)?;
    drop(filling);
    let Configured { drafted, others, mut graphs, target, decode, prefill, .. } = configured;
    let program = drafted.written.program.clone();
    let mut runners = Runners::new(device, &arena, program, target, bindings, decode, prefill)?
        .with_others(others);
    let total = keys.len() as u64;
    let mut done = 0;
    runners.record_all(&mut |_, _| {
        done += 1;
        progress(Progress::Graphs(done, total));
    })?;
    report_dropped(&runners, &mut graphs)?;
    let Written { program, weights, .. } = &drafted.written;
    let (config, program, weights) = (model.config.clone(), program.clone(), weights.clone());
    let executor = GraphExecutor::new(runners).with_store(store);
    let executor = executor.with_origin(Origin { model, drafted });
    Ok(LoadedExecutor { executor, config, program, weights, graphs })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(kind: DeviceKind, seats: u32, asked: Option<u64>, there: u64) -> Result<u64, String> {
        let config = ModelConfig::bundled("qwen3-0.6b").unwrap();
        let target: &dyn Target = match kind {
            DeviceKind::Cpu => &device::target::CpuTarget,
            DeviceKind::Cuda => &device::cuda::launch::Target::h200(),
        };
        let vocab = config.vocab as u32;
        let source = ModelSource::Dummy { config: Box::new(config), seed: 0 };
        let model = OpenModel::open(&source).unwrap();
        let fast = device::cpu::Numerics::Fast;
        let program = model.write(target, fast, precision(target), 8192).unwrap().program;
        let limits = StepLimits {
            seats,
            rows: seats,
            tokens: 512,
            pages_per_seat: 512,
            page_size: 16,
            vocab,
            penalties: true,
            tokens_per_row: 1,
            tables: 1,
        };
        let there = pages_that_fit(&program, 16, there);
        let pages = kv_pages(&program, &limits, kind, asked, there).map_err(|e| e.to_string())?;
        // 28 layers, keys and values, 8 heads of 128, two bytes each.
        Ok(u64::from(pages) * 16 * 28 * 2 * 8 * 128 * 2)
    }

    #[test]
    fn a_host_gives_a_modest_part_of_its_memory() {
        const GIB: u64 = 1 << 30;
        let close = |bytes: u64, expected: u64| bytes <= expected && bytes > expected - (8 << 20);
        let context = 513 * 16 * 28 * 2 * 8 * 128 * 2;
        assert!(close(pages(DeviceKind::Cpu, 32, None, 100 * GIB).unwrap(), GIB));
        assert_eq!(pages(DeviceKind::Cpu, 1, None, 100 * GIB).unwrap(), context, "all it can use");
        assert!(close(pages(DeviceKind::Cpu, 32, None, GIB / 2).unwrap(), GIB / 2), "all there is");
        assert!(close(pages(DeviceKind::Cuda, 256, None, 100 * GIB).unwrap(), 100 * GIB));
        assert!(close(pages(DeviceKind::Cpu, 32, Some(5 * GIB), 100 * GIB).unwrap(), 5 * GIB));
        let most = pages(DeviceKind::Cpu, 2, Some(5 * GIB), 100 * GIB).unwrap();
        assert_eq!(most, context / 513 * 1025, "no more than is of use");
        let small = pages(DeviceKind::Cpu, 32, Some(GIB / 4), 100 * GIB).unwrap_err();
        assert!(small.starts_with("a KV cache of 256.0 MiB does not hold one context"), "{small}");
        let large = pages(DeviceKind::Cpu, 32, Some(5 * GIB), 4 * GIB).unwrap_err();
        assert!(large.contains("5.0 GiB does not fit into"), "{large}");
    }
}
