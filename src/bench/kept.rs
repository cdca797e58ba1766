//! `dacapo bench kept`: how soon an evicted prefix is back from the memory for evicted pages, and what that costs the
//! requests that are running.

use super::record;
use crate::cli::Global;
use crate::exit::bad_input;
use crate::loading::{self, LoadArgs};
use crate::numbers::{SEQUENCES, TIMES, TOKENS};
use crate::output::say;
use crate::progress;
use anyhow::{Result, bail};
use clap::Args;
use engine::Engine;
use engine::exec::Executor;
use engine::request::{Event, Output, Request, RequestId, Sampling, Token};
use engine::store::StoreUse;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

/// Measure how soon an evicted prefix is back (--kv-host-memory, --kv-disk)
///
/// A prefix is computed, evicted by others, and asked for again: once alone, once while other requests decode. Give
/// --kv-cache a size of a few prefixes, so that evicting takes little time.
#[derive(Args, Debug)]
pub(crate) struct KeptArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// Tokens of the prefix
    #[arg(long, value_name = "N", default_value_t = 8000)]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS))]
    prefix: u32,
    /// Requests that decode meanwhile
    #[arg(long, value_name = "N", default_value_t = 32)]
    #[arg(value_parser = clap::value_parser!(u32).range(SEQUENCES))]
    running: u32,
    /// How often the prefix returns
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(TIMES))]
    times: u32,
    /// Write the results, with machine and command, to this file (- is standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Milliseconds; medians over the times.
#[derive(Debug, Serialize)]
struct Measured {
    /// To the first token of a prefix that is computed, found in the device's cache, and brought back.
    computed: f64,
    cached: f64,
    returned: f64,
    /// What bringing it back took: the difference to one in the cache.
    ready: f64,
    /// Between two tokens of requests that decode: with nothing beside them, and while a prefix is brought back.
    quiet: f64,
    beside: f64,
    /// Tokens between which that was measured.
    quiet_gaps: usize,
    beside_gaps: usize,
    /// Until a prefix was back while others decode.
    returned_beside: f64,
}

/// Tokens of running requests before each return.
const QUIET: usize = 64;
/// The first id of requests that only take pages.
const FILLERS: u64 = 1 << 40;
/// The first id of requests that decode all the time.
const RUNNERS: u64 = 1 << 50;

pub(crate) fn run(args: &KeptArgs, global: &Global) -> Result<()> {
    let load = args.load.for_context(args.prefix + 1024);
    let loaded = loading::load_sized(&load, global, args.running + 2, None)?;
    if loaded.executor.store_uses().is_empty() {
        return Err(bad_input("nothing keeps evicted pages: give --kv-host-memory or --kv-disk"));
    }
    let (device, vocab) = (loaded.device.clone(), loaded.config.vocab as u32);
    let geometry = loaded.executor.geometry();
    let room = u64::from(geometry.pages) * u64::from(geometry.page_size);
    let fillers = room / u64::from(args.prefix) + 1;
    let config = loaded.engine_config();
    let working = progress::spinner("prefixes come and go");
    let mut bench = Bench {
        engine: Engine::new(loaded.executor, config),
        start: Instant::now(),
        vocab,
        prefix: args.prefix,
        fillers,
        filled: 0,
        first: None,
        runners: Vec::new(),
    };
    let measured = bench.measure(args)?;
    working.finish_and_clear();
    if let Some(path) = &args.json {
        record::write(path, &record::record(&device, &measured)?)?;
    }
    if args.json.as_deref() != Some("-".as_ref()) {
        print(&device, args, &measured)?;
    }
    Ok(())
}

/// A request that decodes all the time: its id, when its last token came, and the gaps so far.
struct Runner {
    id: u64,
    last: Option<f64>,
    gaps: Vec<(f64, f64)>,
}

/// What became of a prefix: milliseconds to its first token; those before and after the turn of the engine that saw its
/// pages come back, if they did; and how many of its tokens were found.
struct Answered {
    first: f64,
    back: Option<(f64, f64)>,
    found: u32,
}

struct Bench<X: Executor> {
    engine: Engine<X>,
    start: Instant,
    vocab: u32,
    prefix: u32,
    /// Prompts that evict everything else.
    fillers: u64,
    filled: u64,
    /// The time of the first token of the request that is measured, and how much of its prompt was found.
    first: Option<(f64, u32)>,
    runners: Vec<Runner>,
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of.get(of.len() / 2).copied().unwrap_or(0.0)
}

impl<X: Executor> Bench<X> {
    fn now(&self) -> f64 {
        self.start.elapsed().as_secs_f64() * 1e3
    }

    fn request(&self, id: u64, tokens: u32, answer: u32) -> Event {
        let seed = (id ^ id >> 32) as u32;
        let token =
            |i: u32| (i.wrapping_mul(0x9E37_79B9) ^ seed.wrapping_mul(0x85EB_CA6B)) % self.vocab;
        let prompt: Vec<Token> = (0..tokens).map(token).collect();
        let sampling = Sampling { max_tokens: answer, ignore_eos: true, ..Sampling::default() };
        Event::Submit(Box::new(Request::new(RequestId(id), prompt, sampling)))
    }

    /// One turn of the engine.
    fn step(&mut self, mut events: Vec<Event>) -> Result<()> {
        let ended: Vec<usize> = (0..self.runners.len())
            .filter(|index| !self.engine.holds(RequestId(self.runners[*index].id)))
            .collect();
        for index in ended {
            // A new one in its place; its first token has none before it.
            let id = self.runners[index].id + self.runners.len() as u64;
            (self.runners[index].id, self.runners[index].last) = (id, None);
            events.push(self.request(id, 16, 512));
        }
        let clock = (self.now() * 1e3) as u64;
        for output in self.engine.step_wait(clock, events) {
            let now = self.start.elapsed().as_secs_f64() * 1e3;
            match output {
                Output::Rejected { reason, .. } => {
                    return Err(bad_input(format!("a request was refused: {reason}")));
                }
                Output::Prefilled { id, cached_tokens, .. } if id.0 < FILLERS => {
                    self.first = Some((now, cached_tokens));
                }
                Output::Token { id, .. } if id.0 >= RUNNERS => {
                    let runner = self.runners.iter_mut().find(|runner| runner.id == id.0);
                    if let Some(runner) = runner {
                        let before = runner.last.replace(now);
                        runner.gaps.extend(before.map(|before| (before, now)));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether nothing is left but what decodes all the time.
    fn settled(&self) -> bool {
        match self.runners.is_empty() {
            true => self.engine.is_idle(),
            false => {
                let stats = self.engine.stats();
                stats.waiting == 0 && stats.running as usize == self.runners.len()
            }
        }
    }

    /// Asks for a prefix.
    fn ask(&mut self, id: u64) -> Result<Answered> {
        self.first = None;
        let (began, before) = (self.now(), self.engine.stats().fetched_pages);
        let mut events = vec![self.request(id, self.prefix, 1)];
        let mut back = None;
        while self.first.is_none() {
            let turn = self.now();
            self.step(std::mem::take(&mut events))?;
            if back.is_none() && self.engine.stats().fetched_pages > before {
                back = Some((turn - began, self.now() - began));
            }
        }
        let (at, found) = self.first.expect("the loop ended");
        while !self.settled() {
            self.step(Vec::new())?;
        }
        Ok(Answered { first: at - began, back, found })
    }

    /// Takes so many pages for other prompts that nothing else is cached.
    fn evict(&mut self) -> Result<()> {
        for _ in 0..self.fillers {
            self.filled += 1;
            let event = self.request(FILLERS + self.filled, self.prefix, 1);
            self.step(vec![event])?;
            while !self.settled() {
                self.step(Vec::new())?;
            }
        }
        Ok(())
    }

    /// Asks for a prefix that was evicted; returns the times to its first token, before and after the turn of the engine
    /// that saw that it is back.
    fn back(&mut self, id: u64) -> Result<(f64, (f64, f64))> {
        match self.ask(id)? {
            Answered { first, back: Some(back), found } if found + 32 >= self.prefix => {
                Ok((first, back))
            }
            Answered { found, .. } => {
                let of = |StoreUse { medium, saved, loaded, failed, .. }: StoreUse| {
                    format!("{medium:?}: {saved} saved, {loaded} loaded, {failed} failed")
                };
                let uses = self.engine.executor().store_uses().into_iter().map(of);
                bail!(
                    "{found} of {} tokens came back ({}): give --kv-host-memory or --kv-disk more",
                    self.prefix,
                    uses.collect::<Vec<_>>().join("; ")
                )
            }
        }
    }

    fn measure(&mut self, args: &KeptArgs) -> Result<Measured> {
        let (mut computed, mut cached, mut returned) = (Vec::new(), Vec::new(), Vec::new());
        for id in 0..u64::from(args.times) {
            computed.push(self.ask(id)?.first);
            self.evict()?;
            returned.push(self.back(id)?.0);
            cached.push(self.ask(id)?.first);
        }
        self.runners = (0..u64::from(args.running))
            .map(|n| Runner { id: RUNNERS + n, last: None, gaps: Vec::new() })
            .collect();
        let (mut quiet, mut beside, mut returned_beside) = (Vec::new(), Vec::new(), Vec::new());
        for id in 0..u64::from(args.times) {
            // Computed again, or brought back, so that of all evicted ones it is the last but the fillers.
            self.ask(id)?;
            self.evict()?;
            // The last ones decode alone for a while.
            let from = self.now();
            let enough = |runner: &Runner| runner.gaps.iter().filter(|gap| gap.0 > from).count();
            while self.runners.iter().map(enough).min().unwrap_or(0) < QUIET {
                self.step(Vec::new())?;
            }
            let asked = self.now();
            let (_, (until, back)) = self.back(id)?;
            returned_beside.push(back);
            for runner in &mut self.runners {
                for (began, ended) in runner.gaps.drain(..) {
                    if began > from && ended < asked {
                        quiet.push(ended - began);
                    } else if ended > asked && ended <= asked + until {
                        // The rest of its prompt is in no step yet.
                        beside.push(ended - began);
                    }
                }
            }
        }
        let (returned, cached) = (median(returned), median(cached));
        Ok(Measured {
            computed: median(computed),
            cached,
            returned,
            ready: returned - cached,
            quiet_gaps: quiet.len(),
            beside_gaps: beside.len(),
            quiet: median(quiet),
            beside: median(beside),
            returned_beside: median(returned_beside),
        })
    }
}

fn print(device: &str, args: &KeptArgs, measured: &Measured) -> Result<()> {
    let Measured { computed, cached, returned, ready, quiet, beside, .. } = measured;
    say!("{device}")?;
    say!("a prefix of {} tokens, {} times, medians", args.prefix, args.times)?;
    say!(
        "ms to its first token: computed {computed:.1}, cached {cached:.1}, brought back {returned:.1}"
    )?;
    say!("so it was back after {ready:.1} ms")?;
    let (few, while_back) = (measured.beside_gaps, measured.returned_beside);
    say!("{} requests that decode: {quiet:.3} ms between tokens, alone", args.running)?;
    match few {
        0 => say!(
            "a prefix was back before any of them had its next token, after {while_back:.1} ms"
        ),
        _ => say!(
            "{beside:.3} ms while a prefix is brought back ({few} tokens), which then takes {while_back:.1} ms"
        ),
    }?;
    Ok(())
}
