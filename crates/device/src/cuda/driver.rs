//! The CUDA device: ops are lowered to launches, and launches go to one stream, immediately or recorded.

use super::cache::Cache;
use super::compile::Compiler;
use super::context::{Context, Event, Stream};
use super::gemm::Gemms;
use super::kernel::Kernels;
use super::launch::{Launch, Lowered, Target};
use super::lower::lower;
use super::memory::{CudaMemory, Staging};
use super::record::{CudaGraph, Step, condition};
use crate::arena::{ArenaInner, Memory};
use crate::capture::CaptureState;
use crate::device::{DeviceKind, Driver, Transfer, Way};
use crate::graph::{Item, Node, RecordOptions, Recorded};
use crate::stopwatch::Marks;
use crate::{Arena, Error, Look, Result, Span};
use std::sync::Arc;

/// Launches kernels, GEMMs and copies.
#[derive(Debug)]
pub(crate) struct Executor {
    context: Arc<Context>,
    kernels: Kernels,
    gemms: Gemms,
}

impl Executor {
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Prepares everything that the steps launch.
    pub(crate) fn prepare(&self, steps: &[Step]) -> Result<()> {
        let mut launches: Vec<&Launch> = Vec::new();
        let mut gemms = Vec::new();
        Step::visit(steps, &mut |lowered| match lowered {
            Lowered::Launch(launch) => launches.push(launch),
            Lowered::Gemm(gemm) => gemms.push(gemm),
            Lowered::Copy { .. } | Lowered::Fill { .. } => {}
        });
        let test = any_condition(steps).map(|cond| condition(0, cond));
        self.kernels.prepare(launches.into_iter().chain(&test))?;
        gemms.into_iter().try_for_each(|gemm| self.gemms.prepare(gemm))
    }

    /// Sends one launch to a stream, or into the graph the stream records.
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        arena: &ArenaInner,
        lowered: &Lowered,
        dependent: bool,
    ) -> Result<()> {
        let api = self.context.bind()?;
        let address = |span: &Span| -> Result<u64> {
            arena.check("launch", *span)?;
            Ok(arena.address(*span))
        };
        match lowered {
            Lowered::Launch(launch) => {
                self.kernels.get(&launch.kernel)?.launch(stream, arena, launch, dependent)
            }
            Lowered::Gemm(gemm) => self.gemms.launch(stream, arena, gemm),
            Lowered::Copy { from, to } => {
                let (to, from, bytes) = (address(to)?, address(from)?, from.len as usize);
                // SAFETY: both spans were checked and are equally long.
                unsafe { api.cuMemcpyAsync(to, from, bytes, stream.raw) }
            }
            Lowered::Fill { to, word } => {
                let (address, words) = (address(to)?, (to.len / 4) as usize);
                // SAFETY: the span was checked.
                unsafe { api.cuMemsetD32Async(address, *word, words, stream.raw) }
            }
        }
    }
}

fn any_condition(steps: &[Step]) -> Option<Span> {
    steps.iter().find_map(|step| match step {
        Step::Conditional { cond, .. } => Some(*cond),
        Step::Work(_) => None,
    })
}

/// An NVIDIA GPU.
#[derive(Debug)]
pub(crate) struct Cuda {
    capture: CaptureState,
    executor: Executor,
    staging: Staging,
}

impl Cuda {
    /// Opens GPU `ordinal`; driver, NVRTC and cuBLASLt must be installed.
    pub(crate) fn open(ordinal: u32) -> Result<Cuda> {
        let context = Context::open(ordinal)?;
        if context.gpu.target.capability < (8, 0) {
            return Err(Error::NoDevice {
                asked: format!("cuda:{ordinal}"),
                reason: format!(
                    "{} has compute capability {}.{}; 8.0 or newer is needed",
                    context.gpu.name,
                    context.gpu.target.capability.0,
                    context.gpu.target.capability.1
                ),
            });
        }
        let kernels = Kernels::new(&context, Compiler::find()?, Cache::of_user());
        let gemms = Gemms::new(&context)?;
        let executor = Executor { context, kernels, gemms };
        Ok(Cuda { capture: CaptureState::default(), executor, staging: Staging::new() })
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.executor.context
    }

    pub(crate) fn executor(&self) -> &Executor {
        &self.executor
    }

    fn steps(&self, items: &[Item]) -> Result<Vec<Step>> {
        let target = &self.context().gpu.target;
        let step = |item: &Item| {
            Ok(match item {
                Item::Node(node) => Step::Work(lower(&node.op, target)?),
                Item::If { cond, body } => {
                    Step::Conditional { cond: *cond, repeat: false, body: self.steps(body)? }
                }
                Item::While { cond, body } => {
                    Step::Conditional { cond: *cond, repeat: true, body: self.steps(body)? }
                }
            })
        };
        items.iter().map(step).collect()
    }
}

/// Events of the stream.
#[derive(Debug)]
struct Events {
    context: Arc<Context>,
    events: Vec<Event>,
}

impl Marks for Events {
    fn mark(&mut self, index: usize) -> Result<()> {
        self.context.bind()?;
        self.events[index].record(&self.context.stream)
    }

    fn micros(&self, from: usize, to: usize) -> Result<f64> {
        self.context.bind()?;
        self.events[to].wait()?;
        self.events[to].since(&self.events[from])
    }
}

impl Driver for Cuda {
    fn capture(&self) -> &CaptureState {
        &self.capture
    }

    fn describe(&self) -> String {
        let gpu = &self.context().gpu;
        let (major, minor) = gpu.target.capability;
        format!(
            "cuda:{}: {}, {} multiprocessors, {:.0} GiB, compute capability {major}.{minor}",
            gpu.ordinal,
            gpu.name,
            gpu.target.sms,
            gpu.memory as f64 / f64::from(1 << 30)
        )
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn target(&self) -> Option<Target> {
        Some(self.context().gpu.target.clone())
    }

    fn as_cuda(&self) -> Option<&Cuda> {
        Some(self)
    }

    fn memory_free(&self) -> Result<u64> {
        self.context().memory_free()
    }

    fn allocate(&self, sizes: [u64; 5]) -> Result<Box<dyn Memory>> {
        Ok(Box::new(CudaMemory::new(self.context(), sizes)?))
    }

    fn write(&self, arena: &ArenaInner, to: &[Span], bytes: &[u8]) -> Result<()> {
        self.staging.write(self.context(), arena, to, bytes)
    }

    fn read(&self, arena: &ArenaInner, from: &[Span], look: Look<'_>) -> Result<()> {
        self.staging.read(self.context(), arena, from, look)
    }

    fn copy(&self, arena: &Arena, from: Span, to: Span, beside: bool) -> Result<()> {
        let (to_address, from_address) = (arena.inner.address(to), arena.inner.address(from));
        let bytes = from.len as usize;
        if beside {
            return self.context().copy_beside(to_address, from_address, bytes);
        }
        let (api, stream) = (self.context().bind()?, self.context().stream.raw);
        // SAFETY: both spans were checked and are equally long.
        unsafe { api.cuMemcpyAsync(to_address, from_address, bytes, stream) }
    }

    unsafe fn transfer(&self, pieces: &[Transfer], way: Way) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.context().transfer(pieces, way) }
    }

    fn marks(&self, count: usize) -> Result<Box<dyn Marks>> {
        let api = self.context().bind()?;
        let events = (0..count).map(|_| Event::new(api)).collect::<Result<_>>()?;
        Ok(Box::new(Events { context: self.context().clone(), events }))
    }

    fn prepare(&self, items: &[Item], _options: RecordOptions) -> Result<()> {
        self.executor.prepare(&self.steps(items)?)
    }

    fn run(&self, arena: &Arena, node: &Node, _options: RecordOptions) -> Result<()> {
        let work = lower(&node.op, &self.context().gpu.target)?;
        let steps = [Step::Work(work)];
        self.executor.prepare(&steps)?;
        let mut outcome = Ok(());
        Step::visit(&steps, &mut |lowered| {
            if outcome.is_ok() {
                // Eager runs are the plain reference: every launch waits for the previous one.
                let stream = &self.context().stream;
                outcome = self.executor.launch(stream, &arena.inner, lowered, false);
            }
        });
        outcome
    }

    fn record(
        &self,
        arena: &Arena,
        _name: &str,
        items: &[Item],
        options: RecordOptions,
    ) -> Result<Box<dyn Recorded>> {
        let steps = self.steps(items)?;
        Ok(Box::new(CudaGraph::new(&self.executor, arena, &steps, options)?))
    }

    fn sync(&self) -> Result<()> {
        self.context().sync()
    }

    fn alive(&self) -> Result<()> {
        self.context().alive()
    }
}
