//! `dacapo graph diff`.

use super::{ModelArgs, ProgramSource, Shape, parse_phase, parse_target};
use crate::exit::bad_input;
use anyhow::{Context, Result};
use clap::Args;
use graph::Plan;
use graph::compile::fuse::Fusion;

/// Show what differs between two graphs of a model
#[derive(Args, Debug)]
pub(super) struct DiffArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// decode/8, prefill/512, with @cpu or @h200 and +unfused if wanted, or a file made by
    /// `explain --format plan`
    a: String,
    /// The same for the other
    b: String,
}

pub(super) fn run(args: &DiffArgs, source: &dyn ProgramSource) -> Result<()> {
    let a = plan(&args.a, &args.model, source)?;
    let b = plan(&args.b, &args.model, source)?;
    let differences = a.diff(&b);
    println!("{} ({}) → {} ({})", args.a, a.short_hash(), args.b, b.short_hash());
    for difference in &differences {
        println!("{difference}");
    }
    if differences.is_empty() {
        println!("the same");
    }
    Ok(())
}

fn plan(text: &str, model: &ModelArgs, source: &dyn ProgramSource) -> Result<Plan> {
    if text.ends_with(".json") {
        let json = std::fs::read_to_string(text).with_context(|| format!("reading {text}"))?;
        return serde_json::from_str(&json).with_context(|| format!("{text} is not a plan"));
    }
    let (text, unfused) = match text.strip_suffix("+unfused") {
        Some(rest) => (rest, true),
        None => (text, false),
    };
    let (shape, target) = text.split_once('@').unwrap_or((text, "h200"));
    let mut target = parse_target(target)?;
    target.fusion = unfused.then_some(Fusion::NONE);
    let wrong = || bad_input(format!("`{text}` is not a graph: write decode/8 or prefill/512"));
    let (phase, size) = shape.split_once('/').ok_or_else(wrong)?;
    let phase = parse_phase(phase).map_err(bad_input)?;
    let size = size.parse().ok().filter(|&size| size > 0).ok_or_else(wrong)?;
    model.plan(source, &target, &Shape { phase, size })
}
