//! `dacapo bench mixed`: the time between tokens of running requests while prompts arrive.

use super::{plot, record};
use crate::cli::Global;
use crate::exit::bad_input;
use crate::loading::{self, LoadArgs};
use crate::numbers::{SEQUENCES, TIMES, TOKENS};
use crate::output::say;
use crate::progress;
use anyhow::{Result, bail};
use clap::Args;
use engine::exec::Executor;
use engine::request::{Event, Finish, Output, Request, RequestId, Sampling, Token};
use engine::{Engine, EngineConfig};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

/// Measure the time between tokens of running requests while long prompts arrive
#[derive(Args, Debug)]
pub(crate) struct MixedArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// Requests that run during the whole measurement
    #[arg(long, value_name = "N", default_value_t = 8)]
    #[arg(value_parser = clap::value_parser!(u32).range(SEQUENCES))]
    running: u32,
    /// Tokens of each prompt that arrives
    #[arg(long, value_name = "N", default_value_t = 2048)]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS))]
    prompt: u32,
    /// Number of prompts that arrive
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u32).range(TIMES))]
    prompts: u32,
    /// Decode steps before each prompt, and after the last
    #[arg(long, value_name = "N", default_value_t = 24)]
    #[arg(value_parser = clap::value_parser!(u32).range(TIMES))]
    between: u32,
    /// Most tokens of a step; one run for each value
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', default_value = "256,1024")]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS))]
    budget: Vec<u32>,
    /// Write the results, with machine and command, to this file (- is standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Plot the time between tokens over the run as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Run {
    /// Most tokens of a step.
    pub(crate) budget: u32,
    /// Milliseconds between tokens of a running request without a prompt in progress, and with one.
    quiet_p50: f64,
    quiet_max: f64,
    fed_p50: f64,
    fed_max: f64,
    /// Per prompt, from its arrival to its first token.
    first_token: Vec<f64>,
    /// Per prompt, its prefill steps.
    steps: Vec<u32>,
    /// (milliseconds since the start, milliseconds since the token before) of one running request.
    pub(crate) gaps: Vec<(f64, f64)>,
    /// When prompts arrived, and had their first token, in milliseconds since the start.
    pub(crate) fed: Vec<(f64, f64)>,
}

pub(crate) fn run(args: &MixedArgs, global: &Global) -> Result<()> {
    if args.budget.iter().any(|&tokens| tokens <= args.running) {
        let running = args.running;
        return Err(bad_input(format!(
            "--budget must be more than the {running} running requests"
        )));
    }
    let (mut runs, mut device) = (Vec::new(), String::new());
    for &budget in &args.budget {
        let seats = args.running + 1;
        let loaded = loading::load_sized(&args.load, global, seats, Some(budget))?;
        device.clone_from(&loaded.device);
        let vocab = loaded.config.vocab as u32;
        let config = EngineConfig { step_tokens: budget, ..EngineConfig::default() };
        let working = progress::spinner(&format!("steps of at most {budget} tokens"));
        let run = once(&mut Engine::new(loaded.executor, config), args, budget, vocab)?;
        working.finish_and_clear();
        runs.push(run);
    }
    if let Some(path) = &args.svg {
        plot::mixed(path, &args.load.model, &runs)?;
    }
    if let Some(path) = &args.json {
        record::write(path, &record::record(&device, &runs)?)?;
    }
    if args.json.as_deref() != Some("-".as_ref()) {
        print(&device, args, &runs)?;
    }
    Ok(())
}

fn request(id: u64, tokens: u32, answer: u32, vocab: u32) -> Request {
    let token =
        |i: u32| (i.wrapping_mul(0x9E37_79B9) ^ (id as u32).wrapping_mul(0x85EB_CA6B)) % vocab;
    let prompt: Vec<Token> = (0..tokens).map(token).collect();
    let sampling = Sampling { max_tokens: answer, ignore_eos: true, ..Sampling::default() };
    Request::new(RequestId(id), prompt, sampling)
}

/// The progress of the requests.
#[derive(Default)]
struct Seen {
    /// Times of the tokens of the observed request.
    times: Vec<f64>,
    /// Running requests that have a token.
    begun: std::collections::BTreeSet<u64>,
    /// When the newest prompt had its first token.
    answered: Option<f64>,
}

fn once<X: Executor>(
    engine: &mut Engine<X>,
    args: &MixedArgs,
    budget: u32,
    vocab: u32,
) -> Result<Run> {
    // Enough tokens for all steps: the most that the prompts can take, and those in between.
    let steps = args.prompts.saturating_mul(args.prompt.div_ceil(budget - args.running) + 2);
    let answer =
        (args.prompts + 2).saturating_mul(args.between).saturating_add(steps).saturating_add(8);
    let start = Instant::now();
    let now = || start.elapsed().as_secs_f64() * 1e3;
    let mut seen = Seen::default();
    let mut events: Vec<Event> = (1..=u64::from(args.running))
        .map(|id| Event::Submit(Box::new(request(id, 16, answer, vocab))))
        .collect();
    while seen.begun.len() < args.running as usize {
        step(engine, std::mem::take(&mut events), now, args, &mut seen)?;
    }
    seen.times.clear();
    let (mut fed, mut counts) = (Vec::new(), Vec::new());
    for prompt in 0..=args.prompts {
        let until = seen.times.len() + args.between as usize;
        while seen.times.len() < until {
            step(engine, Vec::new(), now, args, &mut seen)?;
        }
        if prompt == args.prompts {
            break;
        }
        seen.answered = None;
        let id = 1_000_000 + u64::from(prompt);
        let (arrived, before) = (now(), engine.stats().prefill_steps);
        let mut events = vec![Event::Submit(Box::new(request(id, args.prompt, 1, vocab)))];
        while seen.answered.is_none() {
            step(engine, std::mem::take(&mut events), now, args, &mut seen)?;
        }
        fed.push((arrived, seen.answered.unwrap_or(arrived)));
        counts.push((engine.stats().prefill_steps - before) as u32);
    }
    let gaps: Vec<(f64, f64)> = seen.times.windows(2).map(|w| (w[1], w[1] - w[0])).collect();
    let beside = |&(at, gap): &(f64, f64)| fed.iter().any(|&(from, to)| at > from && at - gap < to);
    let (mut busy, mut quiet): (Vec<f64>, Vec<f64>) = Default::default();
    gaps.iter().for_each(|gap| if beside(gap) { busy.push(gap.1) } else { quiet.push(gap.1) });
    busy.sort_by(f64::total_cmp);
    quiet.sort_by(f64::total_cmp);
    let at = |sorted: &[f64], share: f64| {
        sorted.get((sorted.len() as f64 * share) as usize).or(sorted.last()).copied().unwrap_or(0.0)
    };
    Ok(Run {
        budget,
        quiet_p50: at(&quiet, 0.5),
        quiet_max: at(&quiet, 1.0),
        fed_p50: at(&busy, 0.5),
        fed_max: at(&busy, 1.0),
        first_token: fed.iter().map(|(from, to)| to - from).collect(),
        steps: counts,
        gaps,
        fed,
    })
}

fn step<X: Executor>(
    engine: &mut Engine<X>,
    events: Vec<Event>,
    now: impl Fn() -> f64,
    args: &MixedArgs,
    seen: &mut Seen,
) -> Result<()> {
    for output in engine.step_wait((now() * 1e3) as u64, events) {
        match output {
            Output::Token { id: RequestId(1), .. } => {
                seen.begun.insert(1);
                seen.times.push(now());
            }
            Output::Token { id: RequestId(id), .. } if id <= u64::from(args.running) => {
                seen.begun.insert(id);
            }
            Output::Token { .. } => seen.answered = Some(now()),
            Output::Finished { id: RequestId(id), finish: Finish::Length, .. }
                if id > u64::from(args.running) => {}
            Output::Finished { finish, .. } => bail!("a running request ended: {finish:?}"),
            Output::Rejected { reason, .. } => {
                return Err(bad_input(format!("a request was refused: {reason}")));
            }
            Output::Prefilled { .. } | Output::Embedded { .. } => {}
        }
    }
    Ok(())
}

fn print(device: &str, args: &MixedArgs, runs: &[Run]) -> Result<()> {
    say!("{device}")?;
    say!(
        "{} running requests, {} arriving prompts of {} tokens",
        args.running,
        args.prompts,
        args.prompt
    )?;
    say!(
        "tokens of a step   ms between tokens: p50      max   with prompt: p50      max   to first token   steps"
    )?;
    for run in runs {
        let mean = run.first_token.iter().sum::<f64>() / run.first_token.len().max(1) as f64;
        say!(
            "{:>16} {:>24.2} {:>8.2} {:>18.2} {:>8.2} {:>16.1} {:>7}",
            run.budget,
            run.quiet_p50,
            run.quiet_max,
            run.fed_p50,
            run.fed_max,
            mean,
            run.steps.iter().max().copied().unwrap_or(0)
        )?;
    }
    Ok(())
}
