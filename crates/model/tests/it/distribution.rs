//! What every sampler draws, on every device, through the recorded decode graph: a chi-square test
//! against probabilities that this file computes from the logits by itself. The same where the likeliest token is a draft that
//! the step verifies: accepted or not, tokens have the same distribution.

use crate::models;
use device::{Device, DeviceChoice};
use engine::exec::{Executor, Join, Kept, Page, Row, Seat, SeatParams, Step, StepKind};
use engine::request::Token;
use model::{GraphExecutor, LoadOptions, ModelSource, load_executor};

const SEATS: u32 = 16;
const DRAWS: u64 = 6000;
const START: Token = 17;
const DRAFTS: u32 = 3;

struct Bench {
    executor: GraphExecutor,
    number: u64,
    seed: u64,
    /// With drafts: what follows START.
    draft: Option<Token>,
    /// Rows that returned more than one token.
    accepted: u64,
}

impl Bench {
    fn new(device: &Device, draft: Option<Token>) -> Bench {
        let options = LoadOptions {
            max_batch: SEATS,
            max_context: 32,
            pages: Some(SEATS + 1),
            spec: draft.map(|_| format!("ngram:{DRAFTS}").parse().unwrap()),
            ..LoadOptions::default()
        };
        let source = ModelSource::Checkpoint(models::folder().join("llama"));
        let mut executor = load_executor(&source, device, &options, &|_| {}).unwrap().executor;
        if draft.is_some() {
            executor.force_drafts(DRAFTS, 0);
        }
        Bench { executor, number: 0, seed: 0, draft, accepted: 0 }
    }

    /// A decode step in which every seat starts over with a new seed; what each drew.
    fn draw(&mut self, params: &SeatParams, mask: Option<&[u32]>) -> Vec<Token> {
        self.number += 1;
        let seats = (0..SEATS).map(Seat);
        let history: Vec<Token> = self.draft.iter().flat_map(|&draft| [START, draft]).collect();
        let len = history.len() as u32;
        let mut join = |seat: Seat| {
            self.seed += 1;
            let min_len = if params.min_len > 0 { params.min_len + len } else { 0 };
            let params = SeatParams { seed: self.seed, min_len, ..params.clone() };
            Join { seat, len, last_token: START, params, history: history.clone() }
        };
        let most = if self.draft.is_some() && mask.is_none() { 1 + DRAFTS } else { 1 };
        let row = |seat| Row { most, ..Row::decode(seat, len) };
        let step = Step {
            number: self.number,
            rows: seats.clone().map(row).collect(),
            joins: seats.clone().map(&mut join).collect(),
            pages: seats.flat_map(|seat| Kept::ALL.entries(seat, 0, Page(seat.0 + 1))).collect(),
            masks: (0..SEATS).filter_map(|row| Some((row, mask?.to_vec()))).collect(),
            ..Step::default()
        };
        self.executor.launch(&step).unwrap();
        let result = self.executor.poll(true).unwrap().expect("a result");
        for row in result.rows.iter().filter(|_| most > 1) {
            // A stop token ends the row, draft or not.
            let same = self.draft == Some(row.tokens[0].token) && !row.tokens[0].stopped;
            assert_eq!(row.tokens.len() > 1, same, "{row:?}");
            self.accepted += u64::from(same);
        }
        result.rows.iter().map(|row| row.tokens[0].token).collect()
    }
}

/// One sampler: parameters, a mask, and the distribution they give for logits.
struct Sampler {
    name: &'static str,
    params: SeatParams,
    mask: Option<fn(usize) -> bool>,
    /// Weights that need not sum to one.
    weights: fn(&[f64]) -> Vec<f64>,
}

fn exp(logits: &[f64], temperature: f64) -> Vec<f64> {
    logits.iter().map(|l| (l / temperature).exp()).collect()
}

/// Token indices, the likeliest first.
fn ranked(weights: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]));
    order
}

fn only(weights: Vec<f64>, keep: impl Fn(usize) -> bool) -> Vec<f64> {
    let kept = |(token, weight): (usize, f64)| if keep(token) { weight } else { 0.0 };
    weights.into_iter().enumerate().map(kept).collect()
}

fn top_p(weights: Vec<f64>, p: f64) -> Vec<f64> {
    let total: f64 = weights.iter().sum();
    let (mut kept, mut sum) = (Vec::new(), 0.0);
    for token in ranked(&weights) {
        if sum >= p * total {
            break;
        }
        sum += weights[token];
        kept.push(token);
    }
    only(weights, |token| kept.contains(&token))
}

const PENALISED: [(Token, bool); 6] =
    [(3, false), (40, false), (40, true), (40, true), (90, true), (100, true)];

fn samplers() -> Vec<Sampler> {
    let base = SeatParams { temperature: 1.0, ..SeatParams::greedy() };
    let sampler = |name, params, weights| Sampler { name, params, mask: None, weights };
    vec![
        sampler("greedy", SeatParams::greedy(), |logits| {
            let best = ranked(logits)[0];
            only(vec![1.0; logits.len()], |token| token == best)
        }),
        sampler("temperature 1", base.clone(), |logits| exp(logits, 1.0)),
        sampler("temperature 0.5", SeatParams { temperature: 0.5, ..base.clone() }, |logits| {
            exp(logits, 0.5)
        }),
        sampler("temperature 2", SeatParams { temperature: 2.0, ..base.clone() }, |logits| {
            exp(logits, 2.0)
        }),
        sampler("top-k", SeatParams { top_k: 7, ..base.clone() }, |logits| {
            let kept = ranked(logits)[..7].to_vec();
            only(exp(logits, 1.0), |token| kept.contains(&token))
        }),
        sampler("top-p", SeatParams { top_p: 0.8, ..base.clone() }, |logits| {
            top_p(exp(logits, 1.0), 0.8)
        }),
        sampler("min-p", SeatParams { min_p: 0.1, ..base.clone() }, |logits| {
            let weights = exp(logits, 1.0);
            let most = weights[ranked(&weights)[0]];
            only(weights.clone(), |token| weights[token] >= 0.1 * most)
        }),
        sampler(
            "all filters",
            SeatParams { temperature: 1.5, top_k: 40, top_p: 0.9, min_p: 0.05, ..base.clone() },
            |logits| {
                let weights = exp(logits, 1.5);
                let forty = ranked(&weights)[..40].to_vec();
                let weights = top_p(only(weights, |token| forty.contains(&token)), 0.9);
                let most = weights[ranked(&weights)[0]];
                only(weights.clone(), |token| weights[token] >= 0.05 * most)
            },
        ),
        sampler(
            "penalties",
            SeatParams {
                repetition_penalty: 1.7,
                frequency_penalty: 0.6,
                presence_penalty: 0.4,
                seen: PENALISED.to_vec(),
                ..base.clone()
            },
            |logits| {
                let mut logits = logits.to_vec();
                for (token, count) in [(3, 0.0), (40, 2.0), (90, 1.0), (100, 1.0)] {
                    let l = &mut logits[token];
                    *l = if *l > 0.0 { *l / 1.7 } else { *l * 1.7 };
                    *l -= 0.6 * count + if count > 0.0 { 0.4 } else { 0.0 };
                }
                exp(&logits, 1.0)
            },
        ),
        sampler(
            "logit bias",
            SeatParams { logit_bias: vec![(5, 3.0), (60, -4.0), (61, -100.0)], ..base.clone() },
            |logits| {
                let mut logits = logits.to_vec();
                (logits[5], logits[60], logits[61]) =
                    (logits[5] + 3.0, logits[60] - 4.0, logits[61] - 100.0);
                exp(&logits, 1.0)
            },
        ),
        sampler(
            "min_tokens",
            SeatParams { min_len: 2, stop_tokens: vec![0, 9, 77], ..base.clone() },
            |logits| only(exp(logits, 1.0), |token| ![0, 9, 77].contains(&token)),
        ),
        Sampler {
            name: "mask",
            params: base,
            mask: Some(|token| token % 3 == 1),
            weights: |logits| only(exp(logits, 1.0), |token| token % 3 == 1),
        },
    ]
}

/// Tokens that are expected fewer than eight times count together. The bound is what chi-square exceeds
/// once in a million (Wilson and Hilferty's approximation).
fn check(name: &str, weights: &[f64], counts: &[u64]) {
    let (total, draws) = (weights.iter().sum::<f64>(), counts.iter().sum::<u64>() as f64);
    let (mut chi, mut bins, mut rare) = (0.0, 0u32, (0.0, 0.0));
    for (token, (weight, &count)) in weights.iter().zip(counts).enumerate() {
        let (want, found) = (weight / total * draws, count as f64);
        assert!(
            want > 0.0 || count == 0,
            "{name}: token {token} is impossible, drawn {count} times"
        );
        if want >= 8.0 {
            chi += (found - want).powi(2) / want;
            bins += 1;
        } else {
            rare = (rare.0 + want, rare.1 + found);
        }
    }
    if rare.0 > 0.0 {
        chi += (rare.1 - rare.0).powi(2) / rare.0.max(1.0);
        bins += 1;
    }
    let free = f64::from(bins.saturating_sub(1)).max(1.0);
    let bound = free * (1.0 - 2.0 / (9.0 * free) + 4.75 * (2.0 / (9.0 * free)).sqrt()).powi(3);
    assert!(
        chi <= bound,
        "{name}: chi-square {chi:.1} of {free} degrees of freedom, {bound:.1} is the bound"
    );
    println!("{name}: chi-square {chi:.1}, {free} degrees of freedom, bound {bound:.1}");
}

fn check_device(device: &Device) {
    check_bench(Bench::new(device, None));
    // The likeliest token becomes the draft.
    let likeliest = Bench::new(device, Some(0)).draw(&SeatParams::greedy(), None)[0];
    check_bench(Bench::new(device, Some(likeliest)));
}

fn check_bench(mut bench: Bench) {
    bench.draw(&SeatParams::greedy(), None);
    // Greedy rows leave their logits unchanged.
    let logits: Vec<f64> =
        bench.executor.read_logits(0).unwrap().into_iter().map(f64::from).collect();
    for sampler in samplers() {
        let bits = |allowed: fn(usize) -> bool| {
            let mut mask = vec![0u32; logits.len().div_ceil(32)];
            let tokens = (0..logits.len()).filter(|&token| allowed(token));
            tokens.for_each(|token| mask[token / 32] |= 1 << (token % 32));
            mask
        };
        let mask = sampler.mask.map(bits);
        let mut counts = vec![0; logits.len()];
        for _ in 0..DRAWS / u64::from(SEATS) {
            let drawn = bench.draw(&sampler.params, mask.as_deref());
            drawn.into_iter().for_each(|token| counts[token as usize] += 1);
        }
        check(sampler.name, &(sampler.weights)(&logits), &counts);
    }
    let counters = bench.executor.counters(StepKind::Decode);
    assert!(counters.eager.is_empty(), "every step replayed its graph: {:?}", counters.eager);
    assert_eq!(bench.accepted > DRAWS, bench.draft.is_some(), "{} accepted", bench.accepted);
}

#[test]
fn every_sampler_draws_its_distribution_on_the_cpu() {
    check_device(&device::cpu::open(None, false).unwrap());
}

#[test]
fn every_sampler_draws_its_distribution_on_the_gpu() {
    match Device::open(DeviceChoice::Cuda(0)) {
        Ok((device, _)) => check_device(&device),
        Err(_) => eprintln!("skipped: no GPU"),
    }
}

/// The test must be able to fail.
#[test]
#[should_panic(expected = "chi-square")]
fn a_wrong_temperature_is_noticed() {
    let device = device::cpu::open(None, false).unwrap();
    let mut bench = Bench::new(&device, None);
    bench.draw(&SeatParams::greedy(), None);
    let logits: Vec<f64> =
        bench.executor.read_logits(0).unwrap().into_iter().map(f64::from).collect();
    let params = SeatParams { temperature: 1.15, ..SeatParams::greedy() };
    let mut counts = vec![0; logits.len()];
    for _ in 0..DRAWS / u64::from(SEATS) {
        bench.draw(&params, None).into_iter().for_each(|token| counts[token as usize] += 1);
    }
    check("temperature 1.15 for 1", &exp(&logits, 1.0), &counts);
}
