//! Recurrent layers where rows have drafts: what they leave is what the accepted tokens leave, to the bit.

use crate::attention::Row;
use crate::recurrent::{Heads, Rows, SEATS};
use crate::support::*;
use device::op::{Conv, Copy, Prologue, Scan};
use device::step::{JOIN_WORDS, count, mail, row};
use device::{DType, Op, Region, Span, StepLimits, Tensor};

/// Tokens of each sequence.
const TOKENS: usize = 40;
/// Taps of the convolution.
const TAPS: usize = 4;

/// What a sequence feeds in a step: tokens, of which the last are rejected drafts; a chunk of a prompt; or nothing.
#[derive(Clone, Copy, Debug)]
enum Feeds {
    Drafts { accepted: usize },
    Chunk(usize),
    Nothing,
}

/// A step of two sequences. Where one has drafts, both have as many tokens.
#[derive(Clone, Debug)]
struct Fed {
    feeds: [Feeds; 2],
    q_len: usize,
}

/// Steps that feed both sequences to their end.
fn steps(rng: &mut Rng, drafts: usize) -> Vec<Fed> {
    let (mut at, mut steps) = ([0; 2], Vec::new());
    while at.iter().any(|&at| at < TOKENS) {
        let verifies = rng.below(3) > 0 && at.iter().all(|&at| at > 0);
        let q_len = if verifies { 2 + rng.below(drafts) } else { 1 };
        let mut feed = |s: usize| {
            let left = TOKENS - at[s];
            if left == 0 || rng.below(6) == 0 {
                return Feeds::Nothing;
            }
            match verifies {
                true => Feeds::Drafts { accepted: 1 + rng.below(q_len.min(left)) },
                // Often a single token: a step without drafts behind one with some.
                false => Feeds::Chunk(rng.pick(&[1, 1, 1, 2, 9]).min(left)),
            }
        };
        let feeds = [feed(0), feed(1)];
        for (at, feeds) in at.iter_mut().zip(feeds) {
            *at += match feeds {
                Feeds::Drafts { accepted } => accepted,
                Feeds::Chunk(count) => count,
                Feeds::Nothing => 0,
            };
        }
        steps.push(Fed { feeds, q_len });
    }
    steps
}

/// The seat of a sequence.
fn seat(s: usize) -> usize {
    3 + 2 * s
}

/// Part of a matrix's rows.
fn part(tensor: &Tensor, from: usize, count: usize) -> Tensor {
    let bytes = tensor.dtype.bytes(tensor.stride as usize) as u64;
    let span = tensor.span.part(from as u64 * bytes, count as u64 * bytes);
    Tensor { span, rows: count as u32, ..*tensor }
}

fn copied(from: Tensor, to: Tensor) -> Op {
    Op::from(Copy { from: from.span, to: to.span })
}

/// A convolution and a scan over two sequences, in steps.
struct Run {
    heads: Heads,
    drafts: usize,
    plant: Plant,
}

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Plant {
    None,
    /// States hold rejected drafts.
    Keep,
    /// An accepted draft is not taken from the log.
    Forget,
}

impl Run {
    fn nan(&self, layout: &mut Layout, dtype: DType, cols: usize) -> Tensor {
        let bytes = encode(dtype, &vec![f32::NAN; SEATS * cols]);
        let span = layout.bytes(Region::Kv, "carry", bytes);
        Tensor::dense(span, dtype, SEATS as u32, cols as u32)
    }

    /// The ops of all steps; results of accepted tokens, then the matrices of both seats.
    fn build(&self, layout: &mut Layout, steps: &[Fed], seed: u64) -> (Vec<Op>, Vec<Span>) {
        let (rng, heads, drafts) = (&mut Rng::new(seed), self.heads, self.drafts);
        let channels = heads.cols();
        let all = rng.floats(2 * TOKENS * channels, 2.0);
        let all = layout.floats(heads.x, 2 * TOKENS, channels, 0, &all);
        let wrong = match self.plant {
            Plant::Keep => rng.floats(16 * channels, 2.0),
            Plant::None | Plant::Forget => vec![f32::NAN; 16 * channels],
        };
        let wrong = layout.floats(heads.x, 16, channels, 0, &wrong);
        let w = rng.floats(channels * TAPS, 1.0);
        let w = layout.floats(DType::F32, channels, TAPS, 0, &w);
        let kept = self.nan(layout, heads.x, channels * (TAPS - 1 + drafts));
        let log = if drafts > 0 { (2 * drafts + 1) * heads.log() } else { 0 };
        let carry = self.nan(layout, DType::F32, heads.states() + log);
        let scan = heads.scan(layout, rng, all, carry);
        let (mut ops, mut at, mut settled) = (Vec::new(), [0; 2], [0; 2]);
        for fed in steps {
            let row = |s: usize| match fed.feeds[s] {
                Feeds::Drafts { accepted } => Some((fed.q_len, accepted)),
                Feeds::Chunk(count) => Some((count, count)),
                Feeds::Nothing => None,
            };
            let live: Vec<_> = (0..2)
                .filter_map(|s| row(s).map(|(q_len, true_ones)| (s, q_len, true_ones)))
                .collect();
            let tokens: usize = live.iter().map(|row| row.1).sum();
            if tokens == 0 {
                continue;
            }
            let single = tokens == live.len();
            let few = Rows::few(
                live.iter().map(|&(s, q_len, _)| Row { q_len, kv_len: at[s] + q_len }).collect(),
                live.iter().map(|&(s, ..)| seat(s)).collect(),
                single,
            );
            let replay = live.iter().map(|&(s, ..)| at[s] - settled[s]).collect();
            let rows = Rows { drafts, q_len: fed.q_len, replay, ..few };
            let state = rows.tables(layout);
            let (x, c) = [0; 2].map(|_| layout.poison(heads.x, tokens, channels, 0)).into();
            let gates = layout.poison(heads.x, tokens, scan.gates.cols as usize, 0);
            let y = layout.poison(heads.x, tokens, scan.y.cols as usize, 0);
            let (mut to, mut made) = (0, Vec::new());
            for &(s, q_len, true_ones) in &live {
                let from = s * TOKENS + at[s];
                ops.push(copied(part(&all, from, true_ones), part(&x, to, true_ones)));
                let same = part(&scan.gates, from, true_ones);
                ops.push(copied(same, part(&gates, to, true_ones)));
                if q_len > true_ones {
                    let (first, count) = (to + true_ones, q_len - true_ones);
                    ops.push(copied(part(&wrong, 0, count), part(&x, first, count)));
                    let other = part(&scan.gates, 0, count);
                    ops.push(copied(other, part(&gates, first, count)));
                }
                made.push(copied(part(&y, to, true_ones), part(&scan.y, from, true_ones)));
                to += q_len;
                let drafts = matches!(fed.feeds[s], Feeds::Drafts { .. });
                settled[s] = at[s] + if drafts { 1 } else { q_len };
                at[s] += true_ones;
                match self.plant {
                    Plant::None => {}
                    Plant::Keep => settled[s] = at[s],
                    Plant::Forget => settled[s] = (settled[s] + 1).min(at[s]),
                }
            }
            let q_len = if self.plant == Plant::Keep { 1 } else { fed.q_len as u32 };
            let bucket = rows.bucket_rows as u32;
            let (from, bias) = (0, None);
            let conv =
                Conv { x, from, w, bias, carry: kept, y: c, state, rows: bucket, single, q_len };
            let own = Scan { x: c, gates, y, state, rows: bucket, single, q_len, ..scan.clone() };
            ops.extend([Op::from(conv), Op::from(own)]);
            ops.extend(made);
        }
        let matrices = |s: usize| {
            let bytes = carry.dtype.bytes(heads.states()) as u64;
            part(&carry, seat(s), 1).span.part(0, bytes)
        };
        (ops, vec![scan.y.span, matrices(0), matrices(1)])
    }
}

/// A last step without drafts, so that matrices hold all tokens.
fn settled(mut steps: Vec<Fed>) -> Vec<Fed> {
    let mut at = [0; 2];
    let mut last = [None; 2];
    for (index, fed) in steps.iter().enumerate() {
        for s in 0..2 {
            let before = at[s];
            at[s] += match fed.feeds[s] {
                Feeds::Drafts { accepted } => accepted,
                Feeds::Chunk(count) => count,
                Feeds::Nothing => 0,
            };
            if before < TOKENS && at[s] == TOKENS {
                last[s] = Some(index);
            }
        }
    }
    for (s, index) in last.into_iter().enumerate() {
        let feeds = &mut steps[index.expect("an end")].feeds[s];
        let Feeds::Drafts { accepted } = *feeds else { continue };
        *feeds = match accepted {
            1 => Feeds::Nothing,
            more => Feeds::Drafts { accepted: more - 1 },
        };
        let mut own = [Feeds::Nothing; 2];
        own[s] = Feeds::Chunk(1);
        steps.push(Fed { feeds: own, q_len: 1 });
    }
    steps
}

/// Forty tokens of two sequences with drafts that are wrong, all, some or none of them, in steps with drafts, without and of
/// prompts: results and matrices are those of single tokens, and nothing of a wrong draft, which is NaN, is left.
#[test]
fn rejected_drafts_leave_nothing() {
    for seed in 0..24 {
        let rng = &mut Rng::new(8000 + seed);
        let heads = Heads { delta: seed % 2 == 0, ..Heads::random(rng) };
        let drafts = rng.pick(&[1, 2, 3, 8]);
        let steps = settled(steps(rng, drafts));
        let each = Fed { feeds: [Feeds::Chunk(1); 2], q_len: 1 };
        for (name, device) in devices() {
            let plain = Run { heads, drafts: 0, plant: Plant::None };
            let want =
                run(&device, &|layout| plain.build(layout, &vec![each.clone(); TOKENS], seed));
            let with = Run { heads, drafts, plant: Plant::None };
            let got = run(&device, &|layout| with.build(layout, &steps, seed));
            assert!(want == got, "seed {seed}: {heads:?}, {drafts} drafts on {name}, {steps:?}");
        }
    }
}

/// Planted bugs: states hold what was rejected, or lack what was accepted. The comparison above must find both.
#[test]
fn wrong_drafts_in_states_are_found() {
    for seed in 0..6 {
        let rng = &mut Rng::new(9000 + seed);
        let heads = Heads { delta: seed % 2 == 0, ..Heads::random(rng) };
        let each = Feeds::Drafts { accepted: 2 };
        let mut steps = vec![Fed { feeds: [Feeds::Chunk(4); 2], q_len: 1 }];
        steps.extend(vec![Fed { feeds: [each; 2], q_len: 4 }; 5]);
        let rest = Feeds::Chunk(TOKENS - 14);
        steps.push(Fed { feeds: [rest; 2], q_len: 1 });
        for (name, device) in devices() {
            let run_with = |plant: Plant| {
                let with = Run { heads, drafts: 3, plant };
                run(&device, &|layout| with.build(layout, &steps, seed))
            };
            let good = run_with(Plant::None);
            for plant in [Plant::Keep, Plant::Forget] {
                assert!(run_with(plant) != good, "{plant:?}, seed {seed} on {name}");
            }
        }
    }
}

/// The prologue notes what recurrent layers take from their logs: as many tokens as were accepted beside the first, none after a
/// prompt, a step without drafts or a join; where rows have no room it settles nothing.
#[test]
fn what_is_replayed_follows_what_was_accepted() {
    const SEATS: u32 = 4;
    let limits = StepLimits {
        seats: SEATS,
        rows: 4,
        tokens: 32,
        pages_per_seat: 4,
        page_size: 8,
        vocab: 32,
        penalties: false,
        tokens_per_row: 4,
        tables: 1,
    };
    // Seats' lengths, those in their states, then rows: seat, tokens, flags; what is expected of rows and seats.
    let (lens, done) = ([9, 10, 30, 5, 0], [9, 8, 28, 5, 0]);
    let rows = [(1, 4, row::SAMPLE), (0, 4, row::SAMPLE), (2, 4, row::SAMPLE)];
    let prompt = row::SAMPLE | row::PROMPT;
    let mixed = [(1, 1, row::SAMPLE), (3, 6, prompt), (0, 1, row::SAMPLE)];
    let join = (0, 16);
    let cases = [
        (&rows[..], None, [2, 0, 2], [10, 11, 28, 5, 0]),
        (&mixed[..], None, [2, 0, 0], [10, 11, 28, 11, 0]),
        (&mixed[..], Some(join), [2, 0, 0], [17, 11, 28, 11, 0]),
    ];
    for (rows, join, replays, settles) in cases {
        let build = |layout: &mut Layout| {
            let state = layout.state(limits);
            let areas = limits.mail_layout();
            let mut bank = vec![0u32; areas.words as usize];
            bank[mail::LAUNCH_LO as usize] = 1;
            bank[mail::ROWS_CHANGED as usize] = 1;
            bank[mail::ROWS as usize] = rows.len() as u32;
            for (i, (seat, q_len, flags)) in rows.iter().enumerate() {
                let at = areas.rows as usize + 3 * i;
                bank[at..at + 3].copy_from_slice(&[*seat, *q_len, *flags]);
            }
            if let Some((seat, len)) = join {
                bank[mail::JOINS as usize] = 1;
                let at = areas.joins as usize;
                bank[at..at + JOIN_WORDS as usize].fill(0);
                bank[at..at + 2].copy_from_slice(&[seat, len]);
            }
            let settled = state.settled.expect("drafts");
            let replay = state.row_replay.expect("drafts");
            layout.set(state.mail[1], words_to_bytes(&bank));
            layout.set(state.seat_len.span, words_to_bytes(&lens));
            layout.set(settled.span, words_to_bytes(&done));
            layout.set(replay.span, words_to_bytes(&[77; 4]));
            layout.set(state.counts.span, words_to_bytes(&[0; count::WORDS as usize]));
            let op = Prologue { state, rows: 4, tokens: 32, pages: 9, given: None };
            (vec![Op::from(op)], vec![replay.span, settled.span])
        };
        let wanted = vec![[&replays[..], &[0]].concat(), settles.to_vec()];
        against_reference(&build, &|device, want, got| {
            for found in [want, got] {
                let found: Vec<_> = found.iter().map(|bytes| bytes_to_words(bytes)).collect();
                assert_eq!(found, wanted, "on {device}");
            }
        });
    }
}
