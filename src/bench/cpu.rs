//! `dacapo bench cpu`: the speed of a model on this CPU, and what limits it.

use super::record;
use crate::cli::Global;
use crate::exit::bad_input;
use crate::loading::{self, LoadArgs, Loaded};
use crate::numbers::{TIMES, TOKENS};
use crate::output::say;
use crate::progress;
use anyhow::{Result, bail};
use clap::Args;
use device::DeviceKind;
use device::Region;
use engine::Engine;
use engine::exec::Executor;
use engine::request::{Event, Finish, Output, Request, RequestId, Sampling, Token};
use graph::program::{Program, ProgramOp};
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Measure tokens per second on this CPU, compared to its memory bandwidth and peak compute
#[derive(Args, Debug)]
pub(crate) struct CpuArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=*TOKENS.end()))]
    prompt: u32,
    /// Tokens of the answer
    #[arg(long, value_name = "N", default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=*TOKENS.end()))]
    answer: u32,
    /// Number of runs; the median is reported
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(TIMES))]
    repeats: u32,
    /// Write the results, with machine and command, to this file (- is standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The measurements and their bounds.
#[derive(Debug, Serialize)]
struct Figures {
    model: String,
    prompt_tokens: u32,
    answer_tokens: u32,
    /// Tokens per second: the median, and of every run.
    prompt_rate: f64,
    prompt_rates: Vec<f64>,
    decode_rate: f64,
    decode_rates: Vec<f64>,
    /// Bytes a decode step reads: weights, and the KV cache at half the answer.
    bytes_per_token: f64,
    /// Measured read bandwidth, in bytes per second.
    bandwidth: f64,
    /// Multiply-adds of the linear layers for one prompt token.
    multiply_adds_per_token: f64,
    /// Peak multiply-adds per second of the instruction that computes them, if known.
    peak: Option<f64>,
    instruction: Option<&'static str>,
    /// The lower bounds of the time per answer token and per prompt token.
    decode_floor: Floor,
    prompt_floor: Floor,
}

/// The least time per token on this machine: reading and multiplying at the measured bandwidth and
/// peak.
#[derive(Debug, Serialize)]
struct Floor {
    read_ms: f64,
    multiply_ms: Option<f64>,
    limit: &'static str,
}

impl Floor {
    fn new(bytes: f64, bandwidth: f64, multiply_adds: f64, peak: Option<f64>) -> Floor {
        let read_ms = 1e3 * bytes / bandwidth;
        let multiply_ms = peak.map(|peak| 1e3 * multiply_adds / peak);
        let limit = match multiply_ms {
            Some(multiply) if multiply > read_ms => "compute",
            _ => "memory",
        };
        Floor { read_ms, multiply_ms, limit }
    }

    /// Prints the two bounds, which one is higher, and the measured time relative to it.
    fn show(&self, what: &str, rate: f64) -> Result<()> {
        let took = 1e3 / rate;
        let floor = self.multiply_ms.map_or(self.read_ms, |multiply| multiply.max(self.read_ms));
        let multiply = self.multiply_ms.map_or("not measured".into(), |ms| format!("{ms:.3} ms"));
        say!(
            "  {what} is limited by {}: per token, reading takes {:.3} ms and multiplying {multiply}; measured {took:.2} ms, {:.1} × the bound",
            self.limit,
            self.read_ms,
            took / floor
        )?;
        Ok(())
    }
}

pub(crate) fn run(args: &CpuArgs, global: &Global) -> Result<()> {
    let loaded = loading::load(&args.load, global, 1)?;
    if loaded.executor.device().kind() != DeviceKind::Cpu {
        return Err(bad_input(format!(
            "bench cpu measures the CPU, but the model is on {}: add --device cpu",
            loaded.device
        )));
    }
    let working = progress::spinner("measuring the machine");
    let bandwidth = figures::read_bandwidth(loaded.executor.device())?;
    let threads = global.threads.map(usize::from);
    let peak = device::cpu::peak::multiply_adds(threads, device::cpu::Limit::None);
    let peak_rate = peak.map(|(peak, _)| peak);
    let bytes = bytes_per_token(&loaded, args.prompt + args.answer / 2);
    let (work, head) = multiply_adds(&loaded.program);
    let weights = loaded.executor.report().region(Region::Weights) as f64;
    let prompt_bytes = weights / f64::from(args.prompt);
    let mut figures = Figures {
        model: loaded.name.clone(),
        prompt_tokens: args.prompt,
        answer_tokens: args.answer,
        prompt_rate: 0.0,
        prompt_rates: Vec::new(),
        decode_rate: 0.0,
        decode_rates: Vec::new(),
        bytes_per_token: bytes,
        bandwidth,
        multiply_adds_per_token: work,
        peak: peak_rate,
        instruction: peak.map(|(_, name)| name),
        decode_floor: Floor::new(bytes, bandwidth, work + head, peak_rate),
        prompt_floor: Floor::new(prompt_bytes, bandwidth, work, peak_rate),
    };
    let (line, vocab) = (loaded.device.clone(), loaded.config.vocab as u32);
    let mut engine = Engine::new(loaded.executor, engine::EngineConfig::default());
    for repeat in 0..=args.repeats {
        working.set_message(format!("run {repeat} of {}", args.repeats));
        let (prompt, answer) = once(&mut engine, args, repeat, vocab)?;
        // The first run is a warm-up.
        if repeat > 0 {
            figures.prompt_rates.push(f64::from(args.prompt) / prompt.as_secs_f64());
            figures.decode_rates.push(f64::from(args.answer - 1) / answer.as_secs_f64());
        }
    }
    working.finish_and_clear();
    figures.prompt_rate = median(&figures.prompt_rates);
    figures.decode_rate = median(&figures.decode_rates);
    if let Some(path) = &args.json {
        record::write(path, &record::record(&line, &figures)?)?;
    }
    if args.json.as_deref() != Some("-".as_ref()) {
        show(&figures, &line)?;
    }
    Ok(())
}

/// Runs one prompt that is not cached: returns the time to the first token, and from there to the
/// last.
fn once<X: Executor>(
    engine: &mut Engine<X>,
    args: &CpuArgs,
    repeat: u32,
    vocab: u32,
) -> Result<(Duration, Duration)> {
    let token =
        |i: u32| (i.wrapping_mul(0x9E37_79B9) ^ (repeat + 1).wrapping_mul(0x85EB_CA6B)) % vocab;
    let prompt: Vec<Token> = (0..args.prompt).map(token).collect();
    let sampling = Sampling { max_tokens: args.answer, ignore_eos: true, ..Sampling::default() };
    let request = Request::new(RequestId(u64::from(repeat) + 1), prompt, sampling);
    let start = Instant::now();
    let (mut first, mut tokens) = (None, 0);
    let mut events = vec![Event::Submit(Box::new(request))];
    loop {
        let now = start.elapsed().as_micros() as u64;
        for output in engine.step_wait(now, std::mem::take(&mut events)) {
            match output {
                Output::Token { .. } => {
                    tokens += 1;
                    first.get_or_insert_with(|| start.elapsed());
                }
                Output::Finished { finish: Finish::Length, .. } if tokens == args.answer => {
                    let first = first.unwrap_or_default();
                    return Ok((first, start.elapsed() - first));
                }
                Output::Finished { finish, .. } => {
                    bail!("the answer ended after {tokens} tokens: {finish:?}")
                }
                Output::Rejected { reason, .. } => {
                    return Err(bad_input(format!("the request was refused: {reason}")));
                }
                Output::Prefilled { .. } | Output::Embedded { .. } => {}
            }
        }
    }
}

/// All weights, and the KV cache up to the context. (An untied embedding table is only gathered
/// from, but counted too.)
fn bytes_per_token(loaded: &Loaded, context: u32) -> f64 {
    let report = loaded.executor.report();
    let bindings = loaded.executor.runners().bindings();
    let kv: u64 = bindings.kv.iter().map(|kv| kv.page_bytes() / u64::from(kv.page_size)).sum();
    (report.region(Region::Weights) + kv * u64::from(context)) as f64
}

/// Multiply-adds of linears per token: in layers, without attention; and of the output head, which runs once per
/// prompt and once per answer token.
fn multiply_adds(program: &Program) -> (f64, f64) {
    let (mut layers, mut head) = (0.0, 0.0);
    for step in &program.steps {
        if let ProgramOp::Linear(linear) = &step.op {
            let weight = program.weight(linear.w);
            let adds = f64::from(weight.rows) * f64::from(weight.cols);
            *(if step.layer.is_some() { &mut layers } else { &mut head }) += adds;
        }
    }
    (layers, head)
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn show(figures: &Figures, line: &str) -> Result<()> {
    let Figures { prompt_tokens, answer_tokens, prompt_rate, decode_rate, .. } = figures;
    say!("{} on {line}", figures.model)?;
    say!("  prompt, {prompt_tokens} tokens      {prompt_rate:>8.1} tok/s")?;
    say!("  decode, {answer_tokens} tokens      {decode_rate:>8.1} tok/s")?;
    let (bytes, bandwidth) = (figures.bytes_per_token, figures.bandwidth);
    say!(
        "  decode reads {:.1} MB a token: {:.1} of {:.1} GB/s, {:.0} %",
        bytes / 1e6,
        bytes * decode_rate / 1e9,
        bandwidth / 1e9,
        100.0 * bytes * decode_rate / bandwidth
    )?;
    if let (Some(peak), Some(name)) = (figures.peak, figures.instruction) {
        let work = figures.multiply_adds_per_token;
        say!(
            "  prompt does {:.0} M multiply-adds a token: {:.2} of {:.2} T/s ({name}), {:.0} %",
            work / 1e6,
            work * prompt_rate / 1e12,
            peak / 1e12,
            100.0 * work * prompt_rate / peak
        )?;
    }
    // More than the bandwidth is possible: a CPU cache may hold part of the weights between tokens.
    figures.decode_floor.show("decode", *decode_rate)?;
    figures.prompt_floor.show("prompt", *prompt_rate)
}
