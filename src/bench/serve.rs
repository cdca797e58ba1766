//! `dacapo bench serve`: load tests of any server with OpenAI's API.

mod page;
mod plot;
mod ramp;

use crate::exit::{bad_file, bad_input};
use crate::numbers;
use crate::output::{note, say};
use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use load::client::Target;
use load::{Arrivals, Dist, Endpoint, LoadSpec, Progress, Prompts, Report, Slo, run_blocking};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// More requests than a run of weeks sends.
const MOST_REQUESTS: u64 = 1_000_000_000;

/// Measure a server under load
#[derive(Args, Debug)]
pub(crate) struct ServeArgs {
    /// The URL of the server, with or without /v1
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    base_url: String,
    /// The API key
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// The model to request [default: the first that the server lists]
    #[arg(long)]
    model: Option<String>,
    /// The route to use
    #[arg(long, value_enum, default_value = "chat")]
    endpoint: Route,
    /// Requests in flight at once; with --rate the maximum, at least 4096
    #[arg(long, short = 'c', default_value_t = 16)]
    #[arg(value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1_000_000))]
    concurrency: usize,
    /// Requests a second with random (Poisson) arrivals, independent of the responses
    #[arg(long, value_parser = numbers::positive)]
    rate: Option<f64>,
    /// Find the highest rate at which 99 % of the requests meet the goals (--slo-…), from --rate upwards
    #[arg(long)]
    ramp: bool,
    /// mixed: token lengths as people have them, lognormal with means of 512 in and 230 out, temperature 0.8, every
    /// prompt new
    #[arg(long, value_enum, conflicts_with_all = ["input", "output", "prompts", "shared_prefix"])]
    preset: Option<Preset>,
    /// Prompts are random token ids below N, exactly as long as drawn, on /v1/completions
    #[arg(long, value_name = "N", conflicts_with = "prompts")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    token_ids: Option<u32>,
    /// Requests to measure
    #[arg(long, short = 'n', default_value_t = 200)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=MOST_REQUESTS))]
    requests: u64,
    /// Warm-up requests, not measured
    #[arg(long, default_value_t = 16)]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=MOST_REQUESTS))]
    warmup: u64,
    /// Words of a prompt: N, A-B, normal:MEAN,SD or lognormal:MU,SIGMA
    #[arg(long, default_value = "128")]
    input: Dist,
    /// Tokens of an answer, in the same format
    #[arg(long, default_value = "128")]
    output: Dist,
    /// The fraction of every prompt, 0 to 1, that is the same in all prompts
    #[arg(long, default_value_t = 0.0, value_parser = numbers::fraction)]
    shared_prefix: f64,
    /// Prompts from a file: one JSON object per line, with "prompt" and optionally "max_tokens"
    #[arg(long, conflicts_with = "shared_prefix")]
    prompts: Option<PathBuf>,
    /// Let the model end answers, instead of generating the full length
    #[arg(long)]
    natural_end: bool,
    /// Additional fields of every request, as a JSON object
    #[arg(long)]
    extra: Option<String>,
    /// Goal: time to first token in ms
    #[arg(long, value_parser = numbers::positive)]
    slo_ttft: Option<f64>,
    /// Goal: mean time between tokens in ms
    #[arg(long, value_parser = numbers::positive)]
    slo_itl: Option<f64>,
    /// Goal: whole request in ms
    #[arg(long, value_parser = numbers::positive)]
    slo_e2e: Option<f64>,
    /// Seconds after which a request fails
    #[arg(long, default_value_t = 300)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Seed; the same seed gives the same load
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// A name for tables and legends [default: the model]
    #[arg(long)]
    label: Option<String>,
    /// Write the result as JSON to this file; - prints it instead of the table
    #[arg(long)]
    json: Option<PathBuf>,
    /// Write plots as SVG into this folder
    #[arg(long)]
    plots: Option<PathBuf>,
    /// Write one HTML page with the table and the plots
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,
    /// Compare earlier results (--json) without sending requests; with --plots or --page, draw them
    #[arg(long, num_args = 2.., value_name = "FILE")]
    compare: Option<Vec<PathBuf>>,
}

/// A route of the API.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Route {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Completions,
}

/// A load with a name, so that anyone can repeat it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Preset {
    Mixed,
}

impl Preset {
    /// Lengths of prompts and answers.
    fn lengths(self) -> [Dist; 2] {
        match self {
            // A lognormal distribution has the mean exp(µ + σ²/2).
            Self::Mixed => [(512f64, 0.8f64), (230.0, 0.6)]
                .map(|(mean, sigma)| Dist::LogNormal(mean.ln() - sigma * sigma / 2.0, sigma)),
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    if let Some(files) = &args.compare {
        let reports = files.iter().map(|file| read(file)).collect::<Result<Vec<_>>>()?;
        say!("{}", side_by_side(&reports))?;
        return draw(args, &reports);
    }
    let spec = spec(args)?;
    let report = match args.ramp {
        true => ramp::run(args, &spec)?,
        false => measure(spec)?,
    };
    match args.json.as_deref() {
        Some(path) if path == Path::new("-") => {
            say!("{}", serde_json::to_string_pretty(&report)?)?;
        }
        Some(path) => {
            say!("{report}")?;
            std::fs::write(path, serde_json::to_vec_pretty(&report)?)
                .with_context(|| path.display().to_string())?;
        }
        None => say!("{report}")?,
    }
    draw(args, std::slice::from_ref(&report))?;
    if report.succeeded == 0 {
        bail!("no request was answered");
    }
    Ok(())
}

/// One run, with a progress bar.
fn measure(spec: LoadSpec) -> Result<Report> {
    let progress = Arc::new(Progress::default());
    let watcher = watch(progress.clone(), spec.requests + spec.warmup);
    let report = run_blocking(spec, progress).map_err(|e| anyhow!(e));
    watcher.finish();
    let mut report = report?;
    if report.label.is_empty() {
        report.label = report.model.clone();
    }
    Ok(report)
}

fn spec(args: &ServeArgs) -> Result<LoadSpec> {
    let target = Target::parse(&args.base_url, args.api_key.clone()).map_err(bad_input)?;
    let [input, output] = args.preset.map_or([args.input, args.output], Preset::lengths);
    let prompts = match &args.prompts {
        Some(path) => Prompts::List(read_prompts(path)?),
        None => {
            let shared = args.shared_prefix;
            match args.token_ids {
                Some(vocab) => Prompts::Tokens { input, shared, vocab },
                None => Prompts::Random { input, shared },
            }
        }
    };
    let mut extra: Map<String, Value> = match &args.extra {
        Some(text) => serde_json::from_str(text)
            .map_err(|error| bad_input(format!("--extra must be a JSON object: {error}")))?,
        None => Map::new(),
    };
    if args.preset.is_some() {
        extra.entry("temperature").or_insert(0.8.into());
    }
    // A low limit of requests in flight would delay arrivals and hide overload.
    let most = if args.rate.is_some() { args.concurrency.max(4096) } else { args.concurrency };
    Ok(LoadSpec {
        target,
        model: args.model.clone(),
        endpoint: match args.endpoint {
            // A chat has no token ids.
            Route::Chat if args.token_ids.is_none() => Endpoint::Chat,
            Route::Chat | Route::Completions => Endpoint::Completions,
        },
        arrivals: match args.rate {
            Some(rate) => Arrivals::Poisson(rate, most),
            None => Arrivals::Fixed(most.max(1)),
        },
        requests: args.requests,
        warmup: args.warmup,
        prompts,
        output,
        ignore_eos: !args.natural_end,
        extra,
        slo: Slo { ttft_ms: args.slo_ttft, itl_ms: args.slo_itl, e2e_ms: args.slo_e2e },
        timeout: Duration::from_secs(args.timeout),
        seed: args.seed,
        label: args.label.clone().unwrap_or_default(),
    })
}

fn read_prompts(path: &Path) -> Result<Vec<(String, Option<u32>)>> {
    let text = std::fs::read_to_string(path).map_err(bad_file(path))?;
    let mut prompts = Vec::new();
    for (line, number) in text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()) {
        let place = || format!("{}:{number}", path.display());
        let value: Value =
            serde_json::from_str(line).map_err(|e| bad_input(format!("{}: {e}", place())))?;
        let Some(prompt) = value["prompt"].as_str() else {
            return Err(bad_input(format!("{}: no \"prompt\"", place())));
        };
        let most = value["max_tokens"].as_u64().and_then(|n| u32::try_from(n).ok());
        prompts.push((prompt.to_string(), most));
    }
    if prompts.is_empty() {
        return Err(bad_input(format!("{}: no prompts", path.display())));
    }
    Ok(prompts)
}

/// A progress bar updated by its own thread.
struct Watcher {
    bar: ProgressBar,
    thread: std::thread::JoinHandle<()>,
    stop: std::sync::mpsc::Sender<()>,
}

impl Watcher {
    fn finish(self) {
        drop(self.stop);
        // A failure to draw the bar must not lose the result.
        let _ = self.thread.join();
        self.bar.finish_and_clear();
    }
}

fn watch(progress: Arc<Progress>, total: u64) -> Watcher {
    let style = "{bar:32} {pos}/{len} · {msg} · {elapsed} of about {duration}";
    let bar = ProgressBar::new(total);
    bar.set_style(ProgressStyle::with_template(style).unwrap_or(ProgressStyle::default_bar()));
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let shown = bar.clone();
    let thread = std::thread::spawn(move || {
        let mut before = 0;
        let every = Duration::from_millis(200);
        // A timeout means update the bar; a disconnected channel means stop.
        while let Err(std::sync::mpsc::RecvTimeoutError::Timeout) = stopped.recv_timeout(every) {
            let tokens = progress.tokens.load(Ordering::Relaxed);
            shown.set_position(progress.done.load(Ordering::Relaxed));
            shown.set_message(format!(
                "{} tok/s · {} in flight · {} errors",
                (tokens - before) * 5,
                progress.active.load(Ordering::Relaxed),
                progress.errors.load(Ordering::Relaxed),
            ));
            before = tokens;
        }
    });
    Watcher { bar, thread, stop }
}

fn read(path: &Path) -> Result<Report> {
    let bytes = std::fs::read(path).map_err(bad_file(path))?;
    serde_json::from_slice(&bytes).map_err(bad_file(path))
}

/// A column per report; all but the first also show the ratio to the first.
fn side_by_side(reports: &[Report]) -> String {
    type Figure = fn(&Report) -> f64;
    let rows: [(&str, Figure); 14] = [
        ("answered", |r| r.succeeded as f64),
        ("errors", |r| r.errors.values().sum::<u64>() as f64),
        ("requests/s", |r| r.request_rate),
        ("output tok/s", |r| r.output_rate),
        ("at full load", |r| r.steady_rate),
        ("goodput/s", |r| r.goodput),
        ("ttft mean ms", |r| r.ttft.mean),
        ("ttft p50 ms", |r| r.ttft.p50),
        ("ttft p99 ms", |r| r.ttft.p99),
        ("itl mean ms", |r| r.itl.mean),
        ("itl p50 ms", |r| r.itl.p50),
        ("itl p99 ms", |r| r.itl.p99),
        ("e2e p50 ms", |r| r.e2e.p50),
        ("e2e p99 ms", |r| r.e2e.p99),
    ];
    let mut out = format!("{:<14}", "");
    for report in reports {
        let name: String = report.label.chars().take(20).collect();
        out += &format!("{name:>22}");
    }
    for (name, figure) in rows {
        out += &format!("\n{name:<14}");
        let first = figure(&reports[0]);
        for (report, place) in reports.iter().zip(0..) {
            let value = figure(report);
            let ratio = match place {
                0 => String::new(),
                _ if first > 0.0 => format!(" ({:.2}×)", value / first),
                _ => String::new(),
            };
            out += &format!("{:>22}", format!("{value:.2}{ratio}"));
        }
    }
    out
}

fn draw(args: &ServeArgs, reports: &[Report]) -> Result<()> {
    if let Some(path) = &args.page {
        std::fs::write(path, page::page(reports)?).with_context(|| path.display().to_string())?;
        note!("wrote {}", path.display());
    }
    let Some(folder) = &args.plots else { return Ok(()) };
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    for (name, svg) in plot::all(reports)? {
        let path = folder.join(name);
        std::fs::write(&path, svg).with_context(|| path.display().to_string())?;
        note!("wrote {}", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn args(text: &str) -> ServeArgs {
        let words = std::iter::once("x").chain(text.split_whitespace());
        Cli::try_parse_from(words).unwrap().args
    }

    #[test]
    fn flags_become_the_load() {
        let spec = spec(&args("--rate 5 --input 64-512 --slo-ttft 200")).unwrap();
        assert_eq!(spec.arrivals, Arrivals::Poisson(5.0, 4096));
        assert!(spec.slo.is_met(200.0, 1e9, 1e9));
        assert!(Cli::try_parse_from(["x", "--rate", "0"]).is_err());
        assert!(super::spec(&args("--base-url https://x")).is_err());
        assert!(super::spec(&args("--extra []")).is_err());

        let spec = super::spec(&args("--preset mixed --token-ids 1000 --seed 3")).unwrap();
        assert_eq!(spec.endpoint, Endpoint::Completions);
        assert_eq!(spec.extra["temperature"], 0.8);
        let mut dice = load::Dice::new(1);
        let mut mean = |dist: &Dist| {
            (0..20_000).map(|_| f64::from(dist.draw(&mut dice))).sum::<f64>() / 20_000.0
        };
        let Prompts::Tokens { input, .. } = &spec.prompts else { panic!("{:?}", spec.prompts) };
        assert!((mean(input) / 512.0 - 1.0).abs() < 0.05);
        assert!((mean(&spec.output) / 230.0 - 1.0).abs() < 0.05);
        let both = ["x", "--preset", "mixed", "--input", "5"];
        assert!(Cli::try_parse_from(both).is_err());
    }

    #[test]
    fn reports_are_compared_side_by_side() {
        let report = plot::tests::sample("a", 1.0);
        let table = side_by_side(&[report.clone(), plot::tests::sample("b", 2.0)]);
        assert!(table.contains("(2.00×)"), "{table}");
        let again: Report = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(again.ttft, report.ttft);
    }
}
