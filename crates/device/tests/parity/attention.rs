//! rope_kv and attention over random page tables and ragged rows. Every slot that no live token owns holds NaN, so a
//! read past a row's length or into another's page is noticed.

use crate::support::*;
use device::op::{Attention, AttentionChain, KvLayer, LinearChain, Norm, Pairs, RopeKv};
use device::step::count;
use device::variant::{LinearVariant, Pick};
use device::{DType, DeviceKind, Op, Region, Span, StepLimits, Tensor};

/// One row of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
}

pub(crate) struct Case {
    pub(crate) seed: u64,
    pub(crate) rows: Vec<Row>,
    pub(crate) bucket_rows: usize,
    pub(crate) bucket_tokens: usize,
    pub(crate) kv_heads: usize,
    pub(crate) group: usize,
    pub(crate) dim: usize,
    pub(crate) page_size: usize,
    pub(crate) kv: DType,
    pub(crate) x: DType,
    pub(crate) single: bool,
    pub(crate) softcap: Option<f32>,
    pub(crate) window: Option<u32>,
    pub(crate) sinks: bool,
    /// Tokens do not see those after them.
    pub(crate) causal: bool,
    pub(crate) norms: bool,
    pub(crate) pairs: Pairs,
}

impl Case {
    fn random(seed: u64, single: bool) -> Case {
        let rng = &mut Rng::new(seed);
        let rows: Vec<Row> = (0..1 + rng.below(4))
            .map(|_| {
                let q_len = if single { 1 } else { 1 + rng.below(40) };
                Row { q_len, kv_len: q_len + rng.below(70) }
            })
            .collect();
        let live: usize = rows.iter().map(|row| row.q_len).sum();
        let bucket_rows = rows.len() + rng.below(3);
        Case {
            seed,
            bucket_rows,
            bucket_tokens: if single { bucket_rows } else { live + rng.below(9) },
            rows,
            kv_heads: 1 + rng.below(3),
            group: rng.pick(&[1, 2, 3, 4]),
            dim: rng.pick(&[32, 64, 128, 80, 256]),
            page_size: rng.pick(&[4, 16, 32]),
            kv: rng.pick(&[DType::F32, DType::F16, DType::BF16, DType::E4M3]),
            x: rng.pick(&[DType::F32, DType::F32, DType::BF16, DType::F16]),
            single,
            softcap: rng.pick(&[None, None, Some(0.8), Some(50.0)]),
            window: rng.pick(&[None, None, Some(1), Some(7), Some(33)]),
            norms: rng.below(2) == 0,
            pairs: rng.pick(&[Pairs::Halves, Pairs::Halves, Pairs::Neighbours]),
            causal: single || rng.below(3) > 0,
            sinks: seed % 3 == 1,
        }
    }

    fn live(&self) -> usize {
        self.rows.iter().map(|row| row.q_len).sum()
    }

    fn heads(&self) -> usize {
        self.kv_heads * (self.group + 2)
    }
}

pub(crate) struct Laid {
    pub(crate) rope: RopeKv,
    pub(crate) attention: Attention,
}

/// With `filled`, k and v of this step's tokens are already in the pages, as rope_kv would have written them.
pub(crate) fn lay_out(case: &Case, layout: &mut Layout, filled: bool) -> Laid {
    let rng = &mut Rng::new(case.seed ^ 0xA77E);
    let size = case.page_size;
    let per_seat = case.rows.iter().map(|row| row.kv_len.div_ceil(size)).max().unwrap_or(1) + 1;
    let seats = case.rows.len() + 2;
    let limits = StepLimits {
        seats: seats as u32,
        rows: case.bucket_rows as u32,
        tokens: case.bucket_tokens as u32,
        pages_per_seat: per_seat as u32,
        page_size: size as u32,
        vocab: 32,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    };
    let state = layout.state(limits);
    // Pages 1.. in random order; page 0 is scratch.
    let pages = 1 + case.rows.iter().map(|row| row.kv_len.div_ceil(size)).sum::<usize>();
    let mut order: Vec<u32> = (1..pages as u32).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, rng.below(i + 1));
    }
    let mut seat_order: Vec<usize> = (0..seats).collect();
    for i in (1..seats).rev() {
        seat_order.swap(i, rng.below(i + 1));
    }
    let mut page_table = vec![0u32; (seats + 1) * per_seat];
    let mut row_seat = vec![seats as u32; case.bucket_rows];
    let mut kv_len = vec![0u32; case.bucket_rows];
    let mut q_start = vec![case.live() as u32; case.bucket_rows + 1];
    let mut position = vec![0u32; case.bucket_tokens];
    let mut token_row = vec![limits.rows; case.bucket_tokens];
    let mut kv_slot: Vec<u32> = (0..case.bucket_tokens).map(|t| (t % size) as u32).collect();
    let layer_elems = 2 * case.kv_heads * size * case.dim;
    let mut kv = vec![f32::NAN; pages * layer_elems];
    let (mut token, mut next_page) = (0, 0);
    for (r, row) in case.rows.iter().enumerate() {
        let seat = seat_order[r];
        row_seat[r] = seat as u32;
        kv_len[r] = row.kv_len as u32;
        q_start[r] = token as u32;
        for page in 0..row.kv_len.div_ceil(size) {
            page_table[seat * per_seat + page] = order[next_page];
            next_page += 1;
        }
        let old = row.kv_len - row.q_len;
        // Pages before the window may be another sequence's by now, and hold anything.
        let seen = case.window.map_or(0, |window| (old + 1).saturating_sub(window as usize));
        let first = seen / size * size;
        for p in 0..row.kv_len {
            let page = page_table[seat * per_seat + p / size] as usize;
            let slot = page * size + p % size;
            if p >= old {
                position[token] = p as u32;
                token_row[token] = r as u32;
                kv_slot[token] = slot as u32;
                token += 1;
            }
            if p >= first && (p < old || filled) {
                for part in 0..2 {
                    for head in 0..case.kv_heads {
                        let at = ((page * 2 + part) * case.kv_heads + head) * size + p % size;
                        for value in &mut kv[at * case.dim..][..case.dim] {
                            *value = rng.float();
                        }
                    }
                }
            }
        }
    }
    let mut counts = vec![0u32; count::WORDS as usize];
    counts[count::ROWS as usize] = case.rows.len() as u32;
    counts[count::TOKENS as usize] = case.live() as u32;
    let longest = case.rows.iter().map(|row| row.kv_len).max().unwrap_or(0);
    counts[count::MAX_KV as usize] = longest as u32;
    counts[count::SPLIT as usize] = longest.next_multiple_of(size) as u32;
    let tables: [(&Tensor, &[u32]); 8] = [
        (&state.page_table, &page_table),
        (&state.row_seat, &row_seat),
        (&state.kv_len, &kv_len),
        (&state.q_start, &q_start),
        (&state.position, &position),
        (&state.token_row, &token_row),
        (&state.kv_slot, &kv_slot),
        (&state.counts, &counts),
    ];
    for (tensor, words) in tables {
        layout.set(tensor.span, words_to_bytes(words));
    }
    let span = layout.bytes(Region::Kv, "kv", encode(case.kv, &kv));
    let scales = (case.kv == DType::E4M3).then(|| {
        // Of each head's keys, then of its values; large enough that what is written is not cut off.
        let scales = (0..2 * case.kv_heads).map(|at| 0.25 + 0.3 * (at * 5 % 7) as f32);
        let words: Vec<u32> = scales.map(f32::to_bits).collect();
        layout.words(&words).span
    });
    let kv = KvLayer {
        span,
        dtype: case.kv,
        scales,
        latent: None,
        pages: pages as u32,
        page_size: size as u32,
        heads: case.kv_heads as u32,
        head_dim: case.dim as u32,
    };
    let cols = case.heads() * case.dim;
    let mut values = rng.floats(case.bucket_tokens * cols, 2.0);
    values[case.live() * cols..].fill(f32::NAN);
    let qkv = layout.floats(case.x, case.bucket_tokens, cols, 0, &values);
    let angles: Vec<f32> = (0..longest.max(1))
        .flat_map(|p| {
            let angle = move |i: usize| p as f32 / 100f32.powf(i as f32 / 16.0);
            let half = case.dim / 2;
            (0..half).map(move |i| angle(i).cos()).chain((0..half).map(move |i| angle(i).sin()))
        })
        .collect();
    let rope = layout.floats(DType::F32, longest.max(1), case.dim, 0, &angles);
    let mut norm = || {
        case.norms.then(|| {
            let weight = rng.floats(case.dim, 1.0);
            Norm { weight: layout.floats(DType::F32, 1, case.dim, 0, &weight), eps: 1e-6 }
        })
    };
    let (q_norm, k_norm) = (norm(), norm());
    let q_heads = (case.kv_heads * case.group) as u32;
    let pairs = case.pairs;
    let rope = RopeKv { qkv, out: qkv, q_heads, q_norm, k_norm, rope, pairs, state, kv };
    let out_cols = case.kv_heads * case.group * case.dim;
    let out = layout.poison(case.x, case.bucket_tokens, out_cols, 0);
    let sinks = case.sinks.then(|| {
        let dtype = [DType::F32, DType::BF16][case.seed as usize % 2];
        let scores = Rng::new(case.seed ^ 0x51).floats(q_heads as usize, 3.0);
        layout.floats(dtype, 1, q_heads as usize, 0, &scores)
    });
    let attention = Attention {
        qkv,
        q_heads,
        kv,
        state,
        out,
        scale: (case.dim as f32).powf(-0.5),
        softcap: case.softcap,
        sinks,
        window: case.window,
        causal: case.causal,
        rows: case.bucket_rows as u32,
        single: case.single,
        even: None,
        last_only: false,
        scratch: None,
        pick: Default::default(),
    };
    Laid { rope, attention }
}

/// The rows of live tokens, and pad rows if they are defined.
fn live_rows(tensor: &Tensor, tokens: usize) -> Span {
    tensor.span.part(0, tensor.dtype.bytes(tokens * tensor.stride as usize) as u64)
}

#[test]
fn rope_kv() {
    for seed in 0..16 {
        let case = Case::random(seed, seed % 2 == 0);
        let build = |layout: &mut Layout| {
            let rope = lay_out(&case, layout, false).rope;
            // Pad tokens may be written to page 0.
            let page = rope.kv.page_bytes();
            let live_pages = rope.kv.span.part(page, rope.kv.span.len - page);
            let outs = vec![live_rows(&rope.qkv, case.live()), live_pages];
            (vec![Op::RopeKv(rope)], outs)
        };
        against_reference(&build, &|device, want, got| {
            let what = format!("seed {seed} on {device}");
            assert_close(&what, case.x, 4.0, &want[0], &got[0]);
            assert_close(&what, case.kv, 4.0, &want[1], &got[1]);
        });
    }
}

/// The linear that computes qkv also rotates it (on a GPU that can; elsewhere the two run in order): heads of both
/// sizes, with norms and without, edges of tiles, other formats in the pages, pad rows of NaN. There is no such
/// kernel for heads that do not fit whole into a tile, or for pages that are not halves: plans keep the two ops
/// apart.
#[test]
fn a_product_rotates_its_heads() {
    let cases = [
        (128, 2, 4, DType::BF16, DType::BF16, vec![(200, 200), (1, 90), (59, 61)]),
        (64, 3, 3, DType::BF16, DType::F16, vec![(37, 40), (90, 131)]),
        (128, 1, 1, DType::F16, DType::F16, vec![(257, 300)]),
    ];
    for (seed, (dim, kv_heads, group, x, kv, rows)) in cases.into_iter().enumerate() {
        for norms in [false, true] {
            let rows: Vec<Row> =
                rows.iter().map(|&(q_len, kv_len)| Row { q_len, kv_len }).collect();
            let live: usize = rows.iter().map(|row| row.q_len).sum();
            let case = Case {
                seed: 400 + seed as u64,
                bucket_rows: rows.len() + 1,
                bucket_tokens: live + 40,
                rows,
                kv_heads,
                group,
                dim,
                page_size: 16,
                kv,
                x,
                single: false,
                softcap: None,
                sinks: false,
                window: None,
                causal: true,
                norms,
                pairs: Pairs::Halves,
            };
            let (tokens, cols, k) = (case.bucket_tokens, case.heads() * dim, 192);
            let build = |layout: &mut Layout| {
                let rope = lay_out(&case, layout, false).rope;
                let rng = &mut Rng::new(seed as u64);
                let mut values = rng.floats(tokens * k, 1.0);
                values[live * k..].fill(f32::NAN);
                let input = layout.floats(x, tokens, k, 0, &values);
                let w = layout.floats(x, cols, k, 0, &rng.floats(cols * k, 0.1));
                let page = rope.kv.page_bytes();
                let live_pages = rope.kv.span.part(page, rope.kv.span.len - page);
                let outs = vec![live_rows(&rope.qkv, live), live_pages];
                let y = rope.qkv;
                let linear = LinearChain {
                    live: Some(rope.state.counts.span.part(u64::from(count::TOKENS) * 4, 4)),
                    rope: Some(Box::new(rope)),
                    pick: Pick::Named(LinearVariant::Tiles),
                    ..LinearChain::new(input, w, y)
                };
                (vec![Op::from(linear)], outs)
            };
            against_reference(&build, &|device, want, got| {
                let what = format!("case {seed}, norms {norms} on {device}");
                // Only q of a row is defined afterwards.
                let (row, q) = (x.bytes(cols), x.bytes(kv_heads * group * dim));
                for (want, got) in want[0].chunks(row).zip(got[0].chunks(row)) {
                    assert_close(&what, x, 4.0, &want[..q], &got[..q]);
                }
                // The reference has rounded the input of the rotation to the format of the linear.
                let scale = 4.0 * (tolerance(x) / tolerance(kv)).max(1.0);
                assert_close(&what, kv, scale, &want[1], &got[1]);
            });
        }
    }
}

/// Rows of a few tokens each, as where drafts are verified: split into pieces of every size, with windows, pad rows, and
/// more columns than a tile has.
#[test]
fn attention_of_rows_with_drafts() {
    let halves = [(DType::BF16, DType::BF16), (DType::F16, DType::F16), (DType::BF16, DType::E4M3)];
    for seed in 0..28 {
        let rng = &mut Rng::new(700 + seed);
        let each = 2 + rng.below(8);
        let count = rng.pick(&[1, 2, 4, 6, 9, 40]);
        let row = |rng: &mut Rng| {
            let before = rng.pick(&[0, 1, 15, 16, 40, 250, 700]);
            Row { q_len: each, kv_len: each + before + rng.below(20) }
        };
        let rows: Vec<Row> = (0..count).map(|_| row(rng)).collect();
        let bucket_rows = count + rng.below(3);
        let (x, kv) = halves[seed as usize % 3];
        let case = Case {
            seed,
            bucket_rows,
            bucket_tokens: bucket_rows * each,
            rows,
            kv_heads: rng.pick(&[1, 2, 8]),
            group: rng.pick(&[1, 3, 4, 8]),
            dim: rng.pick(&[64, 128, 128, 80, 256]),
            page_size: 16,
            kv,
            x,
            single: false,
            softcap: rng.pick(&[None, None, Some(30.0)]),
            window: rng.pick(&[None, None, Some(5), Some(33), Some(200)]),
            causal: true,
            sinks: seed % 3 == 1,
            norms: seed % 4 == 1,
            pairs: Pairs::Halves,
        };
        // The prologue never plans more pieces than a GPU has blocks for: an eighth of all pages each is enough for any.
        let pages: usize = case.rows.iter().map(|row| row.kv_len.div_ceil(16)).sum();
        let share = 16 * rng.pick(&[1, 2, 7, 64]).max(pages.div_ceil(8));
        // With the rotation in the same kernel, where the kernel takes whole rows.
        let wide = if case.dim > 128 { 8 } else { 32 };
        let turns = seed % 2 == 1 && each * case.group <= wide;
        let build = |layout: &mut Layout| {
            let Laid { rope, mut attention } = lay_out(&case, layout, !turns);
            attention.even = Some(each as u32);
            let state = attention.state;
            let mut counts = vec![0u32; count::WORDS as usize];
            let longest = case.rows.iter().map(|row| row.kv_len).max().unwrap_or(0);
            counts[count::ROWS as usize] = case.rows.len() as u32;
            counts[count::TOKENS as usize] = case.live() as u32;
            counts[count::MAX_KV as usize] = longest as u32;
            counts[count::SPLIT as usize] = share as u32;
            layout.set(state.counts.span, words_to_bytes(&counts));
            // Pad tokens may be written to page 0.
            let (kv, page) = (attention.kv.span, attention.kv.page_bytes());
            let live_pages = kv.part(page, kv.len - page);
            let outs = vec![live_rows(&attention.out, case.live()), live_pages];
            let rope = turns.then(|| Box::new(rope));
            (vec![Op::from(AttentionChain { attention, rope })], outs)
        };
        against_reference(&build, &|device, want, got| {
            let turned = if turns { ", turned" } else { "" };
            let what = format!("seed {seed}, {count} rows of {each}{turned} on {device}");
            // k may be rounded to the neighbouring 16-bit value.
            let within = if turns { 8.0 } else { 1.0 };
            assert_close(&what, case.x, within, &want[0], &got[0]);
            assert_close(&what, case.kv, 4.0, &want[1], &got[1]);
        });
    }
}

#[test]
fn attention_decode() {
    for seed in 100..124 {
        let case = Case::random(seed, true);
        let build = |layout: &mut Layout| {
            let attention = lay_out(&case, layout, true).attention;
            let outs = vec![attention.out.span];
            (vec![Op::from(attention)], outs)
        };
        against_reference(&build, &|device, want, got| {
            assert_close(&format!("seed {seed} on {device}"), case.x, 1.0, &want[0], &got[0]);
        });
    }
}

#[test]
fn attention_varlen() {
    for seed in 200..224 {
        let case = Case::random(seed, false);
        let build = |layout: &mut Layout| {
            let attention = lay_out(&case, layout, true).attention;
            let outs = vec![live_rows(&attention.out, case.live())];
            (vec![Op::from(attention)], outs)
        };
        against_reference(&build, &|device, want, got| {
            assert_close(&format!("seed {seed} on {device}"), case.x, 1.0, &want[0], &got[0]);
        });
    }
}

/// A step of several prompts, of chunks in the middle of a context and of decode rows: lengths around tiles and
/// pages, every head size, halves and pages of 16 as the fast kernels need them.
pub(crate) fn mixed(seed: u64, dim: usize, rows: Vec<Row>) -> Case {
    let rng = &mut Rng::new(seed);
    let live: usize = rows.iter().map(|row| row.q_len).sum();
    let half = rng.pick(&[DType::BF16, DType::F16]);
    Case {
        seed,
        bucket_rows: rows.len() + rng.below(3),
        bucket_tokens: live + rng.below(40),
        rows,
        kv_heads: 1 + rng.below(2),
        group: rng.pick(&[1, 2, 3, 4, 7]),
        dim,
        page_size: 16,
        kv: rng.pick(&[half, half, DType::E4M3]),
        x: half,
        single: false,
        softcap: rng.pick(&[None, None, None, Some(0.8)]),
        window: rng.pick(&[None, None, Some(40), Some(200)]),
        norms: false,
        pairs: Pairs::Halves,
        causal: rng.below(3) > 0,
        sinks: seed % 3 == 2,
    }
}

pub(crate) fn check_varlen(case: &Case) {
    let build = |layout: &mut Layout| {
        let attention = lay_out(case, layout, true).attention;
        // Pad tokens, too: they must not change.
        let outs = vec![live_rows(&attention.out, case.live()), attention.out.span];
        (vec![Op::from(attention)], outs)
    };
    against_reference(&build, &|device, want, got| {
        let what = format!("seed {}, heads of {}, on {device}", case.seed, case.dim);
        // Weights are rounded to 16 bits before they are multiplied with v.
        assert_close(&what, case.x, 4.0, &want[0], &got[0]);
        let pads = want[0].len();
        assert!(want[1][pads..] == got[1][pads..], "{what}: a pad token was written");
    });
}

/// If only the last token of each row is requested, that one is right.
fn check_last(case: &Case) {
    let build = |layout: &mut Layout| {
        let mut attention = lay_out(case, layout, true).attention;
        attention.last_only = true;
        let row = case.x.bytes(attention.out.stride as usize) as u64;
        let ends = case.rows.iter().scan(0, |tokens, row| {
            *tokens += row.q_len as u64;
            Some(*tokens)
        });
        let outs = ends.map(|end| attention.out.span.part((end - 1) * row, row)).collect();
        (vec![Op::from(attention)], outs)
    };
    against_reference(&build, &|device, want, got| {
        let what = format!("last tokens, seed {}, heads of {}, on {device}", case.seed, case.dim);
        for (want, got) in want.iter().zip(got) {
            assert_close(&what, case.x, 4.0, want, got);
        }
    });
}

#[test]
fn attention_of_mixed_steps() {
    for (index, dim) in [64, 80, 96, 128, 256, 64, 128].into_iter().enumerate() {
        let seed = 400 + index as u64;
        let rng = &mut Rng::new(seed);
        let lengths = [1, 1, 2, 15, 16, 17, 33, 64, 90, 129];
        let rows: Vec<Row> = (0..2 + rng.below(5))
            .map(|_| {
                let q_len = rng.pick(&lengths);
                Row { q_len, kv_len: q_len + rng.pick(&[0, 0, 1, 15, 16, 111, 128, 150, 255, 300]) }
            })
            .collect();
        let case = mixed(seed, dim, rows);
        check_varlen(&case);
        check_last(&case);
    }
}

/// One row for every offset within a page, for ends and beginnings of chunks alike.
#[test]
fn attention_at_every_offset_of_a_page() {
    for (index, dim) in [64, 128, 256].into_iter().enumerate() {
        let rows: Vec<Row> =
            (0..33).map(|at| Row { q_len: 1 + at % 3, kv_len: 1 + at % 3 + at }).collect();
        check_varlen(&mixed(500 + index as u64, dim, rows));
    }
}

/// The heads of Gemma: 4 over 1 and 8 over 4 of 256, windows shorter than most rows, capped scores; decode by itself
/// and with rotation, and prompts beside decoding rows.
#[test]
fn attention_of_heads_of_256() {
    let (none, cap, window) = (None, Some(0.8), Some(48));
    for (index, (kv_heads, group)) in [(1, 4), (4, 2)].into_iter().enumerate() {
        for (softcap, window) in [(none, None), (none, window), (cap, None), (cap, window)] {
            let rows = [(1, 130), (1, 1), (1, 49), (1, 16), (1, 200)];
            let rows = rows.map(|(q_len, kv_len)| Row { q_len, kv_len }).to_vec();
            let case = mixed(720 + index as u64, 256, rows);
            let bucket_tokens = case.bucket_rows;
            let (single, norms, causal) = (true, true, true);
            let case = Case {
                kv_heads,
                group,
                softcap,
                window,
                bucket_tokens,
                single,
                norms,
                causal,
                ..case
            };
            for rotates in [false, true] {
                let build = |layout: &mut Layout| {
                    let Laid { rope, attention } = lay_out(&case, layout, !rotates);
                    let outs = vec![attention.out.span];
                    let rope = rotates.then(|| Box::new(rope));
                    (vec![Op::from(AttentionChain { attention, rope })], outs)
                };
                against_reference(&build, &|device, want, got| {
                    let what = format!("{softcap:?}, {window:?}, rope {rotates} on {device}");
                    // k may be rounded to the neighbouring 16-bit value.
                    assert_close(&what, case.x, 8.0, &want[0], &got[0]);
                });
            }
            let rows = [(1, 90), (33, 33), (17, 150), (64, 64), (1, 1), (90, 131)];
            let rows = rows.map(|(q_len, kv_len)| Row { q_len, kv_len }).to_vec();
            let case = mixed(730 + index as u64, 256, rows);
            check_varlen(&Case { kv_heads, group, softcap, window, ..case });
        }
    }
}

/// Heads wider than those of any current model: decode, short prompts and long ones, several times, because threads
/// that write into each other's scratch do so differently each time.
#[test]
fn attention_of_wide_heads() {
    for (index, dim) in [432, 512, 1024].into_iter().enumerate() {
        for single in [true, false] {
            let lengths: &[usize] = if single { &[1, 1, 1] } else { &[1, 3, 17, 50] };
            let rows = lengths.iter().map(|q_len| Row { q_len: *q_len, kv_len: q_len + 20 });
            let case = Case {
                single,
                causal: true,
                group: 1 + index,
                ..mixed(600 + index as u64, dim, rows.collect())
            };
            let bucket_tokens = if single { case.bucket_rows } else { case.bucket_tokens };
            let case = Case { bucket_tokens, ..case };
            let build = |layout: &mut Layout| {
                let attention = lay_out(&case, layout, true).attention;
                let outs = vec![live_rows(&attention.out, case.live())];
                (vec![Op::from(attention)], outs)
            };
            let what = |device: &str| format!("heads of {dim}, single {single}, on {device}");
            against_reference(&build, &|device, want, got| {
                assert_close(&what(device), case.x, 4.0, &want[0], &got[0]);
            });
            for (name, device) in devices() {
                let first = run(&device, &build);
                let same = (0..4).all(|_| run(&device, &build) == first);
                assert!(same, "{}: not the same each time", what(&name));
            }
        }
    }
}

/// A row whose length is past its page table, or less than what it feeds, attends to nothing: no device reads past
/// the table, or writes past its scratch.
#[test]
fn attention_of_rows_that_are_not_in_their_pages() {
    for (single, kv_len) in [(true, 1 << 20), (true, u32::MAX), (false, 3), (false, 1 << 20)] {
        let q_len = if single { 1 } else { 17 };
        let rows = vec![Row { q_len, kv_len: 40 }; 3];
        let case = Case {
            single,
            causal: true,
            bucket_rows: 3,
            bucket_tokens: 3 * q_len,
            ..mixed(700, 64, rows)
        };
        let build = |layout: &mut Layout| {
            let attention = lay_out(&case, layout, true).attention;
            layout.set(attention.state.kv_len.span, words_to_bytes(&[40, kv_len, 40]));
            let outs = vec![attention.out.span];
            (vec![Op::from(attention)], outs)
        };
        let row = case.x.bytes(case.kv_heads * case.group * case.dim);
        let want = run(&device::cpu::open(None, true).expect("a CPU"), &build);
        // A GPU relies on the prologue, which clamps; the tables here do not come from the prologue.
        for (name, device) in devices().iter().filter(|(_, it)| it.kind() == DeviceKind::Cpu) {
            let what = format!("single {single}, length {kv_len}, on {name}");
            let got = run(device, &build);
            assert_close(&what, case.x, 4.0, &want[0], &got[0]);
            let nothing = got[0][q_len * row..2 * q_len * row].iter().all(|byte| *byte == 0);
            assert!(nothing, "{what}: something was seen");
        }
    }
}

/// Rotation fused into attention gives the same result as the two ops run in order.
#[test]
fn attention_with_rope() {
    for seed in 300..312 {
        let case = Case::random(seed, true);
        let build = |layout: &mut Layout| {
            let Laid { rope, attention } = lay_out(&case, layout, false);
            let outs = vec![attention.out.span];
            let rope = Some(Box::new(rope));
            (vec![Op::from(AttentionChain { attention, rope })], outs)
        };
        against_reference(&build, &|device, want, got| {
            // k may be rounded to the neighbouring 16-bit value.
            assert_close(&format!("seed {seed} on {device}"), case.x, 8.0, &want[0], &got[0]);
        });
    }
}

/// By hand: equal keys give the mean of their values; a sink as large as their scores counts as one more, of value 0.
#[test]
fn attention_by_hand() {
    let reference = device::cpu::open(None, true).expect("a CPU");
    for (kv_len, sinks) in [(1usize, false), (2, false), (1, true), (2, true)] {
        let case = Case {
            seed: 1,
            rows: vec![Row { q_len: 1, kv_len }],
            bucket_rows: 1,
            bucket_tokens: 1,
            kv_heads: 1,
            group: 1,
            dim: 32,
            page_size: 4,
            kv: DType::F32,
            x: DType::F32,
            single: true,
            softcap: None,
            sinks,
            window: None,
            causal: true,
            norms: false,
            pairs: Pairs::Halves,
        };
        let out = run(&reference, &|layout: &mut Layout| {
            let attention = lay_out(&case, layout, true).attention;
            // Page 1: keys all 1; values 3 for the first token, 5 for the second.
            let mut kv = vec![f32::NAN; 2 * 2 * 4 * 32];
            kv[256..256 + kv_len * 32].fill(1.0);
            kv[256 + 128..256 + 160].fill(3.0);
            kv[256 + 160..256 + 192].fill(5.0);
            layout.set(attention.kv.span, encode(DType::F32, &kv));
            // All scores are 0.
            layout.set(attention.qkv.span, encode(DType::F32, &[0.0; 96]));
            attention.sinks.iter().for_each(|s| layout.set(s.span, encode(s.dtype, &[0.0])));
            let outs = vec![attention.out.span];
            (vec![Op::from(attention)], outs)
        });
        let want = [3.0, 8.0][kv_len - 1] / (kv_len + usize::from(sinks)) as f32;
        assert_eq!(decode(DType::F32, &out[0]), [want; 32]);
    }
}
