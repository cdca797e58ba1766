//! `dacapo bench replay`: the cost of a decode step for each preparation mode.
//!
//! For every mode it reports the time of a replay from the call to its result, the host time before
//! that call, the share of the time that the device is busy, the time of a step with two in flight,
//! and the tokens per second.

use super::plot;
use super::report::ReportArgs;
use super::steady::{Pace, Steady};
use crate::cli::Global;
use crate::loading::{self, LoadArgs};
use crate::numbers::{SEQUENCES, TIMES, TOKENS_BEFORE};
use crate::output::say;
use crate::progress;
use anyhow::{Result, bail};
use clap::Args;
use graph::Prep;
use serde::Serialize;

/// Compare the preparation modes of a decode step: copy, fused, async, device
#[derive(Args, Debug)]
pub(crate) struct ReplayArgs {
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
    /// Measured steps per metric
    #[arg(long, value_name = "N", default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(u32).range(TIMES))]
    steps: u32,
    #[command(flatten)]
    report: ReportArgs,
}

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) prep: String,
    pub(crate) batch: u32,
    context: u32,
    /// From the call to the result, one step in flight.
    replay_ms: f64,
    /// Host time before the call.
    pub(crate) preparation_us: f64,
    preparation_us_p99: f64,
    /// Time of the call.
    call_us: f64,
    /// Share of the time in which the device runs graphs, two steps in flight.
    pub(crate) device_busy: f64,
    /// From result to result, two steps in flight.
    pub(crate) step_ms: f64,
    step_ms_p99: f64,
    tokens_per_second: f64,
    /// A hash of the tokens of all steps: the same for every mode.
    tokens_hash: String,
}

pub(crate) fn run(args: &ReplayArgs, global: &Global) -> Result<()> {
    let mut figures: Vec<Figure> = Vec::new();
    let mut device = String::new();
    let bar = progress::count((Prep::ALL.len() * args.batch.len()) as u64, "replay");
    for prep in Prep::ALL {
        let mut load = args.load.with_graph_flag("graph-prep", prep.name());
        if prep != Prep::Device {
            // The host prepares each step, so a launch cannot have several.
            load = load.with_graph_flag("graph-steps", "1");
        }
        let most = args.batch.iter().copied().max().unwrap_or(1);
        let mut loaded = loading::load(&load, global, most)?;
        let mut steady = Steady::new(&mut loaded.executor)?;
        for &batch in &args.batch {
            figures.push(measure(args, &mut steady, prep, batch)?);
            bar.inc(1);
        }
        device = loaded.device;
    }
    bar.finish_and_clear();
    figures.sort_by_key(|figure| figure.batch);
    let draw = |path: &std::path::Path| plot::replay(path, &args.load.model, &figures);
    args.report.finish(&device, &figures, draw, || print(&device, &figures))?;
    let odd = figures
        .windows(2)
        .find(|pair| pair[0].batch == pair[1].batch && pair[0].tokens_hash != pair[1].tokens_hash);
    if let Some([one, other]) = odd {
        bail!("{} and {} give different tokens at batch {}", one.prep, other.prep, one.batch);
    }
    Ok(())
}

fn measure(args: &ReplayArgs, steady: &mut Steady<'_>, prep: Prep, batch: u32) -> Result<Figure> {
    let warm = Pace::warm(args.steps);
    let pace = |depth| Pace { depth, ..Pace::plain(batch, args.context, warm, args.steps) };
    let alone = steady.decode(&pace(1))?;
    let paced = steady.decode(&pace(2))?;
    let busy = steady.busy(&pace(2))?;
    Ok(Figure {
        prep: prep.to_string(),
        batch,
        context: args.context,
        replay_ms: alone.latency_ms(0.5),
        preparation_us: paced.preparation_us(0.5),
        preparation_us_p99: paced.preparation_us(0.99),
        call_us: paced.call_us(0.5),
        device_busy: busy,
        step_ms: paced.step_ms(0.5),
        step_ms_p99: paced.step_ms(0.99),
        tokens_per_second: f64::from(batch) / paced.mean_step().as_secs_f64(),
        tokens_hash: format!("{:016x}", alone.tokens),
    })
}

fn print(device: &str, figures: &[Figure]) -> Result<()> {
    say!("{device}")?;
    say!(
        "prep     batch  context  replay ms  preparation µs     p99  device busy  step ms      p99      tok/s"
    )?;
    for f in figures {
        say!(
            "{:<7} {:>6} {:>8} {:>10.3} {:>15.1} {:>7.1} {:>11.1}% {:>8.3} {:>8.3} {:>10.0}",
            f.prep,
            f.batch,
            f.context,
            f.replay_ms,
            f.preparation_us,
            f.preparation_us_p99,
            f.device_busy * 100.0,
            f.step_ms,
            f.step_ms_p99,
            f.tokens_per_second,
        )?;
    }
    Ok(())
}
