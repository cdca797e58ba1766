//! `dacapo graph`: inspects device graphs. `explain` and `diff` need neither a GPU nor weights,
//! because plans are plain data. `verify` runs every bucket and backend on this machine's device.
//! `tune` computes the bucket list with the least padding for observed sizes.

mod diff;
mod explain;
mod side;
mod tune;
mod verify;

pub(crate) use diff::Differences;
pub(crate) use side::{Side, Spec};
pub(crate) use verify::{VerifyArgs, verify};

use crate::numbers::{PAGE, SEQUENCES, TOKENS};
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use device::cuda::launch::Target;
use device::{Arena, Device, StepLimits};
use graph::layout::Layout;
use graph::program::Program;
use graph::{Bindings, CompileTarget, Phase, Plan, ShapeKey};
use std::sync::Arc;

/// Explain, compare, verify and tune device graphs
#[derive(Args, Debug)]
pub(crate) struct GraphArgs {
    #[command(subcommand)]
    command: GraphCommand,
}

#[derive(Subcommand, Debug)]
enum GraphCommand {
    Explain(explain::ExplainArgs),
    Diff(diff::DiffArgs),
    Verify(verify::VerifyArgs),
    Tune(tune::TuneArgs),
}

/// How these commands get models.
pub(crate) trait ProgramSource {
    /// The program of a model for a target. With `dummy` only the model's shape is read.
    fn program(&self, model: &str, load_format: &str, target: &CompileTarget) -> Result<Program>;

    /// Fills the weights and the rope table in a sealed arena.
    fn fill(
        &self,
        model: &str,
        load_format: &str,
        device: &Device,
        arena: &Arena,
        bindings: &Bindings,
    ) -> Result<()>;

    /// The device to verify on.
    fn open_device(&self) -> Result<Device>;
}

pub(crate) fn run(args: &GraphArgs, source: &dyn ProgramSource) -> Result<()> {
    match &args.command {
        GraphCommand::Explain(args) => explain::run(args, source),
        GraphCommand::Diff(args) => diff::run(args, source),
        GraphCommand::Verify(args) => verify::run(args, source),
        GraphCommand::Tune(args) => tune::run(args),
    }
}

/// The model, and the sizes of its graphs.
#[derive(Args, Debug)]
pub(crate) struct ModelArgs {
    /// A folder, a .gguf file, a hub id, or with `--load-format dummy` a bundled shape such as
    /// qwen3-8b
    pub(crate) model: String,
    /// auto: the model's files; dummy: only its shape
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub(crate) load_format: String,
    /// Most sequences that run at once
    #[arg(long, value_name = "N", default_value_t = 256)]
    #[arg(value_parser = clap::value_parser!(u32).range(SEQUENCES))]
    max_batch: u32,
    /// Most tokens of a step
    #[arg(long, value_name = "N", default_value_t = 8192)]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS))]
    max_tokens: u32,
    /// Most tokens of a sequence
    #[arg(long, value_name = "N", default_value_t = 8192)]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS))]
    max_context: u32,
    /// Tokens per KV page
    #[arg(long, value_name = "N", default_value_t = 16)]
    #[arg(value_parser = clap::value_parser!(u32).range(PAGE))]
    page_size: u32,
    /// Use the kernels of --deterministic, which are the same for every bucket
    #[arg(long)]
    deterministic: bool,
}

impl ModelArgs {
    fn limits(&self, program: &Program) -> StepLimits {
        let context = self.max_context.min(program.shape.max_positions);
        StepLimits {
            seats: self.max_batch,
            rows: self.max_batch,
            tokens: self.max_tokens.max(self.max_batch),
            pages_per_seat: context.div_ceil(self.page_size),
            page_size: self.page_size,
            vocab: program.shape.vocab,
            penalties: false,
            tokens_per_row: 1,
        }
    }

    /// The plan for a shape, laid out without allocating memory.
    pub(crate) fn plan(
        &self,
        source: &dyn ProgramSource,
        target: &CompileTarget,
        shape: &Shape,
    ) -> Result<Plan> {
        let program = source.program(&self.model, &self.load_format, target)?;
        let limits = self.limits(&program);
        let key = shape.key(&limits).with_fixed(self.deterministic);
        let mut layout = Layout::new(&program, target, limits, std::slice::from_ref(&key))?;
        layout.add_pages(&program, 1 + limits.pages_per_seat);
        Ok(graph::compile(&program, target, &key, &layout.bindings)?)
    }
}

/// A phase and a size in its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) phase: Phase,
    pub(crate) size: u32,
}

impl Shape {
    pub(crate) fn key(self, limits: &StepLimits) -> ShapeKey {
        match self.phase {
            Phase::Decode => ShapeKey::decode(self.size),
            Phase::Prefill => ShapeKey::prefill(self.size, self.size.min(limits.rows)),
        }
    }
}

/// `decode` or `prefill`.
fn parse_phase(text: &str) -> Result<Phase, String> {
    let found = Phase::ALL.into_iter().find(|phase| phase.name() == text);
    found.ok_or_else(|| format!("unknown phase `{text}`: use decode or prefill"))
}

/// The target of plans that name none; it does not depend on this machine.
const DEFAULT_TARGET: &str = "h200";

/// `cpu` or `h200`.
pub(crate) fn parse_target(name: &str) -> Result<CompileTarget> {
    match name {
        "cpu" => Ok(CompileTarget::cpu()),
        "h200" => Ok(CompileTarget::new(Arc::new(Target::h200()))),
        _ => bail!(crate::exit::bad_input(format!("unknown target `{name}`: use cpu or h200"))),
    }
}
