//! The sampler: greedy, filters, penalties, biases, masks, log-probabilities.

use crate::support::*;
use device::op::Sample;
use device::step::{MAX_BIASES, MAX_TOP, PARAM_WORDS, count, mail, param, ring, row};
use device::{DType, Op, Span, StepLimits};

const VOCAB: usize = 1000;
const ROWS: usize = 6;

fn limits(vocab: usize, tokens_per_row: u32) -> StepLimits {
    StepLimits {
        seats: ROWS as u32,
        rows: ROWS as u32,
        tokens: 64,
        pages_per_seat: 4,
        page_size: 16,
        vocab: vocab as u32,
        penalties: true,
        tokens_per_row,
        tables: 1,
    }
}

/// A row's parameters: word offsets and values of its parameter record.
pub(crate) type Params = Vec<(u32, u32)>;

struct Case {
    seed: u64,
    rows: Vec<Params>,
    logits: DType,
    scale: f32,
    masked: bool,
    vocab: usize,
    places: u32,
}

fn build(case: &Case, layout: &mut Layout) -> (Vec<Op>, Vec<Span>) {
    let rng = &mut Rng::new(case.seed);
    let (limits, vocab) = (limits(case.vocab, case.places), case.vocab);
    let state = layout.state(limits);
    let live = case.rows.len();
    let mut counts = vec![0u32; count::WORDS as usize];
    counts[count::LAUNCH_LO as usize] = 11;
    counts[count::ROWS as usize] = live as u32;
    layout.set(state.counts.span, words_to_bytes(&counts));
    let mut params = vec![0u32; (ROWS + 1) * PARAM_WORDS as usize];
    let mut biases = vec![0u32; (ROWS + 1) * 2 * MAX_BIASES as usize];
    let mut seen = vec![0u32; (ROWS + 1) * vocab];
    let seat = |r: usize| (r + 2) % ROWS;
    for (r, words) in case.rows.iter().enumerate() {
        let at = seat(r) * PARAM_WORDS as usize;
        for (word, value) in words {
            params[at + *word as usize] = *value;
        }
        for i in 0..params[at + param::BIASES as usize] as usize {
            let at = 2 * (seat(r) * MAX_BIASES as usize + i);
            biases[at] = rng.below(vocab) as u32;
            biases[at + 1] = (rng.float() * 4.0).to_bits();
        }
        for _ in 0..100 {
            let count = rng.below(4) as u32;
            seen[seat(r) * vocab + rng.below(vocab)] = 1 << 31 | count;
        }
    }
    layout.set(state.params.span, words_to_bytes(&params));
    layout.set(state.biases.span, words_to_bytes(&biases));
    if let Some(table) = &state.seen {
        layout.set(table.span, words_to_bytes(&seen));
    }
    let flags = row::SAMPLE | if case.masked { row::MASKED } else { 0 };
    let mut row_seat = vec![ROWS as u32; ROWS];
    let (mut row_flags, mut q_len, mut lens) = (vec![0; ROWS], vec![0; ROWS], vec![0; ROWS + 1]);
    for r in 0..live {
        row_seat[r] = seat(r) as u32;
        row_flags[r] = flags;
        q_len[r] = 1 + r as u32;
        lens[seat(r)] = 5 + case.seed as u32 + r as u32;
    }
    layout.set(state.row_seat.span, words_to_bytes(&row_seat));
    layout.set(state.row_flags.span, words_to_bytes(&row_flags));
    layout.set(state.row_q_len.span, words_to_bytes(&q_len));
    layout.set(state.seat_len.span, words_to_bytes(&lens));
    if case.masked {
        let areas = limits.mail_layout();
        let mut bank = vec![0u32; areas.words as usize];
        bank[mail::LAUNCH_LO as usize] = 11;
        bank[mail::MASKS as usize] = 1;
        let masks = areas.masks as usize..(areas.masks + limits.rows * areas.mask_words) as usize;
        bank[masks].iter_mut().for_each(|word| *word = rng.next() as u32 & rng.next() as u32);
        layout.set(state.mail[1], words_to_bytes(&bank));
    }
    let values = rng.floats(ROWS * vocab, case.scale);
    let logits = layout.floats(case.logits, ROWS, vocab, 0, &values);
    let outs = vec![
        state.ring,
        state.seat_len.span,
        state.seat_token.span,
        state.seen.map_or(state.ring, |seen| seen.span),
    ];
    (vec![Op::Sample(Sample { logits, state, scratch: None, rows: ROWS as u32, q_len: 1 })], outs)
}

/// Tokens, flags, lengths and counts are equal; log-probabilities are close.
fn check(case: &Case) {
    against_reference(&|layout| build(case, layout), &|device, want, got| {
        let what = format!("seed {} on {device}", case.seed);
        for (want, got) in want[1..].iter().zip(&got[1..]) {
            assert_eq!(bytes_to_words(want), bytes_to_words(got), "{what}");
        }
        let limits = limits(case.vocab, case.places);
        let entry = limits.ring_entry_words() as usize * (11 % ring::ENTRIES) as usize;
        let (want, got) = (bytes_to_words(&want[0]), bytes_to_words(&got[0]));
        assert_eq!(want[entry..entry + 3], got[entry..entry + 3], "{what}");
        for r in 0..case.rows.len() {
            let row = limits.ring_row_words();
            let at = entry + (ring::HEADER_WORDS + r as u32 * row) as usize;
            if want[at + 1] & ring::SAMPLED != 0 && case.places > 1 {
                let next = at + ring::PLACE_WORDS as usize + 1;
                assert_eq!(
                    (want[next], got[next]),
                    (0, 0),
                    "{what} row {r}: a list without an end"
                );
            }
            assert_eq!(want[at..at + 2], got[at..at + 2], "{what} row {r}");
            if want[at + 1] & ring::LOGPROBS == 0 {
                continue;
            }
            let close = |i: usize| {
                let (a, b) = (f32::from_bits(want[i]), f32::from_bits(got[i]));
                let close = a == b || (a - b).abs() < 1e-4;
                assert!(close, "{what} row {r}: log-probability {b}, not {a}");
            };
            close(at + 2);
            let asked = case.rows[r].iter().find(|(word, _)| *word == param::LOGPROBS);
            let count = asked.map_or(0, |(_, n)| n - 1).min(MAX_TOP) as usize;
            for i in 0..count {
                assert_eq!(want[at + 4 + 2 * i], got[at + 4 + 2 * i], "{what} row {r} top {i}");
                close(at + 5 + 2 * i);
            }
        }
    });
}

pub(crate) fn float(value: f32) -> u32 {
    value.to_bits()
}

/// All filters off.
pub(crate) fn neutral(seed: u32) -> Params {
    vec![
        (param::TOP_P, float(1.0)),
        (param::REPETITION, float(1.0)),
        (param::SEED_LO, seed.wrapping_mul(0x9E37_79B9)),
        (param::SEED_HI, seed),
    ]
}

pub(crate) fn with(seed: u32, more: &[(u32, u32)]) -> Params {
    let mut params = neutral(seed);
    params.extend_from_slice(more);
    params
}

#[test]
fn greedy_with_penalties_biases_and_stops() {
    for seed in 0..6 {
        let penalties = [
            (param::PENALISED, 1),
            (param::REPETITION, float(1.3)),
            (param::FREQUENCY, float(0.4)),
            (param::PRESENCE, float(0.7)),
        ];
        let stops =
            [(param::MIN_LEN, 9), (param::STOPS, 2), (param::STOP, 3), (param::STOP + 1, 999)];
        let rows = vec![
            neutral(1),
            with(2, &penalties),
            with(3, &[(param::BIASES, 40)]),
            with(4, &stops),
            with(5, &[(param::LOGPROBS, 1)]),
            with(6, &[(param::LOGPROBS, 21), (param::BIASES, 7)]),
        ];
        for logits in [DType::F32, DType::BF16] {
            check(&Case {
                seed,
                rows: rows.clone(),
                logits,
                scale: 6.0,
                masked: seed % 2 == 1,
                vocab: VOCAB,
                places: 1 + seed as u32 % 3,
            });
        }
    }
}

/// Asks for the log-probabilities of what is drawn from.
fn of_drawn(mut params: Params) -> Params {
    params.retain(|(word, _)| *word != param::LOGPROBS);
    params.extend([(param::LOGPROBS, 21), (param::SAMPLED_LOGPROBS, 1)]);
    params
}

#[test]
fn draws_agree_with_the_reference() {
    for seed in 0..24 {
        let temperature = |t: f32| (param::TEMPERATURE, float(t));
        let rows = vec![
            with(seed as u32, &[temperature(1.0)]),
            with(seed as u32 + 1, &[temperature(0.7), (param::TOP_K, 40)]),
            with(seed as u32 + 2, &[temperature(1.3), (param::TOP_P, float(0.9))]),
            with(seed as u32 + 3, &[temperature(0.9), (param::MIN_P, float(0.05))]),
            with(
                seed as u32 + 4,
                &[
                    temperature(0.8),
                    (param::TOP_K, 50),
                    (param::TOP_P, float(0.8)),
                    (param::MIN_P, float(0.02)),
                    (param::LOGPROBS, 6),
                ],
            ),
            with(seed as u32 + 5, &[temperature(3.0), (param::TOP_P, float(0.99999))]),
        ];
        let rows = match seed % 2 {
            0 => rows,
            // The distribution that is drawn from, all of it and what filters leave.
            _ => rows.into_iter().map(of_drawn).collect(),
        };
        let scale = [2.0, 12.0, 40.0][seed as usize % 3];
        let masked = seed % 4 == 3;
        check(&Case { seed, rows, logits: DType::F32, scale, masked, vocab: VOCAB, places: 1 });
    }
}

/// Large vocabularies: filters that end near the likeliest token, far from it, and among more equal logits than any
/// list of candidates holds.
#[test]
fn draws_agree_over_large_vocabularies() {
    for (seed, vocab) in (0..18).zip([9000, 33_000, 5003].into_iter().cycle()) {
        let draw = |row: u32, temperature: f32, more: &[(u32, u32)]| {
            let mut words = vec![(param::TEMPERATURE, float(temperature))];
            words.extend_from_slice(more);
            with(seed as u32 * 8 + row, &words)
        };
        let top_p = |p: f32| (param::TOP_P, float(p));
        let rows = vec![
            draw(0, 1.0, &[]),
            draw(1, 0.6, &[(param::TOP_K, 20), top_p(0.95)]),
            draw(2, 1.0, &[top_p(0.9)]),
            draw(3, 1.0, &[(param::TOP_K, 3000), (param::MIN_P, float(0.01))]),
            draw(4, 2.0, &[top_p(0.3)]),
            draw(5, 1.0, &[(param::TOP_K, 3), top_p(0.5), (param::BIASES, 5)]),
        ];
        let scale = [3.0, 0.0, 1.0, 12.0, 0.1, 30.0][seed as usize / 3];
        let logits = if seed % 2 == 0 { DType::BF16 } else { DType::F32 };
        check(&Case { seed, rows, logits, scale, masked: seed % 5 == 4, vocab, places: 1 });
    }
}

/// Ties go to the lowest index, on every device.
#[test]
fn greedy_ties_take_the_lowest_index() {
    let case = |layout: &mut Layout| {
        let one = Case {
            seed: 0,
            rows: vec![neutral(1)],
            logits: DType::F32,
            scale: 0.0,
            masked: false,
            vocab: VOCAB,
            places: 1,
        };
        let (ops, outs) = build(&one, layout);
        (ops, vec![outs[2]])
    };
    for (name, device) in devices() {
        let tokens = bytes_to_words(&run(&device, &case)[0]);
        assert_eq!(tokens[2], 0, "{name}");
    }
}

/// Over many seeds, drawn frequencies follow the distribution (a χ² of 9 degrees, far below 40).
#[test]
fn draws_follow_the_distribution() {
    let device = device::cpu::open(Some(1), false).expect("a CPU");
    let mut drawn = [0u32; 10];
    for seed in 0..200u32 {
        let out = run(&device, &|layout: &mut Layout| {
            let rows = (0..ROWS as u32)
                .map(|r| with(seed * 64 + r, &[(param::TEMPERATURE, float(1.0))]))
                .collect();
            let case = Case {
                seed: 1,
                rows,
                logits: DType::F32,
                scale: 0.0,
                masked: false,
                vocab: VOCAB,
                places: 1,
            };
            let (ops, outs) = build(&case, layout);
            (ops, vec![outs[2]])
        });
        bytes_to_words(&out[0])[..ROWS].iter().for_each(|t| drawn[*t as usize / 100] += 1);
    }
    let mean = drawn.iter().sum::<u32>() as f32 / 10.0;
    let chi: f32 = drawn.iter().map(|n| (*n as f32 - mean).powi(2) / mean).sum();
    assert!(chi < 40.0, "{drawn:?}");
}
