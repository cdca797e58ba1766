//! `dacapo graph explain`.

use super::{DEFAULT_TARGET, ModelArgs, Shape, parse_phase, parse_target};
use crate::numbers::{SEQUENCES, TOKENS};
use crate::output::Output;
use crate::programs::Programs;
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use graph::Phase;
use graph::compile::fuse::Fusion;
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
    /// Drafts of every sequence that a decode step verifies; needs --spec
    #[arg(long, value_name = "K", requires = "spec", value_parser = clap::value_parser!(u32).range(1..=8))]
    drafts: Option<u32>,
    /// cpu or h200; the default does not depend on this machine
    #[arg(long, default_value = DEFAULT_TARGET)]
    target: String,
    /// Disable fusion
    #[arg(long)]
    unfused: bool,
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

pub(super) fn run(args: &ExplainArgs, programs: &Programs<'_>) -> Result<()> {
    let target = parse_target(&args.target)?.device;
    let size = if args.phase == Phase::Decode { args.batch } else { args.tokens };
    let drafts = args.drafts.filter(|_| args.phase == Phase::Decode);
    let shape = Shape { phase: args.phase, size, q_len: drafts.map_or(1, |drafts| drafts + 1) };
    let opened = programs.open(&args.model)?;
    let mut configured = programs.configure(&opened, &args.model, target, args.model.given(&[]))?;
    configured.target.fusion = args.unfused.then_some(Fusion::NONE);
    let text = match args.format {
        Format::Program => configured.program().to_json() + "\n",
        format => {
            let (plan, target) = shape.plan(&configured)?;
            let explained = || {
                let explained = graph::explain::explain(&plan, &target);
                explained.with_caches(configured.program(), &configured.limits)
            };
            match format {
                Format::Svg => plan.svg(),
                Format::Plan => serde_json::to_string_pretty(&plan)? + "\n",
                Format::Json => explained().json() + "\n",
                Format::Table | Format::Program => explained().table(),
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
