//! `dacapo bench prefill`: tokens per second, time to the first token, cost of padding.

use super::mix::Mix;
use super::plot;
use super::report::{BackendArgs, ReportArgs};
use super::steady::{Steady, Timing};
use crate::cli::Global;
use crate::loading::{self, LoadArgs};
use crate::numbers::{TIMES, TOKENS_BEFORE};
use crate::output::say;
use crate::progress;
use anyhow::Result;
use clap::Args;
use graph::program::{Dim, ProgramOp};
use serde::Serialize;
use std::time::Duration;

/// Measure prefill steps: tokens per second and time to the first token
#[derive(Args, Debug)]
pub(crate) struct PrefillArgs {
    #[command(flatten)]
    load: LoadArgs,
    // Not a doc comment, because rustdoc would parse the brackets as a link.
    #[arg(long, alias = "mix", value_name = "NxT+NxT,…", value_delimiter = ',')]
    #[arg(
        help = "The rows of a step: PROMPTSxTOKENS[@CONTEXT], parts joined by +, or random[:TOKENS]"
    )]
    #[arg(default_value = "1x512")]
    shape: Vec<String>,
    /// Tokens that each sequence already has, for shapes without @CONTEXT
    #[arg(long, value_name = "N", default_value_t = 0)]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS_BEFORE))]
    context: u32,
    /// Measured steps per row of the table, in each turn
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(TIMES))]
    steps: u32,
    /// Turns per row when several backends are compared: they alternate, so that changes of the
    /// device's clocks affect all of them
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(TIMES))]
    turns: u32,
    /// Milliseconds of idle time before each step, as before a single prompt; without it, long
    /// steps run at the device's power limit
    #[arg(long, value_name = "MS", default_value_t = 0)]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    pause: u64,
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
    /// Share of the rate of a large GEMM on this device.
    matrix_share: f64,
    /// Relative time above the live share of a full bucket's time: 0 if padding costs nothing.
    padding_cost: f64,
    host_us: f64,
    /// Whether every step was replayed from a graph.
    replayed: bool,
}

/// The cost of recording the prefill graphs of a backend.
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
    /// Floating-point operations per second of a large GEMM.
    matrix_rate: f64,
    steps: Vec<Figure>,
    recordings: Vec<Recording>,
}

pub(crate) fn run(args: &PrefillArgs, global: &Global) -> Result<()> {
    let mixes: Vec<Mix> =
        args.shape.iter().map(|text| Mix::parse(text, args.context)).collect::<Result<_>>()?;
    let loads = args.backend.loads(&args.load, "graph-backend-prefill");
    // Measured before the model fills the memory.
    let matrix_rate = figures::matrix_rate(&loading::open_device(global)?.0)?;
    let mut figures = Figures { matrix_rate, ..Figures::default() };
    measure(args, global, &loads, &mixes, &mut figures)?;
    let draw = |path: &std::path::Path| plot::prefill(path, &args.load.model, &figures.steps);
    args.report.finish(&figures.device, &figures, draw, || print(&figures))
}

/// Loads all backends, each with its share of the memory, and measures them.
fn measure(
    args: &PrefillArgs,
    global: &Global,
    loads: &[LoadArgs],
    mixes: &[Mix],
    figures: &mut Figures,
) -> Result<()> {
    let batch = mixes.iter().map(|mix| mix.rows.len() as u32).max().unwrap_or(1);
    let tokens = mixes.iter().map(Mix::tokens).max().unwrap_or(1);
    let load = |(at, args): (usize, &LoadArgs)| {
        loading::load_sized(&args.one_of(loads.len() - at), global, batch, Some(tokens))
    };
    let mut backends: Vec<loading::Loaded> =
        loads.iter().enumerate().map(load).collect::<Result<_>>()?;
    let (mut timed, pause) = (Vec::new(), Duration::from_millis(args.pause));
    let bar = progress::count(mixes.len() as u64, "prefill");
    {
        let buckets =
            |loaded: &loading::Loaded| loaded.executor.runners().prefill.config().buckets.clone();
        let buckets: Vec<_> = backends.iter().map(buckets).collect();
        let mut steady = backends
            .iter_mut()
            .map(|loaded| Steady::new(&mut loaded.executor))
            .collect::<Result<Vec<_>>>()?;
        for mix in mixes {
            let mut timings = vec![Timing::default(); steady.len()];
            for _ in 0..args.turns {
                for (steady, timing) in steady.iter_mut().zip(&mut timings) {
                    timing.append(steady.prefill(&mix.rows, args.steps, pause)?);
                }
            }
            for (at, (steady, timing)) in steady.iter_mut().zip(timings).enumerate() {
                let bucket = buckets[at].fit(mix.tokens()).unwrap_or(mix.tokens());
                // The same step with a full bucket, to find the cost of padding.
                let full = if bucket > mix.tokens() {
                    steady.prefill(&mix.filled(bucket).rows, args.steps, pause)?.step_ms(0.5)
                } else {
                    timing.step_ms(0.5)
                };
                timed.push((at, mix, bucket, timing, full));
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    // A table for each backend.
    timed.sort_by_key(|(at, ..)| *at);
    for (at, mix, bucket, timing, full_ms) in timed {
        let loaded = &backends[at];
        let flops = Flops::of(loaded);
        let (ms, live) = (timing.step_ms(0.5), flops.of_step(&mix.rows));
        let share_ms = full_ms * live / flops.of_step(&mix.filled(bucket).rows);
        let rate = live / (ms * 1e-3);
        figures.steps.push(Figure {
            backend: loaded.executor.runners().prefill.config().backend.to_string(),
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
            replayed: loaded.executor.counters(engine::exec::StepKind::Prefill).eager.is_empty(),
        });
    }
    for loaded in &backends {
        let runner = &loaded.executor.runners().prefill;
        let recorded = runner.recorded();
        figures.recordings.push(Recording {
            backend: runner.config().backend.to_string(),
            graphs: recorded.len(),
            seconds: runner.recording_time().as_secs_f64(),
            bytes: recorded.iter().map(|(_, bytes)| bytes).sum(),
        });
        figures.device.clone_from(&loaded.device);
    }
    Ok(())
}

/// The operations that a step must do.
struct Flops {
    /// Multiply-adds of the linear layers per token, additionally per row, and of attention per
    /// pair of positions.
    token: u64,
    row: u64,
    pair: u64,
    /// Whether tokens also attend to those after them.
    both_ways: bool,
}

impl Flops {
    fn of(loaded: &loading::Loaded) -> Flops {
        let program = &loaded.program;
        let mut flops = Flops { token: 0, row: 0, pair: 0, both_ways: false };
        let cols = |value| u64::from(program.value(value).cols);
        let mut multiplies = |x, w| {
            let w = program.weight(w);
            let once = u64::from(w.rows) * u64::from(w.cols);
            match program.value(x).rows {
                Dim::Rows => flops.row += once,
                _ => flops.token += once,
            }
        };
        for step in &program.steps {
            if let ProgramOp::Linear(linear) = &step.op {
                multiplies(linear.x, linear.w);
            }
            if let ProgramOp::HeadLinear(linear) = &step.op {
                multiplies(linear.x, linear.w);
            }
        }
        for step in &program.steps {
            if let ProgramOp::Attention(attention) = &step.op {
                flops.both_ways |= !attention.causal;
                flops.pair += 2 * cols(attention.out);
            }
            if let ProgramOp::LatentAttention(attention) = &step.op {
                flops.pair += cols(attention.q) + cols(attention.out);
            }
        }
        flops
    }

    fn of_step(&self, rows: &[(u32, u32)]) -> f64 {
        let of_row = |&(tokens, context): &(u32, u32)| {
            let (tokens, context) = (u64::from(tokens), u64::from(context));
            let own = if self.both_ways { tokens * tokens } else { tokens * (tokens + 1) / 2 };
            let pairs = tokens * context + own;
            2 * (self.token * tokens + self.row + self.pair * pairs)
        };
        rows.iter().map(of_row).sum::<u64>() as f64
    }
}

fn print(figures: &Figures) -> Result<()> {
    // A GPU has hundreds of TFLOP/s, a CPU less than one.
    let digits = if figures.matrix_rate < 1e13 { 3 } else { 1 };
    let rate = figures.matrix_rate * 1e-12;
    say!("{}; a large GEMM: {rate:.digits$} TFLOP/s", figures.device)?;
    say!(
        "backend    shape              rows   tokens   bucket        ms     tok/s  TFLOP/s  of matrix  padding  host µs"
    )?;
    for f in &figures.steps {
        say!(
            "{:<10} {:<17} {:>5} {:>8} {:>8} {:>9.2} {:>9.0} {:>8.digits$} {:>9.0}% {:>7.1}% {:>8.1}{}",
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
        )?;
    }
    for r in &figures.recordings {
        let mib = r.bytes as f64 / f64::from(1 << 20);
        say!("{}: {} graphs recorded in {:.3} s, {mib:.1} MiB", r.backend, r.graphs, r.seconds)?;
    }
    Ok(())
}
