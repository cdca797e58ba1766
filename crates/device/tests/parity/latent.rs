//! Latent attention: matrices of heads, latents on their way to pages, attention over pages of latents. Every slot that no
//! live token owns holds NaN, so a read past a row's length or into another's page is noticed.

use crate::attention::Row;
use crate::support::*;
use device::op::{HeadLinear, KvLayer, LatentAttention, LatentKv, Norm, Pairs};
use device::step::count;
use device::variant::Pick;
use device::{DType, Op, Region, StepLimits, StepState, Tensor};

#[derive(Debug)]
struct Case {
    seed: u64,
    rows: Vec<Row>,
    bucket_rows: usize,
    bucket_tokens: usize,
    heads: usize,
    latent: usize,
    rotated: usize,
    page_size: usize,
    kv: DType,
    x: DType,
    /// Tokens of every row, if all have as many.
    each: Option<usize>,
}

impl Case {
    fn random(seed: u64, each: Option<usize>) -> Case {
        let rng = &mut Rng::new(900 + seed);
        // Every second case is one for tensor cores.
        let fast = seed.is_multiple_of(2);
        let count = rng.pick(&[1, 2, 5, 9]);
        let row = |rng: &mut Rng| {
            let q_len = each.unwrap_or(1 + rng.below(if fast { 9 } else { 30 }));
            let before = rng.pick(&[0, 1, 15, 16, 63, 64, 130, if fast { 270 } else { 70 }]);
            Row { q_len, kv_len: q_len + before + rng.below(3) }
        };
        let rows: Vec<Row> = (0..count).map(|_| row(rng)).collect();
        let live: usize = rows.iter().map(|row| row.q_len).sum();
        let bucket_rows = count + rng.below(3);
        let half = rng.pick(&[DType::BF16, DType::F16]);
        let any = [DType::F32, DType::F16, DType::BF16];
        Case {
            seed,
            rows,
            bucket_rows,
            bucket_tokens: each.map_or(live + rng.below(9), |each| each * bucket_rows),
            heads: if fast { rng.pick(&[4, 16, 16, 20]) } else { 1 + rng.below(5) },
            latent: if fast { rng.pick(&[128, 512]) } else { 8 * (1 + rng.below(5)) },
            rotated: if fast { rng.pick(&[32, 64]) } else { 8 * (1 + rng.below(3)) },
            page_size: if fast { 16 } else { rng.pick(&[4, 16, 32]) },
            kv: if fast { half } else { rng.pick(&any) },
            x: if fast { half } else { rng.pick(&any) },
            each,
        }
    }

    fn live(&self) -> usize {
        self.rows.iter().map(|row| row.q_len).sum()
    }

    fn width(&self) -> usize {
        self.latent + self.rotated
    }
}

/// The step's tables and pages. With `filled`, the latents of this step's tokens are already there.
fn lay_out(case: &Case, layout: &mut Layout, filled: bool) -> (StepState, KvLayer) {
    let rng = &mut Rng::new(case.seed ^ 0x1A7E);
    let (size, width) = (case.page_size, case.width());
    let pages_of = |row: &Row| row.kv_len.div_ceil(size);
    let per_seat = case.rows.iter().map(pages_of).max().unwrap_or(1) + 1;
    let seats = case.rows.len() + 1;
    let state = layout.state(StepLimits {
        seats: seats as u32,
        rows: case.bucket_rows as u32,
        tokens: case.bucket_tokens as u32,
        pages_per_seat: per_seat as u32,
        page_size: size as u32,
        vocab: 32,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    });
    let all = case.rows.iter().map(pages_of).sum::<usize>();
    let mut order: Vec<u32> = (1..=all as u32).collect();
    (1..order.len()).rev().for_each(|i| order.swap(i, rng.below(i + 1)));
    let mut page_table = vec![0u32; (seats + 1) * per_seat];
    let mut row_seat = vec![seats as u32; case.bucket_rows];
    let mut kv_len = vec![0u32; case.bucket_rows];
    let mut q_start = vec![case.live() as u32; case.bucket_rows + 1];
    let mut position = vec![0u32; case.bucket_tokens];
    let mut token_row = vec![case.bucket_rows as u32; case.bucket_tokens];
    let mut kv_slot: Vec<u32> = (0..case.bucket_tokens).map(|t| (t % size) as u32).collect();
    let mut kv = vec![f32::NAN; (1 + all) * size * width];
    let (mut token, mut next_page) = (0, 0);
    for (r, row) in case.rows.iter().enumerate() {
        // Seats in reverse.
        let seat = case.rows.len() - r;
        (row_seat[r], kv_len[r], q_start[r]) = (seat as u32, row.kv_len as u32, token as u32);
        for page in 0..pages_of(row) {
            page_table[seat * per_seat + page] = order[next_page];
            next_page += 1;
        }
        for p in 0..row.kv_len {
            let slot = page_table[seat * per_seat + p / size] as usize * size + p % size;
            let own = p >= row.kv_len - row.q_len;
            if own {
                (position[token], token_row[token]) = (p as u32, r as u32);
                kv_slot[token] = slot as u32;
                token += 1;
            }
            if !own || filled {
                kv[slot * width..][..width].iter_mut().for_each(|value| *value = rng.float());
            }
        }
    }
    let mut counts = vec![0u32; count::WORDS as usize];
    counts[count::ROWS as usize] = case.rows.len() as u32;
    counts[count::TOKENS as usize] = case.live() as u32;
    counts[count::MAX_KV as usize] = kv_len.iter().copied().max().unwrap_or(0);
    // As the prologue divides pages, with the fewest ways it has.
    counts[count::SPLIT as usize] = (all.div_ceil(8) * size) as u32;
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
    tables.into_iter().for_each(|(to, words)| layout.set(to.span, words_to_bytes(words)));
    let span = layout.bytes(Region::Kv, "kv", encode(case.kv, &kv));
    let kv = KvLayer {
        span,
        dtype: case.kv,
        scales: None,
        pages: 1 + all as u32,
        page_size: size as u32,
        heads: 1,
        head_dim: width as u32,
        latent: Some(case.latent as u32),
    };
    (state, kv)
}

/// Rows of numbers for live tokens, NaN for pads.
fn values(case: &Case, layout: &mut Layout, rng: &mut Rng, cols: usize, gap: usize) -> Tensor {
    let mut values = rng.floats(case.bucket_tokens * cols, 2.0);
    values[case.live() * cols..].fill(f32::NAN);
    layout.floats(case.x, case.bucket_tokens, cols, gap, &values)
}

fn attention(case: &Case, layout: &mut Layout, pick: bool) -> LatentAttention {
    let (state, kv) = lay_out(case, layout, true);
    let rng = &mut Rng::new(case.seed);
    let q = values(case, layout, rng, case.heads * case.width(), 0);
    let out = layout.poison(case.x, case.bucket_tokens, case.heads * case.latent, 0);
    LatentAttention {
        q,
        heads: case.heads as u32,
        kv,
        state,
        out,
        scale: (case.width() as f32).powf(-0.5),
        rows: case.bucket_rows as u32,
        single: case.each == Some(1),
        even: case.each.filter(|each| *each > 1).map(|each| each as u32),
        last_only: false,
        scratch: None,
        pick: if pick { Pick::Fixed } else { Pick::Best },
    }
}

/// Decode, drafts and rows of any length; split and not.
#[test]
fn latent_attention() {
    for seed in 0..18 {
        let case = Case::random(seed, [Some(1), None, Some(3)][seed as usize / 2 % 3]);
        for fixed in [false, true] {
            let build = |layout: &mut Layout| {
                let op = attention(&case, layout, fixed);
                let live = op.out.dtype.bytes(case.live() * op.out.stride as usize) as u64;
                // Pad rows of a decode step are zero.
                let outs = if op.single { op.out.span } else { op.out.span.part(0, live) };
                (vec![Op::from(op)], vec![outs])
            };
            against_reference(&build, &|device, want, got| {
                let what = format!("{case:?}, fixed {fixed}, on {device}");
                // Weights are rounded to 16 bits before they are multiplied with latents.
                assert_close(&what, case.x, 2.0, &want[0], &got[0]);
            });
        }
    }
}

/// A token's result is the same to the bit alone and beside others, where kernels are fixed.
#[test]
fn fixed_latent_attention_depends_on_the_position_alone() {
    for seed in [0, 6, 12] {
        let many = Case::random(seed, None);
        for (name, device) in devices() {
            let all = run(&device, &|layout| {
                let op = attention(&many, layout, true);
                let span = op.out.span;
                (vec![Op::from(op)], vec![span])
            });
            // The last token of every row in a decode step, over the same pages.
            let last = run(&device, &|layout| {
                let op = attention(&many, layout, true);
                let mut row_tokens = 0;
                let ends = many.rows.iter().map(|row| {
                    row_tokens += row.q_len;
                    row_tokens - 1
                });
                let row = op.q.dtype.bytes(op.q.stride as usize) as u64;
                let copies = ends.collect::<Vec<_>>().into_iter().enumerate().map(|(to, from)| {
                    let part = |at: usize| op.q.span.part(at as u64 * row, row);
                    Op::from(device::op::Copy { from: part(from), to: part(to) })
                });
                let copies: Vec<Op> = copies.filter(|op| !moves_nothing(op)).collect();
                let top = |tensor: Tensor| Tensor { rows: many.bucket_rows as u32, ..tensor };
                let (q, out) = (top(op.q), top(op.out));
                let single = LatentAttention { q, out, single: true, even: None, ..op };
                let span = single.out.span;
                (copies.into_iter().chain([Op::from(single)]).collect(), vec![span])
            });
            let row = many.x.bytes(many.heads * many.latent);
            let mut token = 0;
            for (r, own) in many.rows.iter().enumerate() {
                token += own.q_len;
                let (a, b) = (&all[0][(token - 1) * row..][..row], &last[0][r * row..][..row]);
                assert!(a == b, "seed {seed}, row {r} on {name}");
            }
        }
    }
}

fn moves_nothing(op: &Op) -> bool {
    matches!(op, Op::Copy(copy) if copy.from == copy.to)
}

#[test]
fn latents_on_their_way_to_pages() {
    for seed in 0..16 {
        let each = if seed % 4 == 0 { Some(1) } else { None };
        let case = Case::random(100 + seed, each);
        let build = |layout: &mut Layout| {
            let (state, kv) = lay_out(&case, layout, false);
            let rng = &mut Rng::new(case.seed);
            let (width, from) = (case.width(), 8 * rng.below(3));
            let q = values(&case, layout, rng, case.heads * width, 0);
            let gap = 8 * rng.below(2);
            let x = values(&case, layout, rng, from + width, gap);
            let weight = rng.floats(case.latent, 1.0);
            let dtype = rng.pick(&[DType::F32, DType::BF16]);
            let norm = Norm { weight: layout.floats(dtype, 1, case.latent, 0, &weight), eps: 1e-6 };
            let angles = rng.floats(800 * case.rotated, 1.0);
            let rope = layout.floats(DType::F32, 800, case.rotated, 0, &angles);
            let pairs = rng.pick(&[Pairs::Halves, Pairs::Neighbours]);
            let (heads, from) = (case.heads as u32, from as u32);
            let op = LatentKv { q, out: q, heads, x, from, norm, rope, pairs, state, kv };
            let live = q.dtype.bytes(case.live() * q.stride as usize) as u64;
            // Pad tokens may be written to page 0.
            let page = kv.page_bytes();
            let outs = vec![q.span.part(0, live), kv.span.part(page, kv.span.len - page)];
            (vec![Op::from(op)], outs)
        };
        against_reference(&build, &|device, want, got| {
            let what = format!("{case:?} on {device}");
            assert_close(&what, case.x, 4.0, &want[0], &got[0]);
            assert_close(&what, case.kv, 4.0, &want[1], &got[1]);
        });
    }
}

/// Matrices of heads as they are stored and turned, with elements that are copied, columns behind the heads, and rows that
/// are not live.
#[test]
fn matrices_of_heads() {
    for seed in 0..24 {
        let rng = &mut Rng::new(500 + seed);
        let fast = seed % 2 == 0;
        let (k, n) = match fast {
            true => rng.pick(&[(128, 512), (512, 128), (32, 64), (64, 512), (96, 32)]),
            false => (8 * (1 + rng.below(4)), 8 * (1 + rng.below(4))),
        };
        let (heads, rest) = (1 + rng.below(5), 8 * rng.pick(&[0, 0, 1, 8]));
        let rows = rng.pick(&[1, 2, 15, 17, 40, 70]);
        let turned = rng.below(2) == 0;
        let any = [DType::F32, DType::F16, DType::BF16];
        let x_type = rng.pick(if fast { &any[1..] } else { &any });
        let w_type = if fast { x_type } else { rng.pick(&any) };
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(seed);
            let (each, behind) = (k + rest, 8 * rng.below(2));
            let cols = heads * each + behind;
            let live = 1 + rng.below(rows);
            let mut values = rng.floats(rows * cols, 1.0);
            values[live * cols..].fill(f32::NAN);
            let x = layout.floats(x_type, rows, cols, 8 * rng.below(2), &values);
            let (own, other) = if turned { (k, n) } else { (n, k) };
            let weights = rng.floats(heads * own * other, 0.2);
            let w = layout.floats(w_type, heads * own, other, 0, &weights);
            let y = layout.poison(x_type, rows, heads * (n + rest), 0);
            let count = layout.words(&[live as u32]);
            let (heads, each) = (heads as u32, each as u32);
            let op = HeadLinear { x, w, heads, each, turned, y, live: Some(count.span) };
            let part = y.dtype.bytes(live * y.stride as usize) as u64;
            (vec![Op::from(op)], vec![y.span.part(0, part)])
        };
        against_reference(&build, &|device, want, got| {
            let what =
                format!("seed {seed}: {rows} rows, {k} to {n}, turned {turned}, on {device}");
            assert_close(&what, x_type, 2.0, &want[0], &got[0]);
        });
    }
}

/// A planted bug: attention of a step that has not written its latents finds what another sequence left in their slots.
/// Whatever the position, the comparison that the tests above make must find it.
#[test]
fn a_stale_latent_is_found() {
    for seed in [1, 2, 7, 8] {
        let case = Case::random(seed, Some(1));
        let build = |layout: &mut Layout, stale: bool| {
            let op = attention(&case, layout, false);
            let rng = &mut Rng::new(seed);
            let x = values(&case, layout, rng, case.width(), 0);
            let ones = layout.floats(DType::F32, 1, case.latent, 0, &vec![1.0; case.latent]);
            let rope = layout.floats(DType::F32, 1, case.rotated, 0, &vec![1.0; case.rotated]);
            let write = LatentKv {
                q: op.q,
                out: op.q,
                heads: op.heads,
                x,
                from: 0,
                norm: Norm { weight: ones, eps: 1e-6 },
                rope,
                pairs: Pairs::Halves,
                state: op.state,
                kv: op.kv,
            };
            let outs = vec![op.out.span];
            let ops = [Op::from(write), Op::from(op)];
            (if stale { ops[1..].to_vec() } else { ops.to_vec() }, outs)
        };
        let reference = device::cpu::open(None, true).expect("a CPU");
        let want = run(&reference, &|layout| build(layout, false));
        for (name, device) in devices() {
            let got = run(&device, &|layout| build(layout, true));
            let row = case.x.bytes(case.heads * case.latent);
            for r in 0..case.rows.len() {
                let part = |bytes: &[Vec<u8>]| bytes[0][r * row..][..row].to_vec();
                let found = difference(case.x, 2.0, &part(&want), &part(&got));
                let short = case.rows[r].kv_len < 20;
                assert!(found.is_some() || !short, "seed {seed}, row {r} on {name}");
            }
        }
    }
}
