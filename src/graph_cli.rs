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

use crate::exit::bad_input;
use crate::numbers::{PAGE, SEQUENCES, TOKENS};
use crate::programs::Programs;
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use device::cuda::launch::Target;
use graph::config::Given;
use graph::layout::Layout;
use graph::{CompileTarget, Phase, Plan};
use model::{Configured, Speculation};
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

pub(crate) fn run(args: &GraphArgs, programs: &Programs<'_>) -> Result<()> {
    match &args.command {
        GraphCommand::Explain(args) => explain::run(args, programs),
        GraphCommand::Diff(args) => diff::run(args, programs),
        GraphCommand::Verify(args) => verify::run(args, programs),
        GraphCommand::Tune(args) => tune::run(args),
    }
}

/// The model, and the sizes of its graphs.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelArgs {
    /// A folder, a .gguf file, a hub id, or with `--load-format dummy` a bundled shape such as
    /// qwen3-8b
    pub(crate) model: String,
    /// auto: the model's files; dummy: only its shape
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub(crate) load_format: String,
    // Not doc comments, because rustdoc would parse the brackets as links.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(SEQUENCES))]
    #[arg(
        help = "Most sequences that run at once [default: as `serve`: 256 on a GPU, 32 on a CPU]"
    )]
    pub(crate) max_batch: Option<u32>,
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(TOKENS))]
    #[arg(help = "Most tokens of a step [default: what the device puts into one]")]
    pub(crate) max_tokens: Option<u32>,
    /// Most tokens of a sequence; the model's own limit still applies
    #[arg(long, value_name = "N", default_value_t = 8192)]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS))]
    pub(crate) max_context: u32,
    /// Tokens per KV page
    #[arg(long, value_name = "N", default_value_t = 16)]
    #[arg(value_parser = clap::value_parser!(u32).range(PAGE))]
    pub(crate) page_size: u32,
    #[arg(long, value_name = "METHOD[:K]", help = "Steps verify drafts, as in `serve --spec`")]
    pub(crate) spec: Option<Speculation>,
    /// The model that drafts, for --spec draft
    #[arg(long, value_name = "MODEL", requires = "spec")]
    pub(crate) spec_model: Option<String>,
    #[command(flatten)]
    pub(crate) graph: crate::graph_args::GraphArgs,
}

impl ModelArgs {
    /// The options of graphs with others for some flags.
    pub(crate) fn given(&self, flags: &[(&str, &str)]) -> Given {
        let mut given = self.graph.given.clone();
        for (flag, value) in flags {
            given.flags.insert((*flag).into(), (*value).into());
        }
        given
    }

    /// The plan that a step of this shape runs on a target, laid out without allocating memory.
    pub(crate) fn plan(
        &self,
        programs: &Programs<'_>,
        target: &CompileTarget,
        shape: &Shape,
        given: Given,
    ) -> Result<(Plan, CompileTarget)> {
        let model = programs.open(self)?;
        let mut configured = programs.configure(&model, self, target.device.clone(), given)?;
        configured.target.fusion.clone_from(&target.fusion);
        shape.plan(&configured)
    }
}

/// A phase and a size in its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) phase: Phase,
    pub(crate) size: u32,
    /// Tokens of every row of a decode step.
    pub(crate) q_len: u32,
}

impl Shape {
    /// The plan of the bucket that a step of this shape takes, and its target.
    fn plan(&self, of: &Configured) -> Result<(Plan, CompileTarget)> {
        let (config, unit) = match self.phase {
            Phase::Decode => (&of.decode, "sequences"),
            Phase::Prefill => (&of.prefill, "tokens"),
        };
        let target = config.cut(of.target.clone());
        let key = config.key(self.size, &of.limits).ok_or_else(|| {
            let most = config.buckets.largest();
            bad_input(match most {
                0 => format!("this model has no {} steps", self.phase),
                _ => format!("no graph for {} {unit}: the largest is {most}", self.size),
            })
        })?;
        if !config.covers(key.bucket(), self.q_len) {
            return Err(bad_input(format!("{key} has no graph for {} tokens per row", self.q_len)));
        }
        let key = key.with_q_len(self.q_len);
        let program = of.program();
        let mut layout = Layout::new(program, &target, of.limits, std::slice::from_ref(&key))?;
        layout.add_inputs(of.graphs.prep)?;
        layout.add_pages(program, 1 + of.limits.pages_per_seat);
        let mut bindings = layout.bindings;
        bindings.state.repeats = of.decode.steps > 1;
        Ok((graph::compile(program, &target, &key, &bindings)?, target))
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
        _ => bail!(bad_input(format!("unknown target `{name}`: use cpu or h200"))),
    }
}
