//! `dacapo bench decode`: the time of a decode step, compared to the memory bandwidth.

use super::experts::{ExpertFigure, Read, loads};
use super::plot;
use super::report::{BackendArgs, ReportArgs};
use super::steady::{Pace, Steady};
use crate::cli::Global;
use crate::exit::bad_input;
use crate::loading::{self, LoadArgs};
use crate::numbers::{SEQUENCES, TIMES, TOKENS_BEFORE};
use crate::output::say;
use crate::progress;
use anyhow::Result;
use clap::Args;
use engine::exec::{Executor, StepKind};
use graph::Plan;
use graph::program::Cache;
use serde::Serialize;

/// Measure decode steps: milliseconds per step, tokens per second, share of the bandwidth
#[derive(Args, Debug)]
pub(crate) struct DecodeArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// Sequences per step
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', default_value = "1")]
    #[arg(value_parser = clap::value_parser!(u32).range(SEQUENCES))]
    batch: Vec<u32>,
    /// Tokens of each sequence before the first step
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', default_value = "512")]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS_BEFORE))]
    context: Vec<u32>,
    /// Measured steps per row of the table
    #[arg(long, value_name = "N", default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(u32).range(TIMES))]
    steps: u32,
    /// Verify K drafts of every sequence in each step, to compare its time with that of a step without: --spec ngram:K
    #[arg(long, value_name = "K", conflicts_with = "spec")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=8))]
    spec_k: Option<u32>,
    /// Accept N of them whatever they are, for the rate at this acceptance: what is generated is not the model's text
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=8))]
    force_accept: Option<u32>,
    /// Compare with steps whose sequences have so many adapters in turn, of rank --max-lora-rank: the model without room
    /// for adapters, with room and no adapter in the step, and with each of these numbers
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', conflicts_with_all = ["lora", "max_loras"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    loras: Vec<u32>,
    #[command(flatten)]
    backend: BackendArgs,
    #[command(flatten)]
    report: ReportArgs,
}

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) backend: String,
    pub(crate) batch: u32,
    pub(crate) context: u32,
    ms: f64,
    ms_p99: f64,
    tokens_per_second: f64,
    /// Drafts of every sequence in a step, and how many of them were accepted by force.
    drafts: u32,
    forced: u32,
    /// Adapters that there is room for, and those of the step's sequences.
    slots: u32,
    adapters: u32,
    /// Bytes read by a step: weights (of experts, those that were chosen), and the KV pages of all sequences.
    bytes: u64,
    /// For a model with experts, which of them were chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<ExpertFigure>,
    terabytes_per_second: f64,
    bandwidth_share: f64,
    /// Measured read bandwidth, in bytes per second.
    pub(crate) read_bandwidth: f64,
    /// The least time of a step: its bytes divided by the bandwidth.
    floor_ms: f64,
    /// Floating-point operations per byte read.
    pub(crate) flops_per_byte: f64,
    pub(crate) teraflops: f64,
    nodes: usize,
    /// Most steps of one launch; the host time below is divided among them.
    steps_per_launch: u32,
    host_us: f64,
    host_us_p99: f64,
    /// The part of the host time in the call that starts the device.
    call_us: f64,
    replayed: bool,
    /// A hash of the tokens of all steps.
    tokens_hash: String,
}

pub(crate) fn run(args: &DecodeArgs, global: &Global) -> Result<()> {
    let loads = args.backend.loads(&args.load, "graph-backend-decode");
    let mut figures: Vec<Figure> = Vec::new();
    let mut device = String::new();
    for load in &loads {
        if !args.loras.is_empty() {
            measure(args, global, &load.with_slots(None), &[0], &mut figures)?;
        }
        let slots = args.loras.iter().copied().max();
        let adapters: Vec<u32> = [0].iter().chain(&args.loras).copied().collect();
        let load = if slots.is_some() { load.with_slots(slots) } else { load.clone() };
        device = measure(args, global, &load, &adapters, &mut figures)?;
    }
    let draw = |path: &std::path::Path| plot::roofline(path, &args.load.model, &figures);
    args.report.finish(&device, &figures, draw, || print(&device, &figures))
}

fn measure(
    args: &DecodeArgs,
    global: &Global,
    load: &LoadArgs,
    adapters: &[u32],
    figures: &mut Vec<Figure>,
) -> Result<String> {
    let most = args.batch.iter().copied().max().unwrap_or(1);
    // Measured before the model fills the memory.
    let bandwidth = figures::read_bandwidth(&loading::open_device(global)?.0)?;
    let load = load.with_drafts(args.spec_k);
    let (drafts, forced) = (load.drafts(), args.force_accept.unwrap_or(0));
    if forced > drafts {
        return Err(bad_input(format!("--force-accept {forced} of {drafts} drafts")));
    }
    let mut loaded = loading::load(&load, global, most)?;
    if drafts > 0 {
        loaded.executor.force_drafts(drafts, forced);
    }
    let read = Read::of(&loaded.program);
    let shape = loaded.program.shape;
    // Layers with a window read no more than that; what is carried is read and written.
    let (caches, carried) = (loaded.program.caches.clone(), 2 * loaded.program.carry_bytes());
    let kept = |tokens: u64| -> u64 {
        let read = |cache: &Cache| tokens.min(cache.window().map_or(u64::MAX, u64::from));
        caches.iter().map(|cache| cache.token_bytes() * read(cache)).sum::<u64>() + carried
    };
    let slots = loaded.executor.adapters();
    let rows = args.batch.len() * args.context.len() * adapters.len();
    let bar = progress::count(rows as u64, "decode");
    let mut steady = Steady::new(&mut loaded.executor)?;
    let mut timed = Vec::new();
    for &batch in &args.batch {
        let of = |&context| adapters.iter().map(move |adapters| (context, *adapters));
        for (context, adapters) in args.context.iter().flat_map(of) {
            let warm = Pace::warm(args.steps);
            let steps = args.steps;
            let pace = Pace { drafts, adapters, ..Pace::plain(batch, context, warm, steps) };
            let before = loads(steady.executor())?;
            let timing = steady.decode(&pace)?;
            let after = loads(steady.executor())?;
            let experts = ExpertFigure::between(&loaded.program, &before, &after);
            timed.push((batch, context, adapters, warm, timing, experts));
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let runner = &loaded.executor.runners().decode;
    let counters = loaded.executor.counters(StepKind::Decode);
    let replayed = counters.eager.is_empty();
    for (batch, context, adapters, warm, timing, experts) in timed {
        let middle = u64::from(context + warm + args.steps / 2);
        let chosen = experts.as_ref().map_or(0, |experts| experts.bytes);
        let different = u64::from(adapters.min(batch));
        let added = read.adapters / u64::from(slots.max(1)) * different;
        let bytes = read.bytes + chosen + added + u64::from(batch) * kept(middle);
        let ms = timing.step_ms(0.5);
        let achieved = bytes as f64 / (ms * 1e-3);
        let pairs = 4 * u64::from(shape.q_heads * shape.head_dim) * u64::from(shape.layers);
        let flops = (u64::from(batch) * (2 * read.parameters + pairs * middle)) as f64;
        let fits = |plan: &&Plan| {
            let key = &plan.key;
            key.rows >= batch && key.q_len == drafts + 1 && key.adapters == (adapters > 0)
        };
        let plan = runner.plans().filter(fits).min_by_key(|plan| plan.key.rows);
        figures.push(Figure {
            backend: runner.config().backend.to_string(),
            batch,
            context,
            ms,
            ms_p99: timing.step_ms(0.99),
            tokens_per_second: f64::from(batch * (1 + forced)) / timing.mean_step().as_secs_f64(),
            drafts,
            forced,
            slots,
            adapters,
            bytes,
            experts,
            terabytes_per_second: achieved * 1e-12,
            bandwidth_share: achieved / bandwidth,
            read_bandwidth: bandwidth,
            floor_ms: bytes as f64 / bandwidth * 1e3,
            flops_per_byte: flops / bytes as f64,
            teraflops: flops / (ms * 1e-3) * 1e-12,
            nodes: plan.map_or(0, |plan| plan.nodes.len()),
            steps_per_launch: runner.config().steps,
            host_us: timing.host_us(0.5),
            host_us_p99: timing.host_us(0.99),
            call_us: timing.call_us(0.5),
            replayed,
            tokens_hash: format!("{:016x}", timing.tokens),
        });
    }
    Ok(loaded.device)
}

/// What is special about a line. Steps with room for adapters are compared with the line of a model without.
fn notes(f: &Figure, figures: &[Figure]) -> String {
    let mut notes = match (f.replayed, f.drafts, f.forced) {
        (false, ..) => "  not all replayed".to_owned(),
        (true, 0, _) => String::new(),
        (true, drafts, 0) => format!("  {drafts} drafts"),
        (true, drafts, forced) => format!("  {drafts} drafts, {forced} accepted by force"),
    };
    if f.slots > 0 {
        notes += &format!("  {} adapters of {}", f.adapters, f.slots);
        let same = |other: &&Figure| {
            let shape = |f: &Figure| (f.batch, f.context, f.drafts);
            other.slots == 0 && shape(other) == shape(f) && other.backend == f.backend
        };
        if let Some(base) = figures.iter().find(same) {
            notes += &format!(": {:+.1} %", (f.ms / base.ms - 1.0) * 100.0);
        }
    }
    notes
}

fn print(device: &str, figures: &[Figure]) -> Result<()> {
    say!("{device}")?;
    say!(
        "backend    batch  context   ms/step      p99     tok/s  MB/step   TB/s  of read  floor ms  nodes  steps  host µs     p99  call µs"
    )?;
    for f in figures {
        say!(
            "{:<9} {:>6} {:>8} {:>9.3} {:>8.3} {:>9.0} {:>8.0} {:>6.2} {:>7.0}% {:>9.3} {:>6} {:>6} {:>8.1} {:>7.1} {:>8.1}{}",
            f.backend,
            f.batch,
            f.context,
            f.ms,
            f.ms_p99,
            f.tokens_per_second,
            f.bytes as f64 * 1e-6,
            f.terabytes_per_second,
            f.bandwidth_share * 100.0,
            f.floor_ms,
            f.nodes,
            f.steps_per_launch,
            f.host_us,
            f.host_us_p99,
            f.call_us,
            notes(f, figures)
        )?;
    }
    for f in figures {
        if let Some(experts) = &f.experts {
            experts.print(&format!("batch {}, context {}", f.batch, f.context))?;
        }
    }
    Ok(())
}
