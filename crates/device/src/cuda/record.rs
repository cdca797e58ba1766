//! Recording: launches are captured from a separate stream into a graph, so that exactly what an eager run would
//! launch is recorded, and work of other threads is never captured by accident.

use super::context::{Context, Stream, capturing, destroying, launching, report};
use super::driver::Executor;
use super::kernel::Kernel;
use super::launch::{Arg, KernelKey, Launch, Lowered};
use crate::graph::{RecordOptions, Recorded};
use crate::{Arena, Result, Span};
use cudarc::driver::sys;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An item, lowered.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Launches in order.
    Work(Vec<Lowered>),
    /// A conditional body.
    Conditional {
        /// A u32 in the arena.
        cond: Span,
        /// Tested before each round, rather than once.
        repeat: bool,
        /// What to run.
        body: Vec<Step>,
    },
}

impl Step {
    /// Every launch among the steps, bodies and the condition's own included.
    pub(crate) fn visit<'a>(steps: &'a [Step], visit: &mut dyn FnMut(&'a Lowered)) {
        for step in steps {
            match step {
                Step::Work(work) => work.iter().for_each(&mut *visit),
                Step::Conditional { body, .. } => Step::visit(body, visit),
            }
        }
    }
}

/// The launch that copies the word at `cond` into a condition.
pub(crate) fn condition(handle: u64, cond: Span) -> Launch {
    Launch {
        kernel: KernelKey {
            source: "condition".into(),
            entry: "set_condition".into(),
            defines: Vec::new(),
        },
        grid: [1, 1, 1],
        block: [1, 1, 1],
        cluster: [1, 1, 1],
        shared: 0,
        args: vec![Arg::U64(handle), Arg::Address(cond)],
        // Never started early: with an early start, loops on several streams lost the context within a minute
        // (CUDA_ERROR_LAUNCH_FAILED, driver 580).
        waits: false,
    }
}

/// A graph the GPU can launch. It keeps the arena and every kernel it launches alive.
#[derive(Debug)]
pub(crate) struct CudaGraph {
    context: Arc<Context>,
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    nodes: usize,
    bytes: u64,
    instantiation: Duration,
    _arena: Arena,
    _kernels: Vec<Arc<Kernel>>,
}

// SAFETY: driver handles may be used from any thread once their context is current.
unsafe impl Send for CudaGraph {}
// SAFETY: launching an executable graph is thread-safe; the stream orders the launches.
unsafe impl Sync for CudaGraph {}

impl CudaGraph {
    /// Records steps whose kernels were prepared, and uploads the result to the GPU.
    pub(crate) fn new(
        executor: &Executor,
        arena: &Arena,
        steps: &[Step],
        options: RecordOptions,
    ) -> Result<CudaGraph> {
        let context = executor.context().clone();
        let api = context.bind()?;
        let before = context.memory_free()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { api.cuGraphCreate(&mut graph, 0) }?;
        let mut recorded = CudaGraph {
            context: context.clone(),
            graph,
            exec: std::ptr::null_mut(),
            nodes: 0,
            bytes: 0,
            instantiation: Duration::ZERO,
            _arena: arena.clone(),
            _kernels: Vec::new(),
        };
        let kernels = HashMap::new();
        let mut recorder = Recorder { executor, arena, options, nodes: 0, kernels, lost: false };
        let outcome = {
            let _turn = capturing();
            recorder.body(graph, steps, None)
        };
        if recorder.lost {
            recorded.graph = std::ptr::null_mut();
        }
        outcome?;
        recorded.nodes = recorder.nodes;
        recorded._kernels = recorder.kernels.into_values().collect();
        let start = Instant::now();
        // SAFETY: the graph is complete; no capture is open on it.
        unsafe { api.cuGraphInstantiateWithFlags(&mut recorded.exec, graph, 0) }?;
        recorded.instantiation = start.elapsed();
        // On a stream of its own: it does not wait for the steps that were launched.
        let upload = Stream::new(api)?;
        // SAFETY: just instantiated.
        unsafe { api.cuGraphUpload(recorded.exec, upload.raw) }?;
        // SAFETY: the stream is this function's.
        unsafe { api.cuStreamSynchronize(upload.raw) }?;
        recorded.bytes = before.saturating_sub(context.memory_free()?);
        Ok(recorded)
    }

    /// How long the driver took to make it executable.
    pub(crate) fn instantiation(&self) -> Duration {
        self.instantiation
    }
}

impl Recorded for CudaGraph {
    fn replay(&self) -> Result<()> {
        let api = self.context.bind()?;
        let _turn = launching();
        // SAFETY: instantiated in `new`; all it points to is held by self.
        unsafe { api.cuGraphLaunch(self.exec, self.context.stream.raw) }
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn device_nodes(&self) -> usize {
        self.nodes
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        // Wait for the last launch, because kernels and arena may be freed with the graph. Then keep other threads from
        // launching: a driver once lost the context while loops were running, and it is not known whether destroying a
        // graph was the cause.
        let _turn = capturing();
        report(self.context.sync_all());
        let _alone = destroying();
        if !self.exec.is_null() {
            // SAFETY: created once, destroyed once; idle after the wait above.
            report(unsafe { self.context.api.cuGraphExecDestroy(self.exec) });
        }
        if !self.graph.is_null() {
            // SAFETY: created once, destroyed once.
            report(unsafe { self.context.api.cuGraphDestroy(self.graph) });
        }
    }
}

struct Recorder<'a> {
    executor: &'a Executor,
    arena: &'a Arena,
    options: RecordOptions,
    nodes: usize,
    kernels: HashMap<KernelKey, Arc<Kernel>>,
    /// A capture was invalidated, and the driver took the graph with it.
    lost: bool,
}

impl Recorder<'_> {
    /// Records steps into a graph; for a repeated body, `again` is its condition.
    fn body(
        &mut self,
        graph: sys::CUgraph,
        steps: &[Step],
        again: Option<(u64, Span)>,
    ) -> Result<()> {
        let api = self.executor.context().bind()?;
        let stream = Stream::new(api)?;
        let (none, edges) = (std::ptr::null(), std::ptr::null());
        // Relaxed: libraries may load their own kernels while they are recorded.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the graph is ours and still empty.
        unsafe { api.cuStreamBeginCaptureToGraph(stream.raw, graph, none, edges, 0, mode) }?;
        let outcome = self.fill(&stream, graph, steps, again);
        let mut same = std::ptr::null_mut();
        // A failed capture must be ended too, before its stream is destroyed.
        // SAFETY: the capture was begun above.
        let ended = unsafe { api.cuStreamEndCapture(stream.raw, &mut same) };
        self.lost |= ended.is_err();
        outcome?;
        ended?;
        let mut count = 0;
        // SAFETY: a null list asks for the count only.
        unsafe { api.cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count) }?;
        self.nodes += count;
        Ok(())
    }

    fn fill(
        &mut self,
        stream: &Stream,
        graph: sys::CUgraph,
        steps: &[Step],
        again: Option<(u64, Span)>,
    ) -> Result<()> {
        // Only a kernel can be started early, and only if a kernel precedes it.
        let mut behind_kernel = false;
        for step in steps {
            match step {
                Step::Work(work) => {
                    for lowered in work {
                        behind_kernel = self.launch(stream, lowered, behind_kernel)?;
                    }
                }
                Step::Conditional { cond, repeat, body } => {
                    let handle = self.handle(graph)?;
                    self.launch(stream, &Lowered::Launch(condition(handle, *cond)), false)?;
                    let inner = self.conditional(stream, handle, *repeat)?;
                    self.body(inner, body, repeat.then_some((handle, *cond)))?;
                    behind_kernel = false;
                }
            }
        }
        if let Some((handle, cond)) = again {
            self.launch(stream, &Lowered::Launch(condition(handle, cond)), false)?;
        }
        Ok(())
    }

    /// Captures one launch; returns whether the next may depend on it programmatically.
    fn launch(&mut self, stream: &Stream, lowered: &Lowered, behind_kernel: bool) -> Result<bool> {
        let mut dependent = false;
        if let Lowered::Launch(launch) = lowered {
            dependent = self.options.dependent_launch && launch.waits && behind_kernel;
            if !self.kernels.contains_key(&launch.kernel) {
                let kernel = self.executor.kernels().get(&launch.kernel)?;
                self.kernels.insert(launch.kernel.clone(), kernel);
            }
        }
        self.executor.launch(stream, &self.arena.inner, lowered, dependent)?;
        Ok(matches!(lowered, Lowered::Launch(_)))
    }

    fn handle(&self, graph: sys::CUgraph) -> Result<u64> {
        let context = self.executor.context();
        let mut handle = 0;
        // SAFETY: the graph is ours; the value is set by a kernel before each use.
        unsafe {
            context.api.cuGraphConditionalHandleCreate(&mut handle, graph, context.raw, 0, 0)
        }?;
        Ok(handle)
    }

    /// Adds a conditional node after what the stream has captured; returns its body.
    fn conditional(&self, stream: &Stream, handle: u64, repeat: bool) -> Result<sys::CUgraph> {
        let context = self.executor.context();
        let api = context.api;
        let (mut status, mut id, mut count) = (0, 0, 0);
        let (mut graph, mut after, mut edges) =
            (std::ptr::null_mut(), std::ptr::null(), std::ptr::null());
        // SAFETY: the stream is capturing; the lists it gives live until its next capture call.
        unsafe {
            api.cuStreamGetCaptureInfo_v3(
                stream.raw,
                &mut status,
                &mut id,
                &mut graph,
                &mut after,
                &mut edges,
                &mut count,
            )
        }?;
        // SAFETY: a C struct for which all zeroes is the documented initial value.
        let mut params: sys::CUgraphNodeParams = unsafe { std::mem::zeroed() };
        params.type_ = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL;
        let kind = if repeat {
            sys::CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_WHILE
        } else {
            sys::CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_IF
        };
        params.__bindgen_anon_1.conditional = sys::CUDA_CONDITIONAL_NODE_PARAMS {
            handle,
            type_: kind,
            size: 1,
            phGraph_out: std::ptr::null_mut(),
            ctx: context.raw,
        };
        let mut node = std::ptr::null_mut();
        // SAFETY: the graph and its nodes are those being captured.
        unsafe { api.cuGraphAddNode_v2(&mut node, graph, after, edges, count, &mut params) }?;
        let set = 1; // CU_STREAM_SET_CAPTURE_DEPENDENCIES: what follows waits for this node only.
        // SAFETY: the node was just added to the graph being captured.
        unsafe {
            api.cuStreamUpdateCaptureDependencies_v2(
                stream.raw,
                &mut node,
                std::ptr::null(),
                1,
                set,
            )
        }?;
        // SAFETY: the driver set the list to the node's one body, which the graph owns.
        Ok(unsafe { *params.__bindgen_anon_1.conditional.phGraph_out })
    }
}
