//! `dacapo graph explain`.

use super::{DEFAULT_TARGET, ModelArgs, ProgramSource, Shape, parse_phase, parse_target};
use crate::numbers::{SEQUENCES, TOKENS};
use crate::output::Output;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use graph::Phase;
use graph::compile::fuse::Fusion;
use graph::compile::merge::Merge;
use std::io::Write;
use std::path::PathBuf;

/// Show the nodes of a graph: layer, kernel, grid, bytes, spans
#[derive(Args, Debug)]
pub(super) struct ExplainArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// decode or prefill
    #[arg(long, value_parser = parse_phase, default_value = "decode")]
    phase: Phase,
    /// Size of a decode step, in sequences
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(SEQUENCES))]
    batch: u32,
    /// Size of a prefill step, in tokens
    #[arg(long, value_name = "N", default_value_t = 512)]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS))]
    tokens: u32,
    /// cpu or h200; the default does not depend on this machine
    #[arg(long, default_value = DEFAULT_TARGET)]
    target: String,
    /// Disable fusion
    #[arg(long)]
    unfused: bool,
    /// Merge all layers into one node: where measured to be faster (auto), never (nodes), or where
    /// a kernel exists (one)
    #[arg(long, value_parser = parse_merge, default_value = "auto")]
    layers: Merge,
    /// table, json, svg (a drawing of nodes and workspace), plan (JSON for `graph diff`) or program
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// Write to a file instead of standard output
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Table,
    Json,
    Svg,
    Plan,
    Program,
}

fn parse_merge(text: &str) -> Result<Merge, String> {
    Merge::named(text).ok_or_else(|| "use auto, nodes or one".into())
}

pub(super) fn run(args: &ExplainArgs, source: &dyn ProgramSource) -> Result<()> {
    let mut target = parse_target(&args.target)?;
    target.fusion = args.unfused.then_some(Fusion::NONE);
    target.merge = args.layers;
    let size = if args.phase == Phase::Decode { args.batch } else { args.tokens };
    let shape = Shape { phase: args.phase, size };
    let text = match args.format {
        Format::Program => {
            source.program(&args.model.model, &args.model.load_format, &target)?.to_json() + "\n"
        }
        format => {
            let plan = args.model.plan(source, &target, &shape)?;
            match format {
                Format::Svg => plan.svg(),
                Format::Plan => serde_json::to_string_pretty(&plan)? + "\n",
                Format::Json => graph::explain::explain(&plan, &target).json() + "\n",
                Format::Table | Format::Program => graph::explain::explain(&plan, &target).table(),
            }
        }
    };
    match &args.output {
        Some(path) => {
            std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
        }
        None => Ok(Output::new().write_all(text.as_bytes())?),
    }
}
