//! `dacapo bench prefill`: prompts per second, time to the first token, cost of padding.

use super::steady::Steady;
use super::{plot, record};
use crate::cli::Global;
use crate::loading::{self, LoadArgs};
use crate::progress;
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

/// Time prefill steps of a model: tokens per second and time to the first token
#[derive(Args, Debug)]
pub(crate) struct PrefillArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// What one step feeds: PROMPTSxTOKENS
    #[arg(long, value_name = "NxT,…", value_delimiter = ',', default_value = "1x512")]
    shape: Vec<String>,
    /// Tokens that each sequence already has
    #[arg(long, value_name = "N", default_value_t = 0)]
    context: u32,
    /// Steps timed for each row of the table
    #[arg(long, value_name = "N", default_value_t = 5)]
    steps: u32,
    /// Backends to compare, instead of the configured one
    #[arg(long, value_name = "NAME,NAME,…", value_delimiter = ',')]
    backend: Vec<String>,
    /// Write the figures, with machine and command, to this file (- is standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw tokens per second over the step's tokens
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) backend: String,
    prompts: u32,
    tokens: u32,
    /// Tokens of the bucket the step was padded to.
    bucket: u32,
    pub(crate) ms: f64,
    pub(crate) tokens_per_second: f64,
    teraflops: f64,
    host_us: f64,
}

impl Figure {
    /// Live tokens of the step.
    pub(crate) fn live(&self) -> u32 {
        self.prompts * self.tokens
    }
}

pub(crate) fn run(args: &PrefillArgs, global: &Global) -> Result<()> {
    ensure!(args.steps > 0, "steps start at 1");
    let shapes: Vec<(u32, u32)> =
        args.shape.iter().map(|text| parse(text)).collect::<Result<_>>()?;
    let flag = "graph-backend-prefill";
    let loads: Vec<LoadArgs> = match args.backend.as_slice() {
        [] => vec![args.load.clone()],
        names => names.iter().map(|name| args.load.with_graph_flag(flag, name)).collect(),
    };
    let mut figures: Vec<Figure> = Vec::new();
    let mut device = String::new();
    for load in &loads {
        device = measure(args, global, load, &shapes, &mut figures)?;
    }
    if let Some(path) = &args.svg {
        plot::prefill(path, &args.load.model, &figures)?;
    }
    if let Some(path) = &args.json {
        record::write(path, &record::record(&device, &figures)?)?;
    }
    if args.json.as_deref() != Some("-".as_ref()) {
        print(&device, &figures);
    }
    Ok(())
}

fn parse(text: &str) -> Result<(u32, u32)> {
    let parts = text.split_once('x').and_then(|(n, t)| Some((n.parse().ok()?, t.parse().ok()?)));
    let (prompts, tokens) =
        parts.with_context(|| format!("{text}: a shape is PROMPTSxTOKENS, for example 16x512"))?;
    ensure!(prompts > 0 && tokens > 0, "{text}: at least one prompt of one token");
    Ok((prompts, tokens))
}

fn measure(
    args: &PrefillArgs,
    global: &Global,
    load: &LoadArgs,
    shapes: &[(u32, u32)],
    figures: &mut Vec<Figure>,
) -> Result<String> {
    let batch = shapes.iter().map(|shape| shape.0).max().unwrap_or(1);
    let tokens = shapes.iter().map(|(prompts, tokens)| prompts * tokens).max().unwrap_or(1);
    let mut loaded = loading::load_sized(load, global, batch, Some(tokens))?;
    let shape = loaded.program.shape;
    let matrix: u64 = loaded
        .program
        .weights
        .iter()
        .filter(|w| w.rows > 1)
        .map(|w| u64::from(w.rows) * u64::from(w.cols))
        .sum();
    // Embedding rows are gathered and the head sees one row per prompt.
    let ends = u64::from(shape.vocab) * u64::from(shape.hidden);
    let body = matrix.saturating_sub(if loaded.config.tied { ends } else { 2 * ends });
    let bar = progress::count(shapes.len() as u64, "prefill");
    let mut steady = Steady::new(&mut loaded.executor)?;
    let mut timed = Vec::new();
    for &(prompts, tokens) in shapes {
        timed.push((prompts, tokens, steady.prefill(prompts, tokens, args.context, args.steps)?));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let runner = &loaded.executor.runners().prefill;
    for (prompts, tokens, timing) in timed {
        let live = prompts * tokens;
        let ms = timing.step_ms(0.5);
        let pairs = u64::from(prompts)
            * (u64::from(tokens) * u64::from(args.context)
                + u64::from(tokens) * u64::from(tokens + 1) / 2);
        let attention =
            4 * pairs * u64::from(shape.q_heads * shape.head_dim) * u64::from(shape.layers);
        let flops = 2 * body * u64::from(live) + 2 * ends * u64::from(prompts) + attention;
        figures.push(Figure {
            backend: runner.config().backend.to_string(),
            prompts,
            tokens,
            bucket: runner.config().buckets.fit(live).unwrap_or(live),
            ms,
            tokens_per_second: f64::from(live) / (ms * 1e-3),
            teraflops: flops as f64 / (ms * 1e-3) * 1e-12,
            host_us: timing.host_us(0.5),
        });
    }
    Ok(loaded.device)
}

fn print(device: &str, figures: &[Figure]) {
    println!("{device}");
    println!("backend    prompts   tokens   bucket        ms     tok/s  TFLOP/s  host µs");
    for f in figures {
        println!(
            "{:<9} {:>8} {:>8} {:>8} {:>9.2} {:>9.0} {:>8.1} {:>8.1}",
            f.backend,
            f.prompts,
            f.tokens,
            f.bucket,
            f.ms,
            f.tokens_per_second,
            f.teraflops,
            f.host_us
        );
    }
}
