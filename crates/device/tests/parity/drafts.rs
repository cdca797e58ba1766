//! The drafter, and the sampler where it verifies drafts.

use crate::sample::{Params, float, neutral, with};
use crate::support::*;
use device::op::{Draft, Sample};
use device::step::{MAX_BIASES, PARAM_WORDS, count, param, ring, row};
use device::{DType, Op, Span, StepLimits};

const ROWS: usize = 5;
const LAUNCH: u32 = 11;

fn limits(vocab: usize, q_len: u32) -> StepLimits {
    StepLimits {
        seats: ROWS as u32 + 1,
        rows: ROWS as u32,
        tokens: ROWS as u32 * q_len,
        pages_per_seat: 40,
        page_size: 16,
        vocab: vocab as u32,
        penalties: true,
        tokens_per_row: q_len,
    }
}

fn seat(r: usize) -> usize {
    (r + 2) % ROWS
}

fn set_rows(
    layout: &mut Layout,
    state: &device::StepState,
    live: usize,
    flags: &[u32],
    q_len: u32,
) {
    let mut counts = vec![0u32; count::WORDS as usize];
    counts[count::LAUNCH_LO as usize] = LAUNCH;
    counts[count::ROWS as usize] = live as u32;
    layout.set(state.counts.span, words_to_bytes(&counts));
    let pad = state.limits.seats;
    let seats: Vec<u32> = (0..ROWS).map(|r| if r < live { seat(r) as u32 } else { pad }).collect();
    layout.set(state.row_seat.span, words_to_bytes(&seats));
    layout.set(state.row_flags.span, words_to_bytes(flags));
    layout.set(state.row_q_len.span, words_to_bytes(&[q_len; ROWS]));
    let starts: Vec<u32> = (0..=ROWS as u32).map(|r| r.min(live as u32) * q_len).collect();
    layout.set(state.q_start.span, words_to_bytes(&starts));
}

/// Histories of few different tokens, so that they repeat themselves; some without pages for their drafts.
fn build_draft(seed: u64, layout: &mut Layout) -> (Vec<Op>, Vec<Span>) {
    let rng = &mut Rng::new(seed);
    let q_len = 2 + rng.below(8) as u32;
    let limits = limits(50, q_len);
    let state = layout.state(limits);
    let (seats, context) = (limits.seats as usize + 1, limits.context() as usize);
    let live = 1 + rng.below(ROWS);
    let mut flags = vec![0; ROWS];
    for flag in flags.iter_mut().take(live) {
        let prompt = if rng.below(6) == 0 { row::PROMPT } else { 0 };
        *flag = row::SAMPLE | prompt | (rng.below(q_len as usize + 1) as u32) << row::DRAFTS;
    }
    set_rows(layout, &state, live, &flags, q_len);
    let mut lens = vec![0u32; seats];
    let mut pages = vec![0u32; seats * limits.pages_per_seat as usize];
    let mut history = vec![0u32; seats * context];
    let mut token = vec![0u32; limits.tokens as usize];
    for seat in 0..seats {
        let len = rng.pick(&[0, 1, 2, 15, 31, 97, 300, context - 9, context - 1]);
        lens[seat] = len as u32;
        let words = rng.pick(&[1, 2, 4, 40]);
        let own = &mut history[seat * context..(seat + 1) * context];
        own.iter_mut().for_each(|token| *token = rng.below(words) as u32);
        // Pages up to the token that is fed, and some after it.
        let held = len / 16 + 1 + rng.below(2);
        let own = &mut pages[seat * limits.pages_per_seat as usize..];
        (0..held.min(limits.pages_per_seat as usize)).for_each(|i| own[i] = 1 + i as u32);
    }
    token.iter_mut().for_each(|token| *token = 1000 + rng.below(9) as u32);
    layout.set(state.seat_len.span, words_to_bytes(&lens));
    layout.set(state.page_table.span, words_to_bytes(&pages));
    layout.set(state.history.expect("a history").span, words_to_bytes(&history));
    layout.set(state.token.span, words_to_bytes(&token));
    let drafts = state.row_drafts.expect("drafts").span;
    (vec![Op::Draft(Draft { state, rows: ROWS as u32, q_len })], vec![state.token.span, drafts])
}

#[test]
fn drafts_agree_with_the_reference() {
    let mut drafted = 0;
    for seed in 0..60 {
        let reference = run(&device::cpu::open(None, true).expect("a CPU"), &|layout| {
            build_draft(seed, layout)
        });
        drafted += bytes_to_words(&reference[1]).iter().sum::<u32>();
        against_reference(&|layout| build_draft(seed, layout), &|device, want, got| {
            assert_eq!(bytes_to_words(&want[1]), bytes_to_words(&got[1]), "{seed} on {device}");
            assert_eq!(bytes_to_words(&want[0]), bytes_to_words(&got[0]), "{seed} on {device}");
        });
    }
    assert!(drafted > 100, "{drafted} drafts");
}

struct Case {
    seed: u64,
    q_len: u32,
    rows: Vec<Params>,
    vocab: usize,
    logits: DType,
}

/// Logits with one likely token each; most drafts are these.
fn build_sample(case: &Case, layout: &mut Layout) -> (Vec<Op>, Vec<Span>) {
    let rng = &mut Rng::new(case.seed);
    let (q_len, vocab, live) = (case.q_len, case.vocab, case.rows.len());
    let limits = limits(vocab, q_len);
    let state = layout.state(limits);
    let seats = limits.seats as usize + 1;
    let tokens = ROWS * q_len as usize;
    let mut values = rng.floats(tokens * vocab, 2.0);
    let mut fed = vec![0u32; tokens];
    for at in 0..tokens {
        let likely = rng.below(vocab);
        values[at * vocab + likely] += 5.0;
        let next = at + 1;
        if next < tokens {
            fed[next] = if rng.below(5) > 0 { likely as u32 } else { rng.below(vocab) as u32 };
        }
    }
    let (mut flags, mut drafts) = (vec![0; ROWS], vec![0; ROWS]);
    for r in 0..live {
        flags[r] = if rng.below(8) > 0 { row::SAMPLE } else { 0 };
        drafts[r] = rng.pick(&[q_len - 1, q_len - 1, 0, 1]).min(q_len - 1);
    }
    set_rows(layout, &state, live, &flags, q_len);
    layout.set(state.row_drafts.expect("drafts").span, words_to_bytes(&drafts));
    layout.set(state.token.span, words_to_bytes(&fed));
    let mut params = vec![0u32; seats * PARAM_WORDS as usize];
    let mut biases = vec![0u32; seats * 2 * MAX_BIASES as usize];
    let mut seen = vec![0u32; seats * vocab];
    let mut lens = vec![0u32; seats];
    for (r, words) in case.rows.iter().enumerate() {
        let at = seat(r) * PARAM_WORDS as usize;
        words.iter().for_each(|(word, value)| params[at + *word as usize] = *value);
        for i in 0..params[at + param::BIASES as usize] as usize {
            let at = 2 * (seat(r) * MAX_BIASES as usize + i);
            biases[at] = rng.below(vocab) as u32;
            biases[at + 1] = (rng.float() * 4.0).to_bits();
        }
        // The first two drafts often count already.
        for j in 1..q_len.min(3) as usize {
            seen[seat(r) * vocab + fed[r * q_len as usize + j] as usize] =
                rng.pick(&[0, 1 << 31 | 1]);
        }
        lens[seat(r)] = 5 + rng.below(30) as u32;
        // One of the drafts is a stop token.
        if params[at + param::STOPS as usize] > 0 {
            let draft = r * q_len as usize + (1 + rng.below(q_len as usize - 1));
            params[at + param::STOP as usize] = fed[draft];
        }
    }
    layout.set(state.params.span, words_to_bytes(&params));
    layout.set(state.biases.span, words_to_bytes(&biases));
    layout.set(state.seen.expect("penalties").span, words_to_bytes(&seen));
    layout.set(state.seat_len.span, words_to_bytes(&lens));
    let history = state.history.expect("a history").span;
    layout.set(history, vec![0; history.len as usize]);
    layout.set(state.ring, vec![0xEE; state.ring.len as usize]);
    let logits = layout.floats(case.logits, tokens, vocab, 0, &values);
    let outs = vec![
        state.ring,
        state.seat_len.span,
        state.seat_token.span,
        state.seen.expect("penalties").span,
        history,
    ];
    (vec![Op::Sample(Sample { logits, state, scratch: None, rows: ROWS as u32, q_len })], outs)
}

/// The places of a row up to the end of its list.
fn places(words: &[u32], limits: &StepLimits, r: usize) -> Vec<Vec<u32>> {
    let entry = limits.ring_entry_words() as usize * (LAUNCH % ring::ENTRIES) as usize;
    let at = entry + ring::HEADER_WORDS as usize + r * limits.ring_row_words() as usize;
    let row = &words[at..at + limits.ring_row_words() as usize];
    let places = row.chunks_exact(ring::PLACE_WORDS as usize);
    places.take_while(|place| place[1] & ring::SAMPLED != 0).map(<[u32]>::to_vec).collect()
}

fn check(case: &Case) -> usize {
    let limits = limits(case.vocab, case.q_len);
    let reference = cpu_reference(case);
    let counted = (0..case.rows.len()).map(|r| places(&reference, &limits, r).len()).sum();
    against_reference(&|layout| build_sample(case, layout), &|device, want, got| {
        let what = format!("seed {} on {device}", case.seed);
        let (a, b) = (bytes_to_words(&want[0]), bytes_to_words(&got[0]));
        for r in 0..case.rows.len() {
            let (a, b) = (places(&a, &limits, r), places(&b, &limits, r));
            assert_eq!(a.len(), b.len(), "{what} row {r}");
            for (a, b) in a.iter().zip(&b) {
                assert_eq!((a[0], a[1], a[3]), (b[0], b[1], b[3]), "{what} row {r}");
                let close = (f32::from_bits(a[2]) - f32::from_bits(b[2])).abs() < 1e-3;
                assert!(close || a[1] & ring::LOGPROBS == 0, "{what} row {r}");
            }
        }
        for (table, (a, b)) in want[1..].iter().zip(&got[1..]).enumerate() {
            assert_eq!(bytes_to_words(a), bytes_to_words(b), "{what}, table {table}");
        }
    });
    counted
}

fn cpu_reference(case: &Case) -> Vec<u32> {
    let device = device::cpu::open(None, true).expect("a CPU");
    bytes_to_words(&run(&device, &|layout| build_sample(case, layout))[0])
}

#[test]
fn verified_drafts_agree_with_the_reference() {
    let mut tokens = 0;
    for seed in 0..30 {
        let penalties = [
            (param::PENALISED, 1),
            (param::REPETITION, float(1.3)),
            (param::FREQUENCY, float(0.4)),
            (param::PRESENCE, float(0.7)),
        ];
        let drawn = [(param::TEMPERATURE, float(0.8)), (param::TOP_K, 20)];
        let stops = [(param::STOPS, 1), (param::MIN_LEN, 20)];
        let n = seed as u32;
        let mut rows = vec![
            with(n, &[(param::LOGPROBS, 3)]),
            with(n + 1, &penalties),
            with(n + 2, &drawn),
            with(n + 3, &[(param::BIASES, 9), (param::TOP_P, float(0.9)), drawn[0]]),
            with(n + 4, &stops),
        ];
        rows.rotate_left(seed as usize % 5);
        rows.truncate(1 + seed as usize % 5);
        let logits = if seed % 2 == 0 { DType::F32 } else { DType::BF16 };
        let vocab = [1000, 5003, 9000][seed as usize % 3];
        tokens += check(&Case { seed, q_len: 2 + n % 8, rows, vocab, logits });
    }
    tokens += check(&Case {
        seed: 99,
        q_len: 4,
        rows: vec![neutral(1); 5],
        vocab: 64,
        logits: DType::F32,
    });
    assert!(tokens > 120, "{tokens} tokens");
}
