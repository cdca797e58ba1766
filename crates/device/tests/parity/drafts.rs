//! The drafter, and the sampler where it verifies drafts.

use crate::sample::{Params, float, neutral, with};
use crate::support::*;
use device::op::{Draft, DraftRows, Follow, Kept, Propose, Recall, Sample, Tap};
use device::step::{FeatureShape, MAX_BIASES, PARAM_WORDS, count, param, ring, row};
use device::{DType, Op, Span, StepLimits, StepState, Tensor};

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
        tables: 1,
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
fn histories(rng: &mut Rng, layout: &mut Layout, q_len: u32, each: u32) -> StepState {
    let mut limits = limits(50, q_len);
    limits.tokens = limits.tokens.max(ROWS as u32 * each);
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
    state
}

fn build_draft(seed: u64, layout: &mut Layout) -> (Vec<Op>, Vec<Span>) {
    let rng = &mut Rng::new(seed);
    let q_len = 2 + rng.below(8) as u32;
    let state = histories(rng, layout, q_len, 1);
    let drafts = state.row_drafts.expect("drafts").span;
    (vec![Op::Draft(Draft { state, rows: ROWS as u32, q_len })], vec![state.token.span, drafts])
}

/// What a model is fed that drafts, up to some draft of a step; logits with equal ones, NaN and nothing but NaN.
fn build_proposed(seed: u64, layout: &mut Layout) -> (Vec<Op>, Vec<Span>) {
    let rng = &mut Rng::new(seed);
    let q_len = 2 + rng.below(8) as u32;
    let (each, drafts, rows) = (1 + rng.below(3) as u32, q_len - 1, ROWS as u32);
    let behind = rng.below(2) as u32;
    let verified = histories(rng, layout, q_len, each);
    let verified = verified.with_drafting(|region, name, bytes| layout.alloc(region, name, bytes));
    let ids = rng.pick(&[None, Some(50)]);
    let shape = FeatureShape { token: 8, drafted: 8, dtype: DType::F32, ids };
    let verified =
        verified.with_features(shape, |region, name, bytes| layout.alloc(region, name, bytes));
    if let Some(ids) = verified.features.and_then(|features| features.ids) {
        let words: Vec<u32> = (0..50).map(|id| 49 - id).collect();
        layout.set(ids.span, words_to_bytes(&words));
    }
    let state = verified.exchanged().expect("tables of both");
    let mut ops = vec![Op::DraftRows(DraftRows { each, behind, state, rows, drafts })];
    for index in 0..rng.below(q_len as usize) as u32 {
        let vocab = rng.pick(&[1, 7, 50]);
        let mut values = rng.floats(ROWS * vocab, 2.0);
        for value in &mut values {
            *value = rng.pick(&[*value, *value, 1.5, -0.0, 0.0, f32::NEG_INFINITY, f32::NAN]);
        }
        values[..vocab].fill(rng.pick(&[f32::NAN, f32::NEG_INFINITY, -3.0]));
        let dtype = rng.pick(&[DType::F32, DType::BF16]);
        let logits = layout.floats(dtype, ROWS, vocab, rng.pick(&[0, 6]), &values);
        ops.push(Op::Propose(Propose { logits, behind, state, rows, index, drafts }));
    }
    let row_drafts = verified.row_drafts.expect("drafts");
    let tables = [state.q_start, state.kv_len, state.last_index, state.token, state.position];
    let tables = tables.into_iter().chain([state.kv_slot, state.token_row, verified.token]);
    let spans = tables.chain([row_drafts]).map(|table| table.span);
    // The split depends on the device.
    let counts = state.counts.span.part(4 * u64::from(count::ROWS), 12);
    (ops, spans.chain([counts]).collect())
}

#[test]
fn what_drafts_are_made_of_agrees_with_the_reference() {
    let mut drafted = 0;
    for seed in 0..80 {
        against_reference(&|layout| build_proposed(seed, layout), &|device, want, got| {
            for (table, (want, got)) in want.iter().zip(got).enumerate() {
                let (want, got) = (bytes_to_words(want), bytes_to_words(got));
                assert_eq!(want, got, "{seed} on {device}, table {table}");
            }
        });
        let cpu = device::cpu::open(None, true).expect("a CPU");
        let reference = run(&cpu, &|layout| build_proposed(seed, layout));
        drafted += bytes_to_words(&reference[8]).iter().sum::<u32>();
    }
    assert!(drafted > 100, "{drafted} drafts");
}

/// Hidden states of rows that feed several tokens, by what they kept of the step before; of which only some were accepted.
fn build_followed(seed: u64, layout: &mut Layout) -> (Vec<Op>, Vec<Span>) {
    let rng = &mut Rng::new(seed);
    let q_len = 1 + rng.below(4) as u32;
    let (limits, cols) = (limits(50, 5), 6);
    let dtype = rng.pick(&[DType::F32, DType::BF16]);
    // All at once, the part before something is made of the states, or the part after that.
    let part = rng.below(3);
    let width = if part == 0 { cols } else { 8 };
    let shape = FeatureShape { token: cols, drafted: width, dtype, ids: None };
    let verified = layout.state(limits);
    let verified = verified.with_drafting(|region, name, bytes| layout.alloc(region, name, bytes));
    let verified =
        verified.with_features(shape, |region, name, bytes| layout.alloc(region, name, bytes));
    let (features, state) =
        (verified.features.expect("states"), verified.exchanged().expect("both"));
    let live = 1 + rng.below(ROWS);
    set_rows(layout, &verified, live, &[row::SAMPLE; ROWS], q_len);
    let mut counts = vec![0u32; count::WORDS as usize];
    counts[count::ROWS as usize] = live as u32;
    counts[count::TOKENS as usize] = live as u32 * q_len;
    layout.set(verified.counts.span, words_to_bytes(&counts));
    let (seats, tokens) = (limits.seats as usize + 1, limits.tokens as usize);
    let mut lens = vec![0u32; seats];
    let mut last_len = vec![0u32; seats];
    let (mut position, mut rows) = (vec![0u32; tokens], vec![limits.rows; tokens]);
    for r in 0..live {
        let before = rng.pick(&[0, 1, 15, 16, 17, 200]);
        for j in 0..q_len {
            let at = (r as u32 * q_len + j) as usize;
            (position[at], rows[at]) = (before + j, r as u32);
        }
        lens[seat(r)] = before + 1 + rng.below(q_len as usize) as u32;
        last_len[seat(r)] = rng.pick(&[before, before, before + 3]);
    }
    layout.set(verified.seat_len.span, words_to_bytes(&lens));
    layout.set(features.last_len.span, words_to_bytes(&last_len));
    layout.set(verified.position.span, words_to_bytes(&position));
    layout.set(verified.token_row.span, words_to_bytes(&rows));
    let ids: Vec<u32> = (0..tokens).map(|_| rng.below(50) as u32).collect();
    layout.set(verified.token.span, words_to_bytes(&ids));
    let pages: Vec<u32> = (0..seats * 40).map(|at| 1 + at as u32 % 40).collect();
    layout.set(verified.page_table.span, words_to_bytes(&pages));
    let mut fill = |layout: &mut Layout, tensor: Tensor| {
        let values = rng.floats((tensor.rows * tensor.cols) as usize, 1.0);
        layout.set(tensor.span, encode(tensor.dtype, &values));
    };
    for tensor in [features.token, features.last, features.drafted] {
        fill(layout, tensor);
    }
    let y = layout.poison(dtype, tokens, if part == 2 { width } else { cols } as usize, 2);
    let own = layout.poison(dtype, ROWS, width as usize, 0);
    let again = layout.poison(dtype, ROWS, width as usize, 0);
    let made = rng.floats(tokens * width as usize, 1.0);
    let made = layout.floats(dtype, tokens, width as usize, 1, &made);
    let x = rng.floats(ROWS * 3, 1.0);
    let x = layout.floats(dtype, ROWS, 3, 1, &x);
    let ops = vec![
        Op::Follow(Follow { x: (part == 2).then_some(made), own: part == 1, y, state }),
        Op::Recall(Recall { drafted: false, y: again, state }),
        Op::Recall(Recall { drafted: true, y: own, state }),
        Op::Tap(Tap { x, to: Kept::Token(3), state }),
    ];
    let tables = [state.token, state.position, state.kv_slot, state.token_row, features.last_len];
    let values = [features.last, features.token, y, own, again];
    (ops, tables.into_iter().chain(values).map(|tensor| tensor.span).collect())
}

#[test]
fn hidden_states_that_are_kept_agree_with_the_reference() {
    for seed in 0..60 {
        against_reference(&|layout| build_followed(seed, layout), &|device, want, got| {
            for (table, (want, got)) in want.iter().zip(got).enumerate() {
                assert_eq!(want, got, "{seed} on {device}, table {table}");
            }
        });
    }
}

/// Two tokens of a row first, then one after the other: positions, slots, and drafts where the step that verifies reads them.
#[test]
fn a_row_is_fed_its_last_tokens_and_then_its_drafts() {
    let build = |layout: &mut Layout| {
        let limits = limits(50, 3);
        let verified = layout.state(limits);
        let verified =
            verified.with_drafting(|region, name, bytes| layout.alloc(region, name, bytes));
        let state = verified.exchanged().expect("tables of both");
        set_rows(layout, &verified, 1, &[row::SAMPLE | 2 << row::DRAFTS, 0, 0, 0, 0], 3);
        let (seats, context) = (limits.seats as usize + 1, limits.context() as usize);
        let mut lens = vec![0u32; seats];
        let mut pages = vec![0u32; seats * 40];
        let mut history = vec![0u32; seats * context];
        lens[seat(0)] = 16;
        (pages[seat(0) * 40], pages[seat(0) * 40 + 1]) = (7, 9);
        (history[seat(0) * context + 15], history[seat(0) * context + 16]) = (21, 22);
        layout.set(verified.seat_len.span, words_to_bytes(&lens));
        layout.set(verified.page_table.span, words_to_bytes(&pages));
        layout.set(verified.history.expect("a history").span, words_to_bytes(&history));
        layout.set(verified.token.span, words_to_bytes(&[22; 15]));
        let mut logits = vec![0.0; ROWS * 50];
        (logits[31], logits[33]) = (4.0, 4.0);
        let logits = layout.floats(DType::F32, ROWS, 50, 0, &logits);
        let rows = ROWS as u32;
        let ops = vec![
            Op::DraftRows(DraftRows { each: 2, behind: 0, state, rows, drafts: 2 }),
            Op::Propose(Propose { logits, behind: 0, state, rows, index: 0, drafts: 2 }),
        ];
        let tables = [state.token, state.position, state.kv_slot, state.kv_len, verified.token];
        (ops, tables.map(|table| table.span).to_vec())
    };
    let cpu = device::cpu::open(None, true).expect("a CPU");
    let words: Vec<Vec<u32>> =
        run(&cpu, &build).iter().map(|bytes| bytes_to_words(bytes)).collect();
    assert_eq!(words[0][..2], [31, 0], "the lower of two equal ones, then a pad row");
    assert_eq!((words[1][0], words[2][0], words[3][0]), (17, 9 * 16 + 1, 18));
    assert_eq!(words[4][..3], [22, 31, 22]);
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
