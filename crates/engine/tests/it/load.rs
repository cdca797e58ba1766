//! The engine under load, on a device whose steps take as long as those measured on a GPU, in a time that is only counted.

use engine::exec::{
    Coverage, ExecError, Executor, Geometry, Kept, RowResult, Sampled, Step, StepKind, StepResult,
};
use engine::request::{Event, Micros, Output, Request, RequestId, Sampling};
use engine::{Engine, EngineConfig};
use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// Steps of 63 decode rows and prompts of an 8B model on one H200: tokens, and microseconds, as measured on 2026-11-16.
const MIXED: [(u32, u64); 13] = [
    (64, 6_800),
    (128, 8_000),
    (208, 9_500),
    (256, 9_700),
    (320, 12_300),
    (384, 13_100),
    (512, 13_900),
    (640, 17_900),
    (832, 21_600),
    (1024, 23_000),
    (1344, 30_200),
    (1792, 38_700),
    (2048, 44_300),
];
/// As measured on 2026-11-18 (208, 256, 512 and 1,024 tokens; the others in between as before).
const NEWER: [(u32, u64); 13] = [
    (64, 6_300),
    (128, 7_000),
    (208, 7_700),
    (256, 8_250),
    (320, 10_900),
    (384, 11_700),
    (512, 13_120),
    (640, 16_600),
    (832, 20_400),
    (1024, 23_550),
    (1344, 30_000),
    (1792, 38_500),
    (2048, 44_000),
];
/// As predicted with tiles of gate and up that divide the tokens of a step (`ops/linear/even.rs`).
const TURNS: [(u32, u64); 13] = [
    (64, 6_300),
    (128, 7_000),
    (208, 7_700),
    (256, 8_250),
    (320, 9_600),
    (384, 10_800),
    (512, 12_760),
    (640, 14_000),
    (832, 17_700),
    (1024, 22_900),
    (1344, 27_500),
    (1792, 37_500),
    (2048, 44_000),
];

/// A device that takes time.
struct Timed {
    seats: u32,
    steps: Steps,
    clock: Rc<Cell<Micros>>,
    free: Micros,
    flight: VecDeque<(Micros, StepResult)>,
}

/// How long the steps of a device take: those that feed prompts, and what contexts, their lengths and the host add to each.
#[derive(Clone, Copy)]
struct Steps {
    mixed: [(u32, u64); 13],
    more: Micros,
}

impl Steps {
    fn time(&self, step: &Step) -> Micros {
        let decoding = step.rows.iter().filter(|row| row.prompt.is_none()).count() as u64;
        if step.kind() == StepKind::Decode {
            return 3_600 + 37 * decoding + self.more * 6 / 10;
        }
        let tokens = step.tokens() as u32;
        let (_, time) = self.mixed.into_iter().find(|(bucket, _)| *bucket >= tokens).unwrap();
        // With 250 rows they take 5 ms more.
        time + 28 * decoding - 28 * 63.min(decoding) + self.more
    }
}

impl Executor for Timed {
    fn geometry(&self) -> Geometry {
        let pages = 4096 * self.seats / 16;
        Geometry {
            seats: self.seats,
            pages,
            page_size: 16,
            pages_per_seat: 512,
            vocab: 16,
            kept: Kept::ALL,
        }
    }

    fn coverage(&self) -> Coverage {
        Coverage { decode_rows: self.seats, prefill_tokens: 2048, prefill_rows: self.seats }
    }

    fn prefill_buckets(&self) -> Vec<u32> {
        MIXED.iter().map(|(tokens, _)| *tokens).collect()
    }

    fn launch(&mut self, step: &Step) -> Result<(), ExecError> {
        let began = self.free.max(self.clock.get());
        let took = self.steps.time(step);
        self.free = began + took;
        let row = |sample: bool| {
            let mut row = RowResult::default();
            if sample {
                row.tokens.push(Sampled { token: 1, stopped: false, logprob: None });
            }
            row
        };
        let rows = step.rows.iter().map(|at| row(at.sample)).collect();
        let result = StepResult { number: step.number, more_follow: false, rows, took: Some(took) };
        self.flight.push_back((self.free, result));
        Ok(())
    }

    fn poll(&mut self, block: bool) -> Result<Option<StepResult>, ExecError> {
        let Some((done, _)) = self.flight.front() else { return Ok(None) };
        if *done > self.clock.get() {
            if !block {
                return Ok(None);
            }
            self.clock.set(*done);
        }
        Ok(self.flight.pop_front().map(|(_, result)| result))
    }
}

/// What clients saw.
#[derive(Debug)]
struct Seen {
    /// Answer tokens a second, while all clients were busy.
    rate: f64,
    /// Of all gaps between two tokens of an answer, the one that 1 in 100 exceeds.
    gap: Micros,
    /// The median time to the first token, without the first request of each client.
    first: Micros,
}

/// Lengths as people have them: many short, few long. Means of about 512 and 230.
fn lengths(count: u64) -> Vec<(u32, u32)> {
    let mut state = 88_172_645_463_325_252u64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut lognormal = |mean: f64, sigma: f64| {
        let sum: f64 = (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
        ((mean.ln() - sigma * sigma / 2.0 + sigma * sum).exp() as u32).clamp(4, 3000)
    };
    (0..count).map(|_| (lognormal(512.0, 0.8), lognormal(230.0, 0.6))).collect()
}

/// Clients that each send a request, wait for its end, and send the next.
fn serve(clients: u32, requests: u64, target_gap: Option<Micros>, steps: Steps) -> Seen {
    let clock = Rc::new(Cell::new(0));
    let (clock_too, flight) = (clock.clone(), VecDeque::new());
    let device = Timed { seats: clients, steps, clock: clock_too, free: 0, flight };
    let config = EngineConfig { target_gap, prefix_cache: false, ..EngineConfig::default() };
    let mut engine = Engine::new(device, config);
    let mut left: VecDeque<(u64, (u32, u32))> = (0..).zip(lengths(requests)).collect();
    let (mut sent, mut last) = (BTreeMap::new(), BTreeMap::<RequestId, Micros>::new());
    let (mut gaps, mut firsts) = (Vec::new(), Vec::new());
    let (mut tokens, mut full) = (0u64, (0, 0));
    let mut events = Vec::new();
    loop {
        while sent.len() < clients as usize
            && let Some((id, (prompt, answer))) = left.pop_front()
        {
            let sampling = Sampling { max_tokens: answer, ignore_eos: true, ..Sampling::default() };
            let prompt: Vec<u32> = (0..prompt).map(|at| (at * 7 + id as u32) % 16).collect();
            sent.insert(RequestId(id), clock.get());
            let request = Request::new(RequestId(id), prompt, sampling);
            events.push(Event::Submit(Box::new(request)));
        }
        if sent.is_empty() {
            break;
        }
        if !left.is_empty() {
            full = (clock.get(), tokens);
        }
        for output in engine.step_wait(clock.get(), std::mem::take(&mut events)) {
            match output {
                Output::Token { id, .. } => {
                    tokens += 1;
                    match last.insert(id, clock.get()) {
                        Some(before) => gaps.push(clock.get() - before),
                        None if id.0 >= u64::from(clients) => firsts.push(clock.get() - sent[&id]),
                        None => {}
                    }
                }
                Output::Finished { id, .. } => {
                    sent.remove(&id);
                    last.remove(&id);
                }
                _ => {}
            }
        }
    }
    gaps.sort_unstable();
    firsts.sort_unstable();
    Seen {
        rate: full.1 as f64 / full.0 as f64 * 1e6,
        gap: gaps[gaps.len() * 99 / 100],
        first: firsts[firsts.len() / 2],
    }
}

#[test]
fn gaps_are_bounded_at_no_cost() {
    let tables = [("2026-11-16", MIXED), ("2026-11-18", NEWER), ("predicted", TURNS)];
    let tables =
        tables.into_iter().flat_map(|(name, mixed)| [0, 900].map(|more| (name, mixed, more)));
    for (name, mixed, more) in tables {
        for (clients, requests, gap) in [(64, 512, 20_000), (256, 1024, 38_000)] {
            let steps = Steps { mixed, more };
            let full = serve(clients, requests, None, steps);
            let thin = serve(clients, requests, Some(gap), steps);
            let what =
                format!("{clients} clients, steps of {name} and {more} µs: {full:?} {thin:?}");
            println!("{what}");
            assert!(thin.gap <= gap, "{what}");
            assert!(thin.gap < full.gap, "{what}");
            assert!(thin.rate > full.rate, "{what}");
            assert!(thin.first < 4 * full.first, "{what}");
        }
    }
}
