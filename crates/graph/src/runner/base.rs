//! What both phases share: choosing a bucket, recording, replaying, counting.

use super::lazy::{Recorder, Wants};
use super::profile::Profile;
use super::{Capture, Debug, Fallback, PhaseRule, RunError, StepShape};
use crate::backend::{Backend, BackendKind, Context, Piece, run_eagerly};
use crate::bucket::Buckets;
use crate::compile::{Bindings, CompileError, CompileTarget, compile};
use crate::program::Program;
use crate::{Counters, Form, Plan, Prep, Reason, ShapeKey, verify};
use device::{Arena, Device, Item, Node, Op, RecordOptions, Region, StepLimits};
use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Plans for uncovered shapes that are kept; the oldest goes first.
const EAGER_PLANS: usize = 16;

/// How a phase runs; what the configuration resolves to.
#[derive(Clone, Debug, PartialEq)]
pub struct RunnerConfig {
    /// How plans are recorded.
    pub backend: BackendKind,
    /// Which sizes get a graph.
    pub buckets: Buckets,
    /// A step that would waste more of its bucket than this does not replay.
    pub max_padding: Option<f64>,
    /// When graphs are recorded.
    pub capture: Capture,
    /// What happens to uncovered steps.
    pub fallback: Fallback,
    /// What is checked at every step.
    pub debug: Debug,
    /// Replays of each step, where they are compared.
    pub replays: u32,
    /// Bytes graphs of this phase may take.
    pub budget: Option<u64>,
    /// How to record.
    pub options: RecordOptions,
    /// Op names to break and split at; `None` leaves it to the target.
    pub break_at: Option<BTreeSet<String>>,
    /// Who prepares the inputs of decode steps.
    pub prep: Prep,
    /// Most decode steps of one launch.
    pub steps: u32,
    /// Tokens per row for which every decode bucket is recorded besides one, ascending: to verify as many drafts less one.
    pub q_lens: Vec<u32>,
    /// Most tokens of a step with several tokens per row.
    pub most_verified: u32,
    /// Every graph is recorded a second time, with the nodes of adapters.
    pub adapters: bool,
}

impl RunnerConfig {
    /// This backend and these buckets; everything else has its default.
    pub fn new(backend: BackendKind, buckets: Buckets) -> RunnerConfig {
        RunnerConfig {
            backend,
            buckets,
            max_padding: None,
            capture: Capture::default(),
            fallback: Fallback::default(),
            debug: Debug::default(),
            replays: 1,
            budget: None,
            options: RecordOptions::default(),
            break_at: None,
            prep: Prep::Device,
            steps: 1,
            q_lens: Vec::new(),
            most_verified: u32::MAX,
            adapters: false,
        }
    }

    /// Whether a decode bucket is recorded for so many tokens per row.
    pub fn covers(&self, bucket: u32, q_len: u32) -> bool {
        let wide = self.q_lens.contains(&q_len);
        q_len == 1 || (wide && bucket.saturating_mul(q_len) <= self.most_verified)
    }

    /// In which forms every bucket is recorded.
    pub(crate) fn forms(&self) -> &'static [Form] {
        match (self.prep, self.steps) {
            (Prep::Fused, _) => &[Form::Staged(0), Form::Staged(1)],
            (_, 0 | 1) => &[Form::Once],
            _ => &[Form::Once, Form::Repeated],
        }
    }

    /// A target whose plans are cut as configured.
    pub fn cut(&self, mut target: CompileTarget) -> CompileTarget {
        if let Some(at) = &self.break_at {
            (target.breaks, target.splits) = (at.clone(), at.clone());
        }
        target
    }

    /// The graph that a step of this size takes, of one token per row; `None` past the last bucket.
    pub fn key(&self, size: u32, limits: &StepLimits) -> Option<ShapeKey> {
        let bucket = self.buckets.fit(size)?;
        Some(self.buckets.key(bucket, limits).with(self.forms()[0]))
    }

    /// Every graph of the phase, largest first.
    pub fn keys(&self, limits: &StepLimits) -> Vec<ShapeKey> {
        let forms = |key: ShapeKey| self.forms().iter().map(move |form| key.with(*form));
        let wide = self.q_lens.iter().rev().copied().chain([1]);
        let q_lens = |key: ShapeKey| {
            let wide = wide.clone().filter(move |&q_len| self.covers(key.rows, q_len));
            wide.map(move |q_len| key.with_q_len(q_len))
        };
        let adapters: &[bool] = if self.adapters { &[true, false] } else { &[false] };
        let adapted = |key: ShapeKey| adapters.iter().map(move |on| key.with_adapters(*on));
        let all = self.buckets.keys(limits).into_iter().flat_map(q_lens).flat_map(adapted);
        all.flat_map(forms).collect()
    }
}

/// The progress of recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Graphs done.
    pub done: usize,
    /// Graphs in all.
    pub total: usize,
    /// The one just done.
    pub key: ShapeKey,
    /// Its bytes.
    pub bytes: u64,
}

/// How a step ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ran {
    /// The key it ran under.
    pub key: ShapeKey,
    /// `None` if it replayed; else why not.
    pub eager: Option<Reason>,
    /// The first time this reason came up under `--graph-fallback warn`: worth a line in the log.
    pub warn: bool,
}

/// One phase's runner.
pub struct Runner<P> {
    device: Device,
    arena: Arena,
    program: Arc<Program>,
    target: CompileTarget,
    bindings: Arc<Bindings>,
    config: RunnerConfig,
    backend: Box<dyn Backend>,
    plans: BTreeMap<ShapeKey, Plan>,
    /// Plans of steps no bucket covers, oldest first.
    uncovered: Vec<Plan>,
    over_budget: Vec<ShapeKey>,
    recording: Duration,
    wants: Wants,
    /// The thread that records graphs that steps have earned; started by the first.
    recorder: Option<Recorder>,
    counters: Counters,
    phase: PhantomData<P>,
}

impl<P> std::fmt::Debug for Runner<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runner").field("config", &self.config).finish_non_exhaustive()
    }
}

impl<P: PhaseRule> Runner<P> {
    /// A runner whose plans are made and whose graphs are not.
    pub fn new(
        device: &Device,
        arena: &Arena,
        program: Arc<Program>,
        target: CompileTarget,
        bindings: Arc<Bindings>,
        config: RunnerConfig,
    ) -> Result<Runner<P>, CompileError> {
        let _range = device::nvtx::range(|| format!("plan {}", P::PHASE.name()));
        let target = config.cut(target);
        assert_eq!(config.buckets.phase, P::PHASE, "buckets of the other phase");
        let mut plans = BTreeMap::new();
        for key in config.keys(&bindings.state.limits) {
            let plan = compile(&program, &target, &key, &bindings)?;
            plans.insert(key, plan);
        }
        if config.backend.cuts() {
            check_cuts(config.break_at.iter().flatten(), &plans)?;
        }
        Ok(Runner {
            device: device.clone(),
            arena: arena.clone(),
            program,
            target,
            bindings,
            backend: config.backend.create(),
            config,
            plans,
            uncovered: Vec::new(),
            over_budget: Vec::new(),
            recording: Duration::ZERO,
            wants: Wants::default(),
            recorder: None,
            counters: Counters::default(),
            phase: PhantomData,
        })
    }

    /// What it computes.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// What happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The end of the last step ran again, op by op.
    pub(super) fn scored(&mut self) {
        self.counters.scored();
    }

    /// What its plans are made for.
    pub fn target(&self) -> &CompileTarget {
        &self.target
    }

    /// How it runs.
    pub fn config(&self) -> &RunnerConfig {
        &self.config
    }

    /// The plans of all buckets.
    pub fn plans(&self) -> impl Iterator<Item = &Plan> {
        self.plans.values()
    }

    /// The backend's view of what is recorded: key and bytes.
    pub fn recorded(&self) -> Vec<(ShapeKey, u64)> {
        let recorded = self.plans.keys().filter(|key| self.backend.has(key));
        recorded.map(|key| (*key, self.backend.bytes(key))).collect()
    }

    /// The graphs that the memory budget has no room for.
    pub fn dropped(&self) -> &[ShapeKey] {
        &self.over_budget
    }

    /// The largest step that can replay, in the phase's unit; 0 when none can.
    pub fn coverage(&self) -> u32 {
        match self.config.capture {
            _ if self.config.backend == BackendKind::Disabled => 0,
            Capture::Lazy => self.config.buckets.largest(),
            Capture::Startup => {
                self.recorded().iter().map(|(key, _)| key.bucket()).max().unwrap_or(0)
            }
        }
    }

    /// The key whose graph the step would replay, or why there is none.
    pub fn can_run(&self, shape: &StepShape) -> Result<ShapeKey, Reason> {
        self.can_run_as(shape, self.config.forms()[0])
    }

    fn can_run_as(&self, shape: &StepShape, form: Form) -> Result<ShapeKey, Reason> {
        if !P::admits(shape) {
            return Err(Reason::WrongPhase);
        }
        if self.config.backend == BackendKind::Disabled {
            return Err(Reason::Disabled);
        }
        let limits = &self.bindings.state.limits;
        let q_len = P::exact(shape, limits).q_len;
        let size = P::size(shape);
        let bucket = self.config.buckets.fit(size).ok_or(Reason::NotCovered)?;
        if !self.config.covers(bucket, q_len) {
            return Err(Reason::NotCovered);
        }
        let of = |bucket| {
            let key = self.config.buckets.key_for(bucket, shape.rows, limits);
            key.with_q_len(q_len).with(form).with_adapters(shape.adapters)
        };
        let key = of(bucket);
        let wasted = f64::from(bucket - size) / f64::from(bucket);
        if self.config.max_padding.is_some_and(|most| wasted > most) {
            return Err(Reason::Padding);
        }
        if self.backend.has(&key) {
            return Ok(key);
        }
        // A larger graph is better than none.
        let larger = self.config.buckets.sizes.iter().filter(|&&other| other > bucket);
        let mut larger = larger.map(|&other| of(other));
        match self.config.capture {
            _ if self.over_budget.contains(&key) => {
                larger.find(|key| self.backend.has(key)).ok_or(Reason::OverBudget)
            }
            Capture::Startup | Capture::Lazy => Err(Reason::NotRecorded),
        }
    }

    /// Records every bucket, largest first, within the budget. If it is too small for all, the
    /// buckets kept are the largest and those that save the most padding.
    pub fn record_all(&mut self, progress: &mut dyn FnMut(Progress)) -> Result<(), RunError> {
        self.prepare(&self.wanted())?;
        self.record_buckets(progress)
    }

    /// [`Runner::record_all`] after its nodes were prepared.
    pub(super) fn record_buckets(
        &mut self,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), RunError> {
        if !self.records_at_start() {
            return Ok(());
        }
        let keys = self.config.keys(&self.bindings.state.limits);
        let total = keys.len();
        self.over_budget.clear();
        let start = Instant::now();
        for (index, key) in keys.iter().enumerate() {
            self.record(key)?;
            let bytes = self.backend.bytes(key);
            progress(Progress { done: index + 1, total, key: *key, bytes });
        }
        self.recording = start.elapsed();
        self.keep_within_budget();
        Ok(())
    }

    fn records_at_start(&self) -> bool {
        self.config.backend != BackendKind::Disabled && self.config.capture == Capture::Startup
    }

    /// How long the last [`Runner::record_all`] took to record, without compiling kernels.
    pub fn recording_time(&self) -> Duration {
        self.recording
    }

    /// Every node whose kernels are compiled at the start: all that are recorded then or later, so that no step waits for
    /// a compiler.
    pub(super) fn wanted(&self) -> Vec<Item> {
        let plans = self.plans.values();
        let plans = plans.filter(|_| self.config.backend != BackendKind::Disabled);
        plans.flat_map(|plan| plan.nodes.iter().cloned().map(Item::Node)).collect()
    }

    /// Compiles for all of them at once: one bucket's kernels do not keep many cores busy.
    pub(super) fn prepare(&self, items: &[Item]) -> Result<(), RunError> {
        Ok(self.device.prepare(items, self.config.options)?)
    }

    /// Records everything again, for instance after weights moved or changed. Spans stay the same, so
    /// nothing else has to be updated.
    pub fn re_record(&mut self, progress: &mut dyn FnMut(Progress)) -> Result<(), RunError> {
        self.clear();
        self.record_all(progress)
    }

    /// Replaces the nodes of one piece of a plan ([`BackendKind::pieces`]), for instance by another kernel's, or by some that
    /// read a weight in another form, and records that piece alone. As many nodes take the place of those that were there; each
    /// reads and writes the values and pages of the one it replaces. If it is refused, or fails, all is as before.
    pub fn replace_piece(
        &mut self,
        key: &ShapeKey,
        piece: usize,
        nodes: Vec<Node>,
    ) -> Result<(), RunError> {
        self.settle();
        let refused = |problem: String| CompileError::Binding {
            what: format!("piece {piece} of {key}"),
            problem,
        };
        if self.config.backend != BackendKind::Piecewise {
            return Err(refused(format!("the backend is {}", self.config.backend)).into());
        }
        let old = self.plans.get(key).ok_or_else(|| refused("there is no such plan".into()))?;
        let range = match self.config.backend.pieces(old).into_iter().nth(piece) {
            Some(Piece::Graph(range)) => range,
            Some(Piece::Alone(index)) => index..index + 1,
            None => return Err(refused("there is no such piece".into()).into()),
        };
        if nodes.len() != range.len() {
            let (there, given) = (range.len(), nodes.len());
            return Err(refused(format!("it has {there} nodes, {given} are given")).into());
        }
        for (node, old) in nodes.iter().zip(&old.nodes[range.clone()]) {
            node.op.check()?;
            if values_of(&node.op) != values_of(&old.op) {
                return Err(refused(format!("`{}` has other values", node.name)).into());
            }
        }
        let mut plan = old.clone();
        plan.nodes.splice(range.clone(), nodes);
        let cx = Context::new(&self.device, &self.arena, self.config.options);
        let items: Vec<Item> = plan.nodes[range].iter().cloned().map(Item::Node).collect();
        self.device.prepare(&items, self.config.options)?;
        if self.backend.has(key) {
            self.counters.recorded += self.backend.record(&cx, &plan)? as u64;
        }
        self.plans.insert(*key, plan);
        Ok(())
    }

    /// Gives all graphs back.
    pub fn clear(&mut self) {
        self.settle();
        self.backend.clear();
    }

    /// Runs a step whose mail is posted under the key [`Runner::key_for`] gave.
    pub(super) fn run(
        &mut self,
        shape: &StepShape,
        choice: &Choice,
        profile: Option<(&mut Profile, u64)>,
    ) -> Result<Ran, RunError> {
        let size = P::size(shape);
        let key = choice.key;
        let cx = Context::new(&self.device, &self.arena, self.config.options);
        let Some(reason) = choice.eager else {
            let plan = &self.plans[&key];
            if self.config.debug == Debug::Verify {
                verify::step(&cx, &*self.backend, plan, &self.bindings, self.config.replays)?;
            } else {
                self.backend.replay(&cx, plan)?;
            }
            self.counters.replayed(&key, size);
            if self.config.capture == Capture::Lazy {
                self.wants.used(&key);
            }
            return Ok(Ran { key, eager: None, warn: false });
        };
        match profile {
            Some((profile, number)) => profile.run(&cx, self.plan(&key), number)?,
            None => run_eagerly(&cx, self.plan(&key))?,
        }
        let first = !self.counters.eager.contains_key(&reason);
        self.counters.eager(reason, size);
        let warn = first && reason.is_fallback() && self.config.fallback == Fallback::Warn;
        if reason == Reason::NotRecorded && self.config.capture == Capture::Lazy {
            self.consider(&key);
        }
        Ok(Ran { key, eager: Some(reason), warn })
    }

    /// The form in which launch `number` of up to `steps` steps is to run.
    pub(super) fn form(&self, shape: &StepShape, number: u64, steps: u32) -> Form {
        match self.config.forms() {
            [Form::Staged(_), ..] => Form::Staged((number % 2) as u8),
            [_, Form::Repeated] if steps > 1 && self.can_run_as(shape, Form::Repeated).is_ok() => {
                Form::Repeated
            }
            _ => Form::Once,
        }
    }

    /// Another step of a launch that repeats was reported.
    pub(super) fn repeated(&mut self, key: &ShapeKey, size: u32) {
        self.counters.replayed(key, size);
    }

    /// Decides how a step will run, before its mail is written.
    pub(super) fn choose(&mut self, shape: &StepShape, form: Form) -> Result<Choice, RunError> {
        self.collect(false);
        let limits = self.bindings.state.limits;
        let (key, eager) = match self.can_run_as(shape, form) {
            Ok(key) if self.config.debug == Debug::Eager => (key, Some(Reason::Debug)),
            Ok(key) => (key, None),
            Err(reason) => {
                if reason.is_fallback() && self.config.fallback == Fallback::Error {
                    let StepShape { rows, tokens, .. } = *shape;
                    return Err(RunError::NotCovered { rows, tokens, reason });
                }
                // The bucket's plan can also run op by op. A step gets its own plan only past the last
                // bucket, or with a number of tokens per row for which there are no buckets.
                let own = P::exact(shape, &limits).with_fixed(self.config.buckets.fixed);
                let own = own.with_adapters(shape.adapters);
                let bucket = self.config.buckets.fit(P::size(shape));
                let planned = |bucket: u32| {
                    let key = self.config.buckets.key_for(bucket, shape.rows, &limits);
                    key.with_q_len(own.q_len).with(form).with_adapters(shape.adapters)
                };
                let planned = bucket.map(planned).filter(|key| self.plans.contains_key(key));
                (planned.unwrap_or(own), Some(reason))
            }
        };
        if !self.plans.contains_key(&key) {
            self.make_uncovered(&key)?;
        }
        Ok(Choice { key, eager })
    }

    /// The plan of a key that a step ran under lately, covered by a bucket or not.
    pub fn plan_of(&self, key: &ShapeKey) -> Option<&Plan> {
        let uncovered = || self.uncovered.iter().find(|plan| plan.key == *key);
        self.plans.get(key).or_else(uncovered)
    }

    fn plan(&self, key: &ShapeKey) -> &Plan {
        self.plan_of(key).expect("choose made it")
    }

    fn make_uncovered(&mut self, key: &ShapeKey) -> Result<(), RunError> {
        if self.uncovered.iter().all(|plan| plan.key != *key) {
            let plan = compile(&self.program, &self.target, key, &self.bindings)?;
            if self.uncovered.len() == EAGER_PLANS {
                self.uncovered.remove(0);
            }
            self.uncovered.push(plan);
        }
        Ok(())
    }

    fn record(&mut self, key: &ShapeKey) -> Result<(), RunError> {
        let cx = Context::new(&self.device, &self.arena, self.config.options);
        self.counters.recorded += self.backend.record(&cx, &self.plans[key])? as u64;
        Ok(())
    }

    /// Records the step's bucket now, unless it is recorded or does not fit the budget.
    pub(super) fn make_ready(&mut self, shape: &StepShape) -> Result<(), RunError> {
        let Some(bucket) = self.config.buckets.fit(P::size(shape)) else { return Ok(()) };
        let limits = &self.bindings.state.limits;
        let key = self.config.buckets.key_for(bucket, shape.rows, limits);
        let key = key.with(self.config.forms()[0]);
        let off = self.config.backend == BackendKind::Disabled || self.backend.has(&key);
        if off || self.over_budget.contains(&key) {
            return Ok(());
        }
        let cx = Context::new(&self.device, &self.arena, self.config.options);
        self.backend.prepare(&cx, &self.plans[&key])?;
        self.record(&key)?;
        let bytes = self.recorded().iter().map(|(_, bytes)| bytes).sum::<u64>();
        if self.config.budget.is_some_and(|budget| bytes > budget) {
            self.backend.forget(&key);
            self.over_budget.push(key);
        }
        Ok(())
    }

    fn keep_within_budget(&mut self) {
        let Some(budget) = self.config.budget else { return };
        let recorded = self.recorded();
        let mut by_bucket: BTreeMap<u32, u64> = BTreeMap::new();
        for (key, bytes) in &recorded {
            *by_bucket.entry(key.bucket()).or_default() += bytes;
        }
        let candidates: Vec<_> = by_bucket.into_iter().rev().collect();
        let kept = crate::tune::within_budget(&candidates, &self.counters.sizes, budget);
        for (key, _) in recorded {
            if !kept.contains(&key.bucket()) {
                self.backend.forget(&key);
                self.over_budget.push(key);
            }
        }
    }

    /// Lazy capture: has a key recorded that earned it, unless it is known not to fit.
    fn consider(&mut self, key: &ShapeKey) {
        let kept = self.recorded();
        if !self.wants.want(key, &kept, self.config.budget) {
            return;
        }
        if self.recorder.is_none() {
            let RunnerConfig { backend, options, .. } = self.config;
            match Recorder::start(&self.device, &self.arena, backend, options) {
                Ok(recorder) => self.recorder = Some(recorder),
                Err(problem) => {
                    device::notice::say(format_args!("no thread can record graphs: {problem}"));
                    return;
                }
            }
        }
        if let Some(recorder) = &self.recorder {
            recorder.record(&self.plans[key]);
        }
    }

    /// Takes what was recorded since the last step; with `wait`, all that is being recorded.
    fn collect(&mut self, wait: bool) {
        let Some(recorder) = self.recorder.take() else { return };
        while let Some((key, recorded)) = recorder.next(&mut self.wants, wait) {
            self.counters.recorded += recorded.graphs() as u64;
            let kept = self.recorded();
            match self.wants.recorded(&key, recorded.bytes(), &kept, self.config.budget) {
                Some(out) => {
                    let out = out.iter().filter_map(|key| self.backend.forget(key));
                    out.for_each(|old| recorder.destroy(old));
                    self.backend.keep(&key, recorded);
                }
                None => recorder.destroy(recorded),
            }
        }
        self.recorder = Some(recorder);
    }

    /// Waits for the graphs that are being recorded.
    pub fn settle(&mut self) {
        self.collect(true);
    }

    /// The nodes that copy a page in every layer of its table: those at the first places, whichever they are.
    pub(super) fn copy_page(&self, from: u32, to: u32) -> Vec<Node> {
        let kv = &self.bindings.kv;
        let first = |(layer, own): &(usize, &device::op::KvLayer)| {
            kv[..*layer].iter().all(|other| other.span != own.span)
        };
        let copy = |(layer, kv): (usize, &device::op::KvLayer)| {
            let page = |page: u32| kv.span.part(u64::from(page) * kv.page_bytes(), kv.page_bytes());
            let op = device::Op::Copy(device::op::Copy { from: page(from), to: page(to) });
            Node { op, name: "copy_page".into(), layer: Some(layer as u32) }
        };
        kv.iter().enumerate().filter(first).map(copy).collect()
    }
}

/// Refuses a name to cut at that no node of any plan has: the plan would be cut less than was asked for.
fn check_cuts<'a>(
    names: impl Iterator<Item = &'a String>,
    plans: &BTreeMap<ShapeKey, Plan>,
) -> Result<(), CompileError> {
    let nodes = plans.values().flat_map(|plan| &plan.nodes);
    let there: BTreeSet<&str> = nodes.map(|node| node.op.name()).collect();
    for name in names {
        if !there.is_empty() && !there.contains(name.as_str()) {
            let there = there.iter().copied().collect::<Vec<_>>().join(", ");
            return Err(CompileError::NoSuchCut { name: name.clone(), there });
        }
    }
    Ok(())
}

/// The values and pages that an op reads, and those that it writes.
fn values_of(op: &Op) -> [BTreeSet<(Region, u64, u64)>; 2] {
    let (reads, writes) = crate::plan::spans(op);
    [reads, writes].map(|spans| {
        let values = spans.iter().filter(|s| matches!(s.region, Region::Workspace | Region::Kv));
        values.map(|span| (span.region, span.offset, span.len)).collect()
    })
}

/// How a step will run.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    pub(super) key: ShapeKey,
    pub(super) eager: Option<Reason>,
}
