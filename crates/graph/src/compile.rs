//! Program + target + key → [`Plan`]. Each pass is a function over plain data in a file of its own:
//!
//! | pass | does |
//! |---|---|
//! | `adapt` | a step without adapters loses their nodes; with them, linears take theirs in where the target has a kernel for both |
//! | [`fold`] | additions and activations are fused with the linear before them, the prologue is put in front |
//! | `draft` | a step that verifies drafts gets the op that makes them, after the prologue; the plans of a model that drafts become part of the step's |
//! | [`fuse`] | norms are fused with linears, rope with attention, where the target has such kernels |
//! | `rotate` | rope is fused with the linear before it, where the target has such a kernel; after `bind` |
//! | [`order`] | a stable topological order; gathers that change nothing disappear |
//! | `choose` | which kernel runs an op in this bucket, and the scratch it needs |
//! | [`merge`] | all layers become one node, where that was asked for and a kernel can; after `bind` |
//! | [`place`] | offsets in the workspace by liveness over the whole plan, breaks included |
//! | [`mark`] | where `breakable` breaks and `piecewise` splits |
//! | [`bind`] | offsets and names become spans and ops |
//!
//! Everything up to `place` needs no memory: `workspace_bytes` stops there, so that the KV region can
//! take exactly what is left.

pub(crate) mod adapt;
pub mod bind;
pub(crate) mod choose;
pub(crate) mod draft;
pub mod fold;
pub mod fuse;
pub mod mark;
pub mod merge;
pub mod order;
pub mod place;
pub(crate) mod rotate;
pub(crate) mod uses;

use crate::program::{Program, ProgramError, Step, Symbolic};
use crate::{Phase, Plan, ShapeKey};
use device::op::{KvLayer, Lora};
use device::step::HostInputs;
use device::target::{CpuTarget, Target};
use device::{Span, StepLimits, StepState, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a plan is made for. Plain data: a plan for a GPU can be made without one.
#[derive(Clone, Debug)]
pub struct CompileTarget {
    /// The device.
    pub device: Arc<dyn Target>,
    /// What to fuse; `None` takes what suits the device and the key.
    pub fusion: Option<fuse::Fusion>,
    /// When all layers of a decode step become one node.
    pub merge: merge::Merge,
    /// Op names `breakable` breaks at.
    pub breaks: BTreeSet<String>,
    /// Op names `piecewise` splits at.
    pub splits: BTreeSet<String>,
}

impl CompileTarget {
    /// The processor.
    pub fn cpu() -> CompileTarget {
        Self::new(Arc::new(CpuTarget))
    }

    /// A target with the usual marks: breaks and splits at attention.
    pub fn new(device: Arc<dyn Target>) -> CompileTarget {
        let at: BTreeSet<String> = ["attention".to_owned()].into();
        CompileTarget {
            device,
            fusion: None,
            merge: merge::Merge::Never,
            breaks: at.clone(),
            splits: at,
        }
    }

    /// A short name, for listings.
    pub fn name(&self) -> String {
        self.device.name()
    }
}

/// Where the parts of an arena lie that a plan points into.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bindings {
    /// Every weight of the program, by name.
    pub weights: BTreeMap<String, Tensor>,
    /// The program's tables of rotations: positions × dim, f32: cosines, then sines.
    pub ropes: Vec<Tensor>,
    /// The step's tables.
    pub state: StepState,
    /// One per cache of the program.
    pub kv: Vec<KvLayer>,
    /// The page table of each cache.
    pub tables: Vec<u32>,
    /// One per recurrent state of the program: a row for each seat.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub carries: Vec<Tensor>,
    /// Copies of these: a row for each slot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub carry_copies: Vec<Tensor>,
    /// One per input of the program.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given: Vec<Tensor>,
    /// At least `workspace_bytes` of the largest key.
    pub workspace: Span,
    /// At least `scratch_bytes` of every key, in the state region and zero before the first step;
    /// `None` where no kernel needs any.
    pub scratch: Option<Span>,
    /// Where the host prepares decode steps' inputs, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inputs: Option<HostInputs>,
    /// Where tokens of experts are counted, by the name of their gate and up weights; in the state region and zero before
    /// the first step.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub loads: BTreeMap<String, Span>,
    /// At least `exchange_bytes` of every key, likewise, and touched by merged nodes alone.
    pub exchange: Option<Span>,
}

/// Why no plan could be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// The program itself is broken.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The program does not run in this phase.
    #[error("`{program}` has no {phase} phase")]
    Phase {
        /// The program.
        program: String,
        /// The phase.
        phase: Phase,
    },
    /// A value changed in place is read by more than one step.
    #[error("`{value}` is rewritten in place but read by {readers} steps")]
    SharedInPlace {
        /// The value.
        value: String,
        /// How many read it.
        readers: usize,
    },
    /// Steps that wait for each other.
    #[error("steps wait for each other: {steps}")]
    Cycle {
        /// Their names.
        steps: String,
    },
    /// A key larger than the state's limits.
    #[error("{key} exceeds the limits of {rows} rows and {tokens} tokens")]
    Limits {
        /// The key.
        key: String,
        /// Most rows.
        rows: u32,
        /// Most tokens.
        tokens: u32,
    },
    /// A weight, page set or table that is not bound as the program needs it.
    #[error("{what}: {problem}")]
    Binding {
        /// What.
        what: String,
        /// What is wrong.
        problem: String,
    },
    /// Plans are to be cut at an op that they do not have after fusion.
    #[error("break_at: no node is `{name}` after fusion; there are {there}")]
    NoSuchCut {
        /// The op.
        name: String,
        /// Ops that are there.
        there: String,
    },
    /// The workspace is too small for this key.
    #[error("{key} needs {needed} bytes of workspace; {available} are bound")]
    Workspace {
        /// The key.
        key: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes bound.
        available: u64,
    },
    /// An op, or limits of a step, that the device refuses.
    #[error(transparent)]
    Device(#[from] device::Error),
}

/// A program scheduled for a key, before it has memory: what runs, in which order, at which offsets.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// What runs.
    pub steps: Vec<Step>,
    /// Where values and scratch lie in the workspace.
    pub placement: place::Placement,
}

/// All passes that need no memory.
pub fn schedule(
    program: &Program,
    target: &CompileTarget,
    limits: &StepLimits,
    key: &ShapeKey,
) -> Result<Schedule, CompileError> {
    match program.is_step() {
        true => program.check()?,
        false => program.check_body()?,
    }
    if !program.phases.contains(&key.phase) {
        return Err(CompileError::Phase { program: program.name.clone(), phase: key.phase });
    }
    let uneven = key.phase == Phase::Decode && key.rows.checked_mul(key.q_len) != Some(key.tokens);
    if key.rows > limits.rows || key.tokens > limits.tokens || key.rows > key.tokens || uneven {
        let (rows, tokens) = (limits.rows, limits.tokens);
        return Err(CompileError::Limits { key: key.to_string(), rows, tokens });
    }
    let adapted = adapt::adapt(program, key);
    let fusion = fusion(target, key);
    let arrange = |takes: fold::Takes<'_>| {
        let steps = draft::draft(fold::fold(&adapted, takes), program, key);
        let steps = fuse::fuse(program, steps, key, fusion);
        let steps = order::drop_idle_gathers(steps, key);
        let steps = order::order(steps)?;
        let placement = place::place(program, key, &steps)?;
        Ok(Schedule { steps, placement })
    };
    let may_take = |lora: &Lora<Symbolic>| {
        fusion.adapters && target.device.adapts_rows(program.value(lora.x).rows.size(key))
    };
    let all = arrange(&may_take)?;
    let refused = adapt::refused(program, target, limits, key, &all)?;
    match refused.is_empty() {
        true => Ok(all),
        false => arrange(&|lora| may_take(lora) && !refused.contains(&lora.y)),
    }
}

fn fusion(target: &CompileTarget, key: &ShapeKey) -> fuse::Fusion {
    target.fusion.unwrap_or_else(|| fuse::Fusion::suited(&*target.device, key))
}

/// Bytes of workspace a key needs, exactly. Pure: no memory, no device.
pub(crate) fn workspace_bytes(
    program: &Program,
    target: &CompileTarget,
    limits: &StepLimits,
    key: &ShapeKey,
) -> Result<u64, CompileError> {
    let own = schedule(program, target, limits, key)?.placement.bytes;
    let pass =
        |pass: &draft::Drafting<'_>| workspace_bytes(pass.program, target, limits, &pass.key);
    let after = draft::pass_after(program, key).as_ref().map_or(Ok(0), pass)?;
    let passes = draft::passes(program, key);
    passes.iter().map(pass).try_fold(own + after, |most, bytes| Ok(most.max(bytes?)))
}

/// Bytes of scratch a key needs, exactly. Pure: no memory, no device.
pub(crate) fn scratch_bytes(
    program: &Program,
    target: &CompileTarget,
    limits: &StepLimits,
    key: &ShapeKey,
) -> Result<u64, CompileError> {
    let Schedule { steps, placement } = schedule(program, target, limits, key)?;
    // Kernels are asked about bound ops; a layout that never becomes memory binds them.
    let bindings = crate::layout::Layout::imagined(program, *limits, placement.bytes)?.bindings;
    let mut nodes = bind::bind(program, key, &bindings, &steps, &placement)?;
    choose::set_fixed(key, &mut nodes);
    target.device.hand_on(&mut nodes);
    let own = nodes.iter().map(|node| target.device.scratch_bytes(&node.op)).max().unwrap_or(0);
    let mut passes = draft::passes(program, key);
    passes.extend(draft::pass_after(program, key));
    let pass = |pass: &draft::Drafting<'_>| scratch_bytes(pass.program, target, limits, &pass.key);
    passes.iter().map(pass).try_fold(own, |most, bytes| Ok(most.max(bytes?)))
}

/// Bytes that merged nodes of a key exchange, exactly. Pure: no memory, no device.
pub(crate) fn exchange_bytes(
    program: &Program,
    target: &CompileTarget,
    limits: &StepLimits,
    key: &ShapeKey,
) -> Result<u64, CompileError> {
    if target.merge == merge::Merge::Never {
        return Ok(0);
    }
    let Schedule { steps, placement } = schedule(program, target, limits, key)?;
    let bindings = crate::layout::Layout::imagined(program, *limits, placement.bytes)?.bindings;
    let nodes = bind::bind(program, key, &bindings, &steps, &placement)?;
    let own = merge::exchange_bytes(target, key, &nodes);
    // Every number of rows drafts by the same program as one draft does.
    let drafted = program.drafter.as_ref().map(|drafter| &drafter.next);
    let drafted = drafted.map_or(Ok(0), |next| exchange_bytes(next, target, limits, key))?;
    Ok(own.max(drafted))
}

/// The plan of a program for a key: every op with its spans, ready to run or record.
pub fn compile(
    program: &Program,
    target: &CompileTarget,
    key: &ShapeKey,
    bindings: &Bindings,
) -> Result<Plan, CompileError> {
    let plan = plan(program, target, key, bindings)?;
    let plan = draft::add_passes(plan, program, target, bindings)?;
    for node in &plan.nodes {
        node.op.check()?;
        // Refuse a plan that cannot run.
        target.device.kernels(&node.op)?;
    }
    debug_assert_eq!(plan.check(), vec![], "the placement pass made an invalid plan");
    Ok(plan)
}

/// The plan of a program alone, not yet checked.
fn plan(
    program: &Program,
    target: &CompileTarget,
    key: &ShapeKey,
    bindings: &Bindings,
) -> Result<Plan, CompileError> {
    let Schedule { steps, placement } = schedule(program, target, &bindings.state.limits, key)?;
    let mut nodes = bind::bind(program, key, bindings, &steps, &placement)?;
    choose::set_fixed(key, &mut nodes);
    let mut marks = mark::mark(target, &steps);
    let mut values = bind::placed_values(program, key, bindings, &placement);
    if fusion(target, key).rope {
        rotate::rotate(target, &mut nodes, &mut marks, &mut values);
    }
    merge::merge_parts(target, key, bindings, &mut nodes, &mut marks, &mut values);
    choose::choose(target, bindings, &mut nodes)?;
    merge::merge(target, key, bindings, &mut nodes, &mut marks, &mut values)?;
    Ok(Plan {
        program: program.name.clone(),
        target: target.name(),
        key: *key,
        workspace: placement.bytes,
        nodes,
        breaks: marks.breaks,
        splits: marks.splits,
        values,
        passes: Vec::new(),
    })
}
