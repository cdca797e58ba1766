//! `dacapo bench prefill`: prompts per second, time to the first token, cost of padding.

use super::mix::Mix;
use super::plot;
use super::report::{BackendArgs, ReportArgs};
use super::steady::Steady;
use crate::cli::Global;
use crate::loading::{self, LoadArgs};
use crate::progress;
use anyhow::{Result, ensure};
use clap::Args;
use graph::program::{Dim, ProgramOp};
use serde::Serialize;

/// Time prefill steps of a model: tokens per second and time to the first token
#[derive(Args, Debug)]
pub(crate) struct PrefillArgs {
    #[command(flatten)]
    load: LoadArgs,
    // Not a doc comment: rustdoc takes the brackets for a link.
    #[arg(long, alias = "mix", value_name = "NxT+NxT,…", value_delimiter = ',')]
    #[arg(
        help = "What one step feeds: PROMPTSxTOKENS[@CONTEXT], parts joined by +, or random[:TOKENS]"
    )]
    #[arg(default_value = "1x512")]
    shape: Vec<String>,
    /// Tokens that each sequence already has, where a shape does not say
    #[arg(long, value_name = "N", default_value_t = 0)]
    context: u32,
    /// Steps timed for each row of the table
    #[arg(long, value_name = "N", default_value_t = 5)]
    steps: u32,
    #[command(flatten)]
    backend: BackendArgs,
    #[command(flatten)]
    report: ReportArgs,
}

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) backend: String,
    shape: String,
    rows: u32,
    /// Live tokens of the step.
    pub(crate) tokens: u32,
    /// Tokens of the bucket the step was padded to.
    bucket: u32,
    pub(crate) ms: f64,
    pub(crate) tokens_per_second: f64,
    teraflops: f64,
    /// Share of what a large product reaches on this device.
    matrix_share: f64,
    /// Time over the bucket's own, filled, times the live share: 0 if padding cost nothing.
    padding_cost: f64,
    host_us: f64,
    /// Whether every step was replayed from a graph.
    replayed: bool,
}

/// What recording the prefill graphs of a backend took.
#[derive(Clone, Debug, Serialize)]
struct Recording {
    backend: String,
    graphs: usize,
    seconds: f64,
    bytes: u64,
}

#[derive(Debug, Default, Serialize)]
struct Figures {
    device: String,
    /// Floating-point operations per second of a large product.
    matrix_rate: f64,
    steps: Vec<Figure>,
    recordings: Vec<Recording>,
}

pub(crate) fn run(args: &PrefillArgs, global: &Global) -> Result<()> {
    ensure!(args.steps > 0, "steps start at 1");
    let mixes: Vec<Mix> =
        args.shape.iter().map(|text| Mix::parse(text, args.context)).collect::<Result<_>>()?;
    let loads = args.backend.loads(&args.load, "graph-backend-prefill");
    // Before the model takes the memory.
    let matrix_rate = device::bench::matrix_rate(&loading::open_device(global)?.0)?;
    let mut figures = Figures { matrix_rate, ..Figures::default() };
    for load in &loads {
        measure(args, global, load, &mixes, &mut figures)?;
    }
    let draw = |path: &std::path::Path| plot::prefill(path, &args.load.model, &figures.steps);
    args.report.finish(&figures.device, &figures, draw, || print(&figures))
}

fn measure(
    args: &PrefillArgs,
    global: &Global,
    load: &LoadArgs,
    mixes: &[Mix],
    figures: &mut Figures,
) -> Result<()> {
    let batch = mixes.iter().map(|mix| mix.rows.len() as u32).max().unwrap_or(1);
    let tokens = mixes.iter().map(Mix::tokens).max().unwrap_or(1);
    let mut loaded = loading::load_sized(load, global, batch, Some(tokens))?;
    let flops = Flops::of(&loaded);
    let bar = progress::count(mixes.len() as u64, "prefill");
    let buckets = loaded.executor.runners().prefill.config().buckets.clone();
    let mut steady = Steady::new(&mut loaded.executor)?;
    let mut timed = Vec::new();
    for mix in mixes {
        let bucket = buckets.fit(mix.tokens()).unwrap_or(mix.tokens());
        let timing = steady.prefill(&mix.rows, args.steps)?;
        // The same step with its bucket filled: what is left beyond its share is the price of padding.
        let filled = mix.filled(bucket);
        let full = if bucket > mix.tokens() {
            steady.prefill(&filled.rows, args.steps)?.step_ms(0.5)
        } else {
            timing.step_ms(0.5)
        };
        let share = flops.of_step(&mix.rows) / flops.of_step(&filled.rows);
        timed.push((mix, bucket, timing, full * share));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let runner = &loaded.executor.runners().prefill;
    let backend = runner.config().backend.to_string();
    let replayed = loaded.executor.counters(engine::exec::StepKind::Prefill).eager.is_empty();
    for (mix, bucket, timing, share_ms) in timed {
        let ms = timing.step_ms(0.5);
        let rate = flops.of_step(&mix.rows) / (ms * 1e-3);
        figures.steps.push(Figure {
            backend: backend.clone(),
            shape: mix.name.clone(),
            rows: mix.rows.len() as u32,
            tokens: mix.tokens(),
            bucket,
            ms,
            tokens_per_second: f64::from(mix.tokens()) / (ms * 1e-3),
            teraflops: rate * 1e-12,
            matrix_share: rate / figures.matrix_rate,
            padding_cost: ms / share_ms - 1.0,
            host_us: timing.host_us(0.5),
            replayed,
        });
    }
    let recorded = runner.recorded();
    figures.recordings.push(Recording {
        backend,
        graphs: recorded.len(),
        seconds: runner.recording_time().as_secs_f64(),
        bytes: recorded.iter().map(|(_, bytes)| bytes).sum(),
    });
    figures.device = loaded.device;
    Ok(())
}

/// Operations a step cannot do without.
struct Flops {
    /// Multiply-adds of products for one token, for the last token of a row on top, of attention for one
    /// pair of positions.
    token: u64,
    row: u64,
    pair: u64,
}

impl Flops {
    fn of(loaded: &loading::Loaded) -> Flops {
        let program = &loaded.program;
        let shape = program.shape;
        let pair = 2 * u64::from(shape.q_heads * shape.head_dim) * u64::from(shape.layers);
        let mut flops = Flops { token: 0, row: 0, pair };
        for step in &program.steps {
            if let ProgramOp::Linear { x, w, .. } = step.op {
                let w = program.weight(w);
                let once = u64::from(w.rows) * u64::from(w.cols);
                match program.value(x).rows {
                    Dim::Rows => flops.row += once,
                    _ => flops.token += once,
                }
            }
        }
        flops
    }

    fn of_step(&self, rows: &[(u32, u32)]) -> f64 {
        let of_row = |&(tokens, context): &(u32, u32)| {
            let (tokens, context) = (u64::from(tokens), u64::from(context));
            let pairs = tokens * context + tokens * (tokens + 1) / 2;
            2 * (self.token * tokens + self.row + self.pair * pairs)
        };
        rows.iter().map(of_row).sum::<u64>() as f64
    }
}

fn print(figures: &Figures) {
    println!("{}; a large product: {:.1} TFLOP/s", figures.device, figures.matrix_rate * 1e-12);
    println!(
        "backend    shape              rows   tokens   bucket        ms     tok/s  TFLOP/s  of matrix  padding  host µs"
    );
    for f in &figures.steps {
        println!(
            "{:<10} {:<17} {:>5} {:>8} {:>8} {:>9.2} {:>9.0} {:>8.1} {:>9.0}% {:>7.1}% {:>8.1}{}",
            f.backend,
            f.shape,
            f.rows,
            f.tokens,
            f.bucket,
            f.ms,
            f.tokens_per_second,
            f.teraflops,
            f.matrix_share * 100.0,
            f.padding_cost * 100.0,
            f.host_us,
            if f.replayed { "" } else { "  not all replayed" }
        );
    }
    for r in &figures.recordings {
        let mib = r.bytes as f64 / f64::from(1 << 20);
        println!("{}: {} graphs recorded in {:.3} s, {mib:.1} MiB", r.backend, r.graphs, r.seconds);
    }
}
