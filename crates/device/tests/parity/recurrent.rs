//! Recurrent layers: convolutions, matrices that are carried from token to token, gates. Seats of sequences that begin
//! hold NaN, so a read of what a seat carried before is noticed; seats without a row hold numbers that must stay. Where rows
//! have drafts, inputs and log entries of tokens that were rejected are NaN.

use crate::attention::Row;
use crate::support::*;
use device::op::{Conv, Fused, FusedKernel, Gate, Gated, GatedNorm, LinearChain, Norm, Rule, Scan};
use device::step::count;
use device::variant::{Pick, ScanVariant};
use device::{DType, Op, Region, Span, StepLimits, StepState, Tensor};

/// Which rows a step has, and of which seats.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    pub(crate) rows: Vec<Row>,
    pub(crate) seats: Vec<usize>,
    pub(crate) bucket_rows: usize,
    pub(crate) bucket_tokens: usize,
    pub(crate) single: bool,
    /// Drafts that rows may have in any step.
    pub(crate) drafts: usize,
    /// Tokens of each row, if they have drafts; else 1.
    pub(crate) q_len: usize,
    /// Accepted drafts that each row takes from the log.
    pub(crate) replay: Vec<usize>,
}

/// Seats of a device in these tests.
pub(crate) const SEATS: usize = 9;

impl Rows {
    /// Of every third seed rows have one token, of others drafts.
    fn random(rng: &mut Rng, seed: u64) -> Rows {
        let (single, verifies) = (seed.is_multiple_of(3), seed % 3 == 1);
        let count = rng.pick(&[1, 2, 5, 7]);
        let drafts = if verifies { rng.pick(&[1, 3, 8]) } else { rng.pick(&[0, 0, 1, 8]) };
        let q_len = if verifies { 2 + rng.below(drafts) } else { 1 };
        let row = |rng: &mut Rng| {
            let tokens = rng.pick(&[1, 2, 3, 16, 17, 33, 40]);
            let q_len = if single || verifies { q_len } else { tokens };
            Row { q_len, kv_len: q_len + rng.pick(&[0, 0, 1, 2, 30]) }
        };
        let rows: Vec<Row> = (0..count).map(|_| row(rng)).collect();
        let before = |row: &Row| row.kv_len - row.q_len;
        let replay = rows.iter().map(|row| rng.below(drafts.min(before(row)) + 1)).collect();
        let live: usize = rows.iter().map(|row| row.q_len).sum();
        // Seats in reverse, with gaps.
        let seats = (0..count).map(|r| SEATS - 1 - r).collect();
        let bucket_rows = count + rng.below(3);
        let bucket_tokens = match (single, verifies) {
            (true, _) => bucket_rows,
            (_, true) => bucket_rows * q_len,
            _ => live + rng.below(20),
        };
        Rows { rows, seats, bucket_rows, bucket_tokens, single, drafts, q_len, replay }
    }

    /// Just these rows, without drafts.
    pub(crate) fn few(rows: Vec<Row>, seats: Vec<usize>, single: bool) -> Rows {
        let bucket_tokens = rows.iter().map(|row| row.q_len).sum::<usize>().max(1);
        let (bucket_rows, replay) = (rows.len().max(1), vec![0; rows.len()]);
        Rows { rows, seats, bucket_rows, bucket_tokens, single, drafts: 0, q_len: 1, replay }
    }

    fn live(&self) -> usize {
        self.rows.iter().map(|row| row.q_len).sum()
    }

    pub(crate) fn tables(&self, layout: &mut Layout) -> StepState {
        let state = layout.state(StepLimits {
            seats: SEATS as u32,
            rows: self.bucket_rows as u32,
            tokens: self.bucket_tokens as u32,
            pages_per_seat: 8,
            page_size: 16,
            vocab: 32,
            penalties: false,
            tokens_per_row: self.drafts as u32 + 1,
            tables: 1,
        });
        let mut row_seat = vec![SEATS as u32; self.bucket_rows];
        let mut kv_len = vec![0u32; self.bucket_rows];
        let mut q_start = vec![self.live() as u32; self.bucket_rows + 1];
        let mut token_row = vec![self.bucket_rows as u32; self.bucket_tokens];
        let mut token = 0;
        for (r, row) in self.rows.iter().enumerate() {
            (row_seat[r], kv_len[r]) = (self.seats[r] as u32, row.kv_len as u32);
            q_start[r] = token as u32;
            token_row[token..token + row.q_len].fill(r as u32);
            token += row.q_len;
        }
        let mut counts = vec![0u32; count::WORDS as usize];
        counts[count::ROWS as usize] = self.rows.len() as u32;
        counts[count::TOKENS as usize] = self.live() as u32;
        let tables: [(&Tensor, &[u32]); 5] = [
            (&state.row_seat, &row_seat),
            (&state.kv_len, &kv_len),
            (&state.q_start, &q_start),
            (&state.token_row, &token_row),
            (&state.counts, &counts),
        ];
        tables.into_iter().for_each(|(to, words)| layout.set(to.span, words_to_bytes(words)));
        if let Some(table) = state.row_replay {
            let mut words: Vec<u32> = self.replay.iter().map(|count| *count as u32).collect();
            words.resize(self.bucket_rows, 0);
            layout.set(table.span, words_to_bytes(&words));
        }
        state
    }

    /// States of all seats: `cols` elements and `places` in turns with `each` for a token's position. NaN where a sequence begins,
    /// and in places of tokens that are not among the last ones: as many as a row's `recent`.
    #[allow(clippy::too_many_arguments, reason = "what a state is made of")]
    fn carry(
        &self,
        layout: &mut Layout,
        rng: &mut Rng,
        dtype: DType,
        cols: usize,
        (places, each): (usize, usize),
        recent: impl Fn(usize) -> usize,
    ) -> Tensor {
        let (ring, cols) = (cols, cols + places * each);
        let mut values = rng.floats(SEATS * cols, 1.0);
        for (r, (row, &seat)) in self.rows.iter().zip(&self.seats).enumerate() {
            let before = row.kv_len - row.q_len;
            let own = &mut values[seat * cols..][..cols];
            if before == 0 {
                own.fill(f32::NAN);
                continue;
            }
            let known: Vec<usize> =
                (before.saturating_sub(recent(r))..before).map(|at| at % places).collect();
            for place in (0..places).filter(|place| !known.contains(place)) {
                own[ring + place * each..][..each].fill(f32::NAN);
            }
        }
        let span = layout.bytes(Region::Kv, "carry", encode(dtype, &values));
        Tensor::dense(span, dtype, SEATS as u32, cols as u32)
    }

    /// Rows of numbers for live tokens, NaN for pads.
    fn values(
        &self,
        layout: &mut Layout,
        rng: &mut Rng,
        dtype: DType,
        cols: usize,
        gap: usize,
    ) -> Tensor {
        let mut values = rng.floats(self.bucket_tokens * cols, 2.0);
        values[self.live() * cols..].fill(f32::NAN);
        layout.floats(dtype, self.bucket_tokens, cols, gap, &values)
    }
}

/// The bytes of live tokens.
fn live_part(y: &Tensor, live: usize) -> Span {
    y.span.part(0, y.dtype.bytes(live * y.stride as usize) as u64)
}

const ANY: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn convolutions() {
    for seed in 0..24 {
        let rng = &mut Rng::new(3000 + seed);
        let rows = Rows::random(rng, seed);
        let (channels, taps) = (rng.pick(&[8, 40, 250, 600]), rng.pick(&[2, 3, 4, 4, 8]));
        let (x_type, y_type) = (rng.pick(&ANY), rng.pick(&ANY));
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(seed);
            let state = rows.tables(layout);
            let (from, behind, gap) = (8 * rng.below(3), 8 * rng.below(2), 8 * rng.below(2));
            let x = rows.values(layout, rng, x_type, from + channels + behind, gap);
            let w =
                layout.floats(rng.pick(&ANY), channels, taps, 0, &rng.floats(channels * taps, 1.0));
            let bias = rng.floats(channels, 1.0);
            let bias =
                (rng.below(2) == 0).then(|| layout.floats(DType::F32, 1, channels, 0, &bias));
            let places = (taps - 1 + rows.drafts, channels);
            let carry = rows.carry(layout, rng, x_type, 0, places, |_| taps - 1);
            let y = layout.poison(y_type, rows.bucket_tokens, channels, 0);
            let (from, bucket, single) = (from as u32, rows.bucket_rows as u32, rows.single);
            let q_len = rows.q_len as u32;
            let op = Conv { x, from, w, bias, carry, y, state, rows: bucket, single, q_len };
            (vec![Op::from(op)], vec![live_part(&y, rows.live()), carry.span])
        };
        against_reference(&build, &|device, want, got| {
            let what =
                format!("seed {seed}: {rows:?}, {channels} channels, {taps} taps on {device}");
            assert_close(&what, y_type, 4.0, &want[0], &got[0]);
            // Inputs are kept as they are.
            assert_eq!(want[1], got[1], "{what}");
        });
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub(crate) heads: usize,
    pub(crate) groups: usize,
    pub(crate) turns: bool,
    pub(crate) key: usize,
    pub(crate) value: usize,
    pub(crate) delta: bool,
    pub(crate) x: DType,
}

impl Heads {
    pub(crate) fn random(rng: &mut Rng) -> Heads {
        let groups = 1 + rng.below(3);
        let large = rng.below(3) == 0;
        let small = |rng: &mut Rng| 8 * (1 + rng.below(5));
        Heads {
            heads: groups * (1 + rng.below(3)),
            groups,
            turns: rng.below(3) == 0,
            key: if large { rng.pick(&[64, 128, 256]) } else { small(rng) },
            value: if large { rng.pick(&[64, 128]) } else { small(rng) },
            delta: rng.below(2) == 0,
            x: rng.pick(&ANY),
        }
    }

    fn rule(&self) -> Rule {
        if self.delta { Rule::Delta } else { Rule::StateSpace { least: 0.01 } }
    }

    pub(crate) fn cols(&self) -> usize {
        2 * self.groups * self.key + self.heads * self.value
    }

    pub(crate) fn states(&self) -> usize {
        self.heads * self.key * self.value
    }

    /// Elements of a token in the log.
    pub(crate) fn log(&self) -> usize {
        let [heads, groups, key, value] =
            [self.heads, self.groups, self.key, self.value].map(|n| n as u32);
        Scan::log_cols(heads, groups, key, value) as usize
    }

    /// The op over these tokens and states, without its step.
    pub(crate) fn scan(
        &self,
        layout: &mut Layout,
        rng: &mut Rng,
        x: Tensor,
        carry: Tensor,
    ) -> Scan {
        let Heads { heads, groups, turns, key, value, delta, .. } = *self;
        let tokens = x.rows as usize;
        let mut vector = |scale: f32, more: f32| {
            let values: Vec<f32> = rng.floats(heads, scale).iter().map(|v| v + more).collect();
            values
        };
        let (a, dt, skip) = (vector(1.0, -1.0), vector(1.0, 0.0), vector(1.0, 0.0));
        let a = layout.floats(DType::F32, 1, heads, 0, &a);
        let dt = layout.floats(DType::BF16, 1, heads, 0, &dt);
        let skip = (!delta).then(|| layout.floats(DType::F32, 1, heads, 0, &skip));
        let (from, read) = (8 * rng.below(2), if delta { 2 * heads } else { heads });
        let gates = rng.floats(tokens * (from + read), 3.0);
        let gates = layout.floats(self.x, tokens, from + read, 0, &gates);
        let y = layout.poison(self.x, tokens, heads * value, 0);
        let state = Rows::few(vec![], vec![], true).tables(layout);
        let [heads, groups, key, value] = [heads, groups, key, value].map(|n| n as u32);
        let (from, rule, rows, single) = (from as u32, self.rule(), 0, false);
        Scan {
            x,
            gates,
            from,
            a,
            dt,
            skip,
            rule,
            heads,
            groups,
            turns,
            key,
            value,
            carry,
            y,
            state,
            rows,
            single,
            q_len: 1,
            scratch: None,
            pick: Pick::Fixed,
        }
    }
}

/// A scan of these rows and heads; its results for live tokens, and what it carries.
fn carried(
    layout: &mut Layout,
    seed: u64,
    rows: &Rows,
    heads: &Heads,
    pick: Pick<ScanVariant>,
) -> (Vec<Op>, Vec<Span>) {
    let rng = &mut Rng::new(seed);
    let gap = 8 * rng.below(2);
    let x = rows.values(layout, rng, heads.x, heads.cols(), gap);
    let places = if rows.drafts > 0 { 2 * rows.drafts + 1 } else { 0 };
    let (states, log) = (heads.states(), (places, heads.log()));
    let carry = rows.carry(layout, rng, DType::F32, states, log, |r| rows.replay[r]);
    let op = heads.scan(layout, rng, x, carry);
    let (state, bucket, q_len) = (rows.tables(layout), rows.bucket_rows as u32, rows.q_len as u32);
    let op = Scan { state, rows: bucket, single: rows.single, q_len, pick, ..op };
    let outs = vec![live_part(&op.y, rows.live()), carry.span];
    (vec![Op::from(op)], outs)
}

#[test]
fn matrices_that_are_carried() {
    for seed in 0..30 {
        let rng = &mut Rng::new(4000 + seed);
        let rows = Rows::random(rng, seed);
        let heads = Heads::random(rng);
        let build = |layout: &mut Layout| carried(layout, seed, &rows, &heads, Pick::Fixed);
        against_reference(&build, &|device, want, got| {
            let what = format!("seed {seed}: {rows:?}, {heads:?} on {device}");
            // Values are up to a few hundred times as large as what rounding of sums leaves.
            assert_close(&what, heads.x, 16.0, &want[0], &got[0]);
            assert_close(&what, DType::F32, 16.0, &want[1], &got[1]);
        });
    }
}

/// The first part of `cols` elements whose error is more than `most` of its norm, or that is NaN where the reference is not.
fn far(want: &[f32], got: &[f32], cols: usize, most: f64) -> Option<String> {
    let norm = |part: &[f32]| part.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    assert_eq!(want.len(), got.len());
    let parts = want.chunks(cols).zip(got.chunks(cols)).enumerate();
    parts.into_iter().find_map(|(at, (want, got))| {
        let error: Vec<f32> = want.iter().zip(got).map(|(want, got)| want - got).collect();
        let close = norm(&error) <= most * norm(want) || want.iter().chain(got).all(|v| v.is_nan());
        (!close)
            .then(|| format!("part {at} differs by {:.1e} of its norm", norm(&error) / norm(want)))
    })
}

/// Rows of many tokens in bf16, which a GPU takes by chunks with operands of products in bf16; beside them rows of few tokens, and
/// such that take drafts from the log.
#[test]
fn matrices_that_are_carried_by_chunks() {
    for seed in 0..8 {
        let rng = &mut Rng::new(4500 + seed);
        let row = |rng: &mut Rng| {
            let q_len = rng.pick(&[1, 16, 17, 40, 64, 65, 100]);
            Row { q_len, kv_len: q_len + rng.pick(&[0, 1, 20]) }
        };
        let rows: Vec<Row> = (0..3 + rng.below(3)).map(|_| row(rng)).collect();
        let drafts = rng.pick(&[0, 0, 2]);
        let before = |row: &Row| row.kv_len - row.q_len;
        let replay = rows.iter().map(|row| rng.below(drafts.min(before(row)) + 1)).collect();
        let bucket_tokens =
            rows.iter().map(|row| row.q_len).sum::<usize>().max(128) + rng.below(20);
        let seats = (0..rows.len()).map(|r| SEATS - 1 - r).collect();
        let bucket_rows = rows.len() + rng.below(3);
        let (single, q_len) = (false, 1);
        let rows = Rows { rows, seats, bucket_rows, bucket_tokens, single, drafts, q_len, replay };
        let groups = 1 + rng.below(2);
        let (key, value) = (rng.pick(&[16, 48, 128]), rng.pick(&[32, 64]));
        let (heads, turns, delta) = (groups * (1 + rng.below(3)), rng.below(3) == 0, seed % 2 == 0);
        let heads = Heads { heads, groups, turns, key, value, delta, x: DType::BF16 };
        let build = |layout: &mut Layout| carried(layout, seed, &rows, &heads, Pick::Best);
        against_reference(&build, &|device, want, got| {
            let what = format!("seed {seed}: {rows:?}, {heads:?} on {device}");
            let [y, states] = [0, 1].map(|at| {
                let dtype = if at == 0 { heads.x } else { DType::F32 };
                [want, got].map(|outs| decode(dtype, &outs[at]))
            });
            assert_eq!(far(&y[0], &y[1], value, 2e-2), None, "{what}");
            let seat = states[0].len() / SEATS;
            for (want, got) in states[0].chunks(seat).zip(states[1].chunks(seat)) {
                let (want, log) = want.split_at(heads.states());
                let (got, same) = got.split_at(heads.states());
                assert_eq!(far(want, got, key * value, 1e-2), None, "{what}");
                let bits = |log: &[f32]| log.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(log), bits(same), "{what}");
            }
        });
    }
}

/// Forty tokens of two sequences, in steps of other sizes, with other rows beside them: the same results and states to
/// the bit.
#[test]
fn chunks_of_any_size_give_the_same_bits() {
    const TOKENS: usize = 40;
    for seed in 0..6 {
        let rng = &mut Rng::new(5000 + seed);
        let heads = Heads { delta: seed % 2 == 0, ..Heads::random(rng) };
        let (channels, taps) = (heads.cols(), 4);
        // Steps of the first sequence; the second has its tokens in steps of seven.
        let cuts: [&[usize]; 4] = [&[40], &[1; 40], &[17, 1, 1, 14, 7], &[33, 2, 5]];
        let build = |layout: &mut Layout, cut: &[usize]| {
            let rng = &mut Rng::new(seed);
            let inputs = rng.floats(2 * TOKENS * channels, 2.0);
            let all = layout.floats(heads.x, 2 * TOKENS, channels, 0, &inputs);
            let w = layout.floats(DType::F32, channels, taps, 0, &rng.floats(channels * taps, 1.0));
            let nan = |layout: &mut Layout, dtype, cols: usize| {
                let bytes = encode(dtype, &vec![f32::NAN; SEATS * cols]);
                let span = layout.bytes(Region::Kv, "carry", bytes);
                Tensor::dense(span, dtype, SEATS as u32, cols as u32)
            };
            let inputs_kept = nan(layout, heads.x, channels * (taps - 1));
            let carry = nan(layout, DType::F32, heads.states());
            let scan = heads.scan(layout, rng, all, carry);
            let bytes = |tensor: &Tensor| tensor.dtype.bytes(tensor.stride as usize) as u64;
            let part = |tensor: &Tensor, from: usize, count: usize| {
                let span =
                    tensor.span.part(from as u64 * bytes(tensor), count as u64 * bytes(tensor));
                Tensor { span, rows: count as u32, ..*tensor }
            };
            let (mut ops, mut at) = (Vec::new(), [0, 0]);
            let mut copies = Vec::new();
            for &first in cut.iter().chain([&0; 6]) {
                // Tokens of both sequences side by side.
                let count = [first, 7.min(TOKENS - at[1])];
                let fed: Vec<usize> = (0..2).filter(|&s| count[s] > 0).collect();
                if fed.is_empty() {
                    continue;
                }
                let tokens: usize = fed.iter().map(|&s| count[s]).sum();
                let single = tokens == fed.len();
                let bucket_tokens = if single { tokens } else { tokens + 3 };
                let row = |&s: &usize| Row { q_len: count[s], kv_len: at[s] + count[s] };
                let seats = fed.iter().map(|s| 3 + 2 * s).collect();
                let rows = Rows {
                    bucket_rows: fed.len() + usize::from(!single),
                    bucket_tokens,
                    ..Rows::few(fed.iter().map(row).collect(), seats, single)
                };
                let state = rows.tables(layout);
                let x = layout.poison(heads.x, bucket_tokens, channels, 0);
                let gates = layout.poison(heads.x, bucket_tokens, scan.gates.cols as usize, 0);
                let y = layout.poison(heads.x, bucket_tokens, scan.y.cols as usize, 0);
                let c = layout.poison(heads.x, bucket_tokens, channels, 0);
                let mut to = 0;
                for &s in &fed {
                    let from = s * TOKENS + at[s];
                    for (whole, own) in [(&all, &x), (&scan.gates, &gates)] {
                        let (from, to) = (part(whole, from, count[s]), part(own, to, count[s]));
                        ops.push(Op::from(device::op::Copy { from: from.span, to: to.span }));
                    }
                    copies.push((part(&y, to, count[s]), part(&scan.y, from, count[s])));
                    to += count[s];
                    at[s] += count[s];
                }
                let bucket = rows.bucket_rows as u32;
                let conv = Conv {
                    x,
                    from: 0,
                    w,
                    bias: None,
                    carry: inputs_kept,
                    y: c,
                    state,
                    rows: bucket,
                    single,
                    q_len: 1,
                };
                let own = Scan { x: c, gates, y, state, rows: bucket, single, ..scan.clone() };
                ops.extend([Op::from(conv), Op::from(own)]);
                let made = copies
                    .drain(..)
                    .map(|(from, to)| Op::from(device::op::Copy { from: from.span, to: to.span }));
                ops.extend(made);
            }
            assert_eq!(at, [TOKENS; 2]);
            let seat = |carry: &Tensor, seat: usize| part(carry, seat, 1).span;
            let outs = vec![
                scan.y.span,
                seat(&inputs_kept, 3),
                seat(&inputs_kept, 5),
                seat(&carry, 3),
                seat(&carry, 5),
            ];
            (ops, outs)
        };
        for (name, device) in devices() {
            let whole = run(&device, &|layout| build(layout, cuts[0]));
            for cut in &cuts[1..] {
                let parts = run(&device, &|layout| build(layout, cut));
                assert!(whole == parts, "seed {seed}: {heads:?} in steps of {cut:?} on {name}");
            }
        }
    }
}

/// A planted bug: two rows have each other's seats. The comparison that the tests above make must find it.
#[test]
fn the_state_of_another_seat_is_found() {
    for seed in 0..4 {
        let rng = &mut Rng::new(6000 + seed);
        let heads = Heads { delta: seed % 2 == 0, x: DType::F32, ..Heads::random(rng) };
        let row = || Row { q_len: if seed < 2 { 1 } else { 3 }, kv_len: 9 };
        let rows = |seats: [usize; 2]| Rows::few(vec![row(), row()], seats.to_vec(), seed < 2);
        let build = |layout: &mut Layout, seats: [usize; 2]| {
            let rng = &mut Rng::new(seed);
            let rows = rows(seats);
            let x = rows.values(layout, rng, heads.x, heads.cols(), 0);
            let kept = rows.carry(layout, rng, heads.x, 0, (3, heads.cols()), |_| 3);
            let carry = rows.carry(layout, rng, DType::F32, heads.states(), (0, 0), |_| 0);
            let w =
                layout.floats(DType::F32, heads.cols(), 4, 0, &rng.floats(heads.cols() * 4, 1.0));
            let op = heads.scan(layout, rng, x, carry);
            let (state, bucket, single) = (rows.tables(layout), 2, rows.single);
            let c = layout.poison(heads.x, rows.bucket_tokens, heads.cols(), 0);
            let (from, bias, q_len) = (0, None, 1);
            let conv =
                Conv { x, from, w, bias, carry: kept, y: c, state, rows: bucket, single, q_len };
            let outs = vec![op.y.span, c.span];
            let op = Scan { state, rows: bucket, single, ..op };
            (vec![Op::from(op), Op::from(conv)], outs)
        };
        let reference = device::cpu::open(None, true).expect("a CPU");
        let want = run(&reference, &|layout| build(layout, [2, 4]));
        for (name, device) in devices() {
            let got = run(&device, &|layout| build(layout, [4, 2]));
            for (want, got) in want.iter().zip(&got) {
                let found = difference(heads.x, 16.0, want, got);
                assert!(found.is_some(), "seed {seed} on {name}");
            }
        }
    }
}

/// The linear that makes gates, a convolution, a scan and a norm with a gate as one node, in steps of one token of each row.
#[test]
fn a_recurrent_layer_as_one_node() {
    for seed in 0..16 {
        let rng = &mut Rng::new(8000 + seed);
        let rows = Rows::random(rng, 0);
        let rows = Rows { drafts: 0, replay: vec![0; rows.rows.len()], ..rows };
        let (groups, share) = (1 + rng.below(3), rng.pick(&[1, 2]));
        let (key, value) = (rng.pick(&[16, 48, 128, 144]), rng.pick(&[32, 96, 128]));
        let (made, normed, taps) = (seed % 2 == 0, seed % 4 == 0, rng.pick(&[2, 4]));
        let x_type = if made { DType::BF16 } else { rng.pick(&ANY) };
        let heads = Heads {
            heads: groups * share,
            groups,
            turns: false,
            key,
            value,
            delta: true,
            x: x_type,
        };
        let (channels, values) = (heads.cols(), heads.heads * value);
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(seed);
            let (state, bucket) = (rows.tables(layout), rows.bucket_rows as u32);
            let x = rows.values(layout, rng, x_type, 8 + channels + values, 8);
            let w = rng.floats(channels * taps, 1.0);
            let w = layout.floats(DType::BF16, channels, taps, 0, &w);
            let kept = rows.carry(layout, rng, x_type, 0, (taps - 1, channels), |_| taps - 1);
            let c = layout.poison(x_type, rows.bucket_tokens, channels, 0);
            let carry = rows.carry(layout, rng, DType::F32, heads.states(), (0, 0), |_| 0);
            let scan = heads.scan(layout, rng, c, carry);
            let scan = Scan { state, rows: bucket, single: true, q_len: 1, ..scan };
            let mut members = Vec::new();
            let scan = if made {
                let (wide, gates) = (1024, 2 * heads.heads);
                let hidden = rows.values(layout, rng, DType::BF16, wide, 0);
                let w = layout.floats(DType::BF16, gates, wide, 0, &rng.floats(gates * wide, 0.1));
                let weight = layout.floats(DType::F32, 1, wide, 0, &rng.floats(wide, 1.0));
                let y = layout.poison(DType::BF16, rows.bucket_tokens, gates, 0);
                let norm = normed.then_some(Norm { weight, eps: 1e-5 });
                members.push(LinearChain { norm, ..LinearChain::new(hidden, w, y) }.into());
                Scan { gates: y, from: 0, ..scan }
            } else {
                scan
            };
            let weight = layout.floats(DType::F32, 1, value, 0, &rng.floats(value, 1.0));
            let norm =
                GatedNorm { norm: Norm { weight, eps: 1e-6 }, group: value as u32, after: false };
            let live = Some(layout.words(&[rows.live() as u32]).span);
            let y = layout.poison(x_type, rows.bucket_tokens, values, 0);
            let (gate, from) = (Gate::Silu, 8 + channels as u32);
            let gated = Gated { x: scan.y, z: x, from, gate, norm: Some(norm), y, live };
            let (from, bias, single, q_len) = (8, None, true, 1);
            let conv =
                Conv { x, from, w, bias, carry: kept, y: c, state, rows: bucket, single, q_len };
            members.extend([Op::from(conv), Op::from(scan), Op::from(gated)]);
            let outs = vec![live_part(&y, rows.live()), carry.span, kept.span];
            (vec![Fused { members, kernel: FusedKernel::Recurrent }.into()], outs)
        };
        against_reference(&build, &|device, want, got| {
            let what = format!("seed {seed}: {rows:?}, {heads:?} on {device}");
            // Gates and convolutions are rounded after another order of sums: a neighbouring value changes the state.
            let ulps = if x_type == DType::F32 { 16.0 } else { 4096.0 };
            assert_close(&what, x_type, 16.0, &want[0], &got[0]);
            assert_close(&what, DType::F32, ulps, &want[1], &got[1]);
            assert_eq!(want[2], got[2], "{what}");
        });
    }
}

#[test]
fn gates_with_and_without_norms() {
    for seed in 0..24 {
        let rng = &mut Rng::new(7000 + seed);
        let group = rng.pick(&[8, 24, 128, 128, 600, 1536]);
        let cols = group * rng.pick(&[1, 2, 5]);
        let rows = rng.pick(&[1, 3, 20]);
        let (x_type, z_type, y_type) = (rng.pick(&ANY), rng.pick(&ANY), rng.pick(&ANY));
        let (kind, in_place) = (seed % 4, seed % 8 >= 4);
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(seed);
            let live = 1 + rng.below(rows);
            let (from, behind) = (8 * rng.below(3), 8 * rng.below(2));
            let x = layout.floats(x_type, rows, cols, 0, &rng.floats(rows * cols, 2.0));
            let z = rng.floats(rows * (from + cols + behind), 4.0);
            let z = layout.floats(z_type, rows, from + cols + behind, 0, &z);
            let y = if in_place { x } else { layout.poison(y_type, rows, cols, 0) };
            // None, shared by groups, of all columns.
            let wide = [None, Some(group), Some(cols), Some(cols)][kind as usize];
            let norm = wide.map(|wide| {
                let weight = layout.floats(rng.pick(&ANY), 1, wide, 0, &rng.floats(wide, 1.0));
                let (norm, group) = (Norm { weight, eps: 1e-5 }, group as u32);
                GatedNorm { norm, group, after: kind == 3 }
            });
            let gate = if kind == 0 { Gate::Sigmoid } else { Gate::Silu };
            let count = Some(layout.words(&[live as u32]).span);
            let op = Gated { x, z, from: from as u32, gate, norm, y, live: count };
            (vec![Op::from(op)], vec![live_part(&y, live)])
        };
        let made = if in_place { x_type } else { y_type };
        against_reference(&build, &|device, want, got| {
            let what =
                format!("seed {seed}: {rows} rows of {cols} in groups of {group} on {device}");
            assert_close(&what, made, 4.0, &want[0], &got[0]);
        });
    }
}
