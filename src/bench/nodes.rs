//! `dacapo bench nodes`: where the time of a step goes. The nodes of each kind in the replayed plan
//! are recorded as a separate graph and timed. The whole step is timed too, once with results read
//! by the host and once only replayed. The difference of these two is host time; the difference of
//! the second and the sum of the nodes is lost between nodes.
//!
//! A decode step is replayed completely. A prefill step is replayed without its prologue and
//! sampling, because its mail can be read only once.

use super::experts::{ExpertFigure, Read, loads};
use super::mix::Mix;
use super::record;
use super::steady::{Pace, Steady};
use crate::cli::Global;
use crate::loading::{self, LoadArgs};
use crate::numbers::{SEQUENCES, TIMES, TOKENS_BEFORE};
use crate::output::say;
use anyhow::{Context, Result};
use clap::Args;
use device::{Graph, Item, Node, Op, RecordOptions};
use graph::Plan;
use graph::runner::ExpertLoad;
use model::GraphExecutor;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

/// Measure each kind of node of a decode or prefill step, and the whole step
#[derive(Args, Debug)]
pub(crate) struct NodesArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// Sequences per step
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', default_value = "1")]
    #[arg(value_parser = clap::value_parser!(u32).range(SEQUENCES))]
    batch: Vec<u32>,
    /// Tokens of each sequence before the first step
    #[arg(long, value_name = "N", default_value_t = 512)]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS_BEFORE))]
    context: u32,
    // Not a doc comment, because rustdoc would parse the brackets as a link.
    #[arg(long, value_name = "NxT+NxT,…", value_delimiter = ',', conflicts_with = "batch")]
    #[arg(help = "Measure prefill steps: PROMPTSxTOKENS[@CONTEXT], parts joined by +")]
    prefill: Vec<String>,
    /// Replays of each graph
    #[arg(long, value_name = "N", default_value_t = 12)]
    #[arg(value_parser = clap::value_parser!(u32).range(TIMES))]
    replays: u32,
    /// Write the results, with machine and command, to this file (- is standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// One kind of node.
#[derive(Clone, Debug, Serialize)]
struct Kind {
    name: String,
    nodes: usize,
    us_each: f64,
}

/// One step.
#[derive(Clone, Debug, Serialize)]
struct Figure {
    step: String,
    /// From result to result.
    step_ms: f64,
    /// Consecutive replays, without reading results.
    replay_ms: f64,
    /// The same with only the nodes of layers.
    layers_ms: f64,
    kinds: Vec<Kind>,
    /// For a model with experts, which of them were chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<ExpertFigure>,
    /// Bytes of the weights that a step reads, and the time that reading them takes at the measured bandwidth.
    weight_bytes: u64,
    weight_ms: f64,
}

pub(crate) fn run(args: &NodesArgs, global: &Global) -> Result<()> {
    let mixes: Vec<Mix> =
        args.prefill.iter().map(|text| Mix::parse(text, 0)).collect::<Result<_>>()?;
    let rows = mixes.iter().map(|mix| mix.rows.len() as u32);
    let most = if mixes.is_empty() { args.batch.iter().copied().max() } else { rows.max() };
    let tokens = mixes.iter().map(Mix::tokens).max();
    // Measured before the model fills the memory.
    let bandwidth = figures::read_bandwidth(&loading::open_device(global)?.0)?;
    let mut loaded = loading::load_sized(&args.load, global, most.unwrap_or(1), tokens)?;
    if args.load.drafts() > 0 {
        loaded.executor.force_drafts(args.load.drafts(), 0);
    }
    let mut figures = Vec::new();
    for mix in &mixes {
        figures.push(prefill(args, &mut loaded.executor, mix, bandwidth)?);
    }
    for &batch in args.batch.iter().filter(|_| mixes.is_empty()) {
        figures.push(decode(args, &mut loaded.executor, batch, bandwidth)?);
    }
    if let Some(path) = &args.json {
        record::write(path, &record::record(&loaded.device, &figures)?)?;
    }
    if args.json.as_deref() != Some("-".as_ref()) {
        print(&loaded.device, &figures)?;
    }
    Ok(())
}

fn decode(
    args: &NodesArgs,
    executor: &mut GraphExecutor,
    batch: u32,
    bandwidth: f64,
) -> Result<Figure> {
    let (warm, steps, context) = (8, 4 * args.replays, args.context);
    // Pages for the replays below, which also advance the sequences.
    let room = 5 * (args.replays + 1);
    let before = loads(executor)?;
    let mut steady = Steady::new(executor)?;
    let drafts = args.load.drafts();
    let room = room * (drafts + 1);
    let timing =
        steady.decode(&Pace { room, drafts, ..Pace::plain(batch, context, warm, steps) })?;
    let whole = Whole::new(executor, timing.step_ms(0.5), &before, bandwidth)?;
    let fits = |plan: &&Plan| plan.key.rows >= batch && plan.key.q_len == drafts + 1;
    let plans = executor.runners().decode.plans().filter(fits);
    let plan = plans.min_by_key(|plan| plan.key.rows).context("no bucket holds this batch")?;
    let nodes: Vec<&Node> = plan.nodes.iter().collect();
    let step = format!("batch {batch}, context {context}");
    measure(args, executor, &nodes, step, whole)
}

fn prefill(
    args: &NodesArgs,
    executor: &mut GraphExecutor,
    mix: &Mix,
    bandwidth: f64,
) -> Result<Figure> {
    let before = loads(executor)?;
    let timing =
        Steady::new(executor)?.prefill(&mix.rows, args.replays, std::time::Duration::ZERO)?;
    let whole = Whole::new(executor, timing.step_ms(0.5), &before, bandwidth)?;
    let plans = executor.runners().prefill.plans().filter(|plan| plan.key.tokens >= mix.tokens());
    let plan = plans.min_by_key(|plan| plan.key.tokens).context("no bucket holds this step")?;
    let ends = |node: &&Node| matches!(node.op, Op::Prologue(_) | Op::Sample(_));
    let nodes: Vec<&Node> = plan.nodes.iter().filter(|node| !ends(node)).collect();
    measure(args, executor, &nodes, mix.name.clone(), whole)
}

/// The whole step.
struct Whole {
    step_ms: f64,
    experts: Option<ExpertFigure>,
    weight_bytes: u64,
    weight_ms: f64,
}

impl Whole {
    fn new(
        executor: &GraphExecutor,
        step_ms: f64,
        before: &[ExpertLoad],
        bandwidth: f64,
    ) -> Result<Whole> {
        let program = executor.runners().program();
        let experts = ExpertFigure::between(program, before, &loads(executor)?);
        let chosen = experts.as_ref().map_or(0, |experts| experts.bytes);
        let weight_bytes = Read::of(program).bytes + chosen;
        let weight_ms = weight_bytes as f64 / bandwidth * 1e3;
        Ok(Whole { step_ms, experts, weight_bytes, weight_ms })
    }
}

fn measure(
    args: &NodesArgs,
    executor: &GraphExecutor,
    all: &[&Node],
    step: String,
    whole: Whole,
) -> Result<Figure> {
    let runners = executor.runners();
    let state = &runners.bindings().state;
    let counts = runners.device().read(runners.arena(), state.counts.span)?;
    let time = |nodes: &[&Node]| -> Result<f64> {
        let graph = graph_of(executor, nodes)?;
        graph.replay()?;
        runners.device().sync()?;
        let start = Instant::now();
        for _ in 0..args.replays {
            graph.replay()?;
        }
        runners.device().sync()?;
        Ok(start.elapsed().as_secs_f64() / f64::from(args.replays))
    };
    let layers: Vec<&Node> = all.iter().copied().filter(|node| node.layer.is_some()).collect();
    let mut names: Vec<&str> = Vec::new();
    for node in all {
        if !names.contains(&node.name.as_str()) {
            names.push(&node.name);
        }
    }
    let (replay_ms, layers_ms) = (time(all)? * 1e3, time(&layers)? * 1e3);
    let mut kinds = Vec::new();
    for name in names {
        let nodes: Vec<&Node> = all.iter().copied().filter(|node| node.name == name).collect();
        let us_each = time(&nodes)? * 1e6 / nodes.len() as f64;
        kinds.push(Kind { name: name.into(), nodes: nodes.len(), us_each });
    }
    // Restores the launch counts and the ring, which the replays changed without the mailbox.
    runners.device().write(runners.arena(), state.counts.span, &counts)?;
    runners.device().write(runners.arena(), state.ring, &vec![0; state.ring.len as usize])?;
    let Whole { step_ms, experts, weight_bytes, weight_ms } = whole;
    Ok(Figure { step, step_ms, replay_ms, layers_ms, kinds, experts, weight_bytes, weight_ms })
}

fn graph_of(executor: &GraphExecutor, nodes: &[&Node]) -> Result<Graph> {
    let runners = executor.runners();
    let options = RecordOptions::default();
    let mut recording = runners.device().record(runners.arena(), "nodes", options)?;
    for node in nodes {
        recording.push(Item::Node((*node).clone()))?;
    }
    recording.finish()?.pop().context("internal error: no graph was recorded")
}

fn print(device: &str, figures: &[Figure]) -> Result<()> {
    say!("{device}")?;
    for f in figures {
        let sum: f64 = f.kinds.iter().map(|kind| kind.us_each * kind.nodes as f64).sum();
        say!(
            "{}: step {:.3} ms, replay only {:.3}, layers only {:.3}, sum of nodes {:.3}",
            f.step,
            f.step_ms,
            f.replay_ms,
            f.layers_ms,
            sum * 1e-3
        )?;
        for kind in &f.kinds {
            say!("  {:<12} {:>4} × {:>8.2} µs", kind.name, kind.nodes, kind.us_each)?;
        }
        let megabytes = f.weight_bytes as f64 * 1e-6;
        say!("  weights      {megabytes:.0} MB, at least {:.3} ms", f.weight_ms)?;
        if let Some(experts) = &f.experts {
            experts.print(&f.step)?;
        }
    }
    Ok(())
}
