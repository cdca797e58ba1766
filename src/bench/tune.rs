//! `dacapo bench tune`: measures the variants of every kernel in a model's decode steps on this GPU
//! and stores the fastest in the kernel cache, where the next start finds them.

use super::steady::{Pace, Steady};
use crate::cli::Global;
use crate::exit::bad_input;
use crate::loading::{self, LoadArgs};
use crate::numbers::{SEQUENCES, TIMES, TOKENS_BEFORE};
use crate::output::say;
use anyhow::{Context, Result};
use clap::Args;
use device::cuda::cache::Cache;
use device::cuda::tune::{Replays, tune, tune_layers};
use device::cuda::tuned::{Tuned, file};
use device::op::{Fused, FusedKernel};
use device::{Node, Op, Span};
use graph::Phase;
use graph::bucket::{BucketSpec, Buckets};
use std::path::PathBuf;

/// Find the fastest variant of every kernel in a model's decode steps, and store the choice
#[derive(Args, Debug)]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// Decode buckets to tune, in sequences; by default the automatic ones for 256 sequences
    #[arg(long, value_name = "N,N,…", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(SEQUENCES))]
    batch: Vec<u32>,
    /// Tokens of each sequence
    #[arg(long, value_name = "N", default_value_t = 512)]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS_BEFORE))]
    context: u32,
    /// Replays of each variant
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(TIMES))]
    replays: u32,
    /// Also write the result to this file
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(crate) fn run(args: &TuneArgs, global: &Global) -> Result<()> {
    let auto = Buckets::generate(&BucketSpec::Auto, Phase::Decode, 256, None)?.sizes;
    let batches = if args.batch.is_empty() { &auto } else { &args.batch };
    let most = batches.iter().copied().max().unwrap_or(1);
    let buckets: Vec<String> = batches.iter().map(u32::to_string).collect();
    let load = args.load.with_graph_flag("graph-buckets-decode", &buckets.join(","));
    let load = load.with_graph_flag("graph-backend-prefill", "disabled");
    let mut loaded = loading::load(&load, global, most)?;
    let Some(target) = loaded.executor.device().gpu() else {
        return Err(bad_input("bench tune needs a GPU: CPU kernels have no variants"));
    };
    let mut found = Tuned::default();
    for &batch in batches {
        // A real step first, because the time of attention depends on the prologue's plan of the
        // rows.
        let pace = Pace::plain(batch, args.context, 2, 2);
        Steady::new(&mut loaded.executor)?.decode(&pace)?;
        let runners = loaded.executor.runners();
        let mut plans = runners.decode.plans();
        let plan = plans.find(|plan| plan.key.rows == batch).context("the bucket has no plan")?;
        let mut timer =
            Replays { device: runners.device(), arena: runners.arena(), rounds: args.replays };
        let mut shown = Ok(());
        let show = &mut |shape: &str, choice: &_| {
            if shown.is_ok() {
                shown = say!("{shape}: {choice}");
            }
        };
        let (nodes, layers) = split_layers(&plan.nodes, runners.bindings().exchange);
        found.merge(tune(&nodes, &target, &mut timer, show)?);
        if let Some((shape, choice)) = tune_layers(&layers, &target, &mut timer)? {
            show(&shape, &choice);
            found.insert(shape, choice);
        }
        shown?;
    }
    let path = file(Cache::of_user().folder()?, &target.arch(), target.sms);
    let mut all = Tuned::read(&path).unwrap_or_default();
    all.merge(found.clone());
    all.write(&path)?;
    if let Some(path) = &args.output {
        std::fs::write(path, found.to_string())
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// The nodes of a step with merged layers split into separate nodes, and all layers as one merged
/// op.
fn split_layers(nodes: &[Node], exchange: Option<Span>) -> (Vec<Node>, Op) {
    let apart = |node: &Node| {
        let Op::Fused(Fused { members, kernel: FusedKernel::Layers { .. } }) = &node.op else {
            return vec![node.clone()];
        };
        let member = |op: &Op| Node { op: op.clone(), name: op.name().into(), layer: Some(0) };
        members.iter().map(member).collect()
    };
    let nodes: Vec<Node> = nodes.iter().flat_map(apart).collect();
    let members = nodes.iter().filter(|node| node.layer.is_some()).map(|node| node.op.clone());
    let kernel = FusedKernel::Layers { exchange };
    let layers = Fused { members: members.collect(), kernel }.into();
    (nodes, layers)
}
