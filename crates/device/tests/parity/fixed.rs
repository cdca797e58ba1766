//! [`Pick::Fixed`]: the result of a row does not depend on the other rows, to the bit. And the inverse: if a device
//! has several kernels to choose from, the results of its own choice may differ.

use crate::support::*;
use device::cpu::pack;
use device::op::{Activation, Attention, Epilogue, KvLayer, LinearChain};
use device::step::count;
use device::variant::Pick;
use device::{DType, DeviceKind, Op, Region, Span, StepLimits, Tensor};

const MOST: usize = 40;

#[derive(Clone, Copy)]
struct Product {
    rows: usize,
    w: DType,
    x: DType,
    silu: bool,
}

/// Always the first rows of the same x, and the same w.
fn product(case: &Product, layout: &mut Layout) -> (Vec<Op>, Vec<Span>) {
    let (n, k) = (96, 320);
    let rng = &mut Rng::new(5);
    let values = rng.floats(MOST * k, 1.0);
    let x = layout.floats(case.x, case.rows, k, 0, &values[..case.rows * k]);
    let bytes = match case.w {
        DType::P4 | DType::P8 => {
            let source = if case.w == DType::P4 { DType::Q4_1 } else { DType::Q8_0 };
            let blocks = random_blocks(rng, source, n * k);
            let mut packed = vec![0; case.w.bytes(n * k)];
            pack::pack_rows(source, &blocks, n, k, &mut packed);
            packed
        }
        dtype => encode(dtype, &rng.floats(n * k, 0.1)),
    };
    let w = Tensor::dense(layout.bytes(Region::Weights, "w", bytes), case.w, n as u32, k as u32);
    let cols = if case.silu { n / 2 } else { n };
    let y = layout.poison(case.x, case.rows, cols, 0);
    let epilogue = if case.silu { Epilogue::GateMul(Activation::Silu) } else { Epilogue::Store };
    let pick = Pick::Fixed;
    let linear = LinearChain { epilogue, pick, ..LinearChain::new(x, w, y) };
    (vec![Op::from(linear)], vec![y.span])
}

#[test]
fn a_product_does_not_depend_on_the_rows_beside_it() {
    let formats = [
        (DType::P4, DType::F32),
        (DType::P8, DType::F32),
        (DType::F32, DType::F32),
        (DType::BF16, DType::F32),
        (DType::BF16, DType::BF16),
    ];
    for (name, device) in devices() {
        for (w, x) in formats {
            if device.kind() == DeviceKind::Cuda && matches!(w, DType::P4 | DType::P8) {
                continue;
            }
            for silu in [false, true] {
                let of = |rows: usize| {
                    let case = Product { rows, w, x, silu };
                    run(&device, &|layout| product(&case, layout)).remove(0)
                };
                let all = of(MOST);
                for rows in [1, 2, 3, 4, 5, 8, 11, 12, 16, 17, 31, 33] {
                    let some = of(rows);
                    assert!(some == all[..some.len()], "{rows} rows of {w:?}·{x:?} on {name}");
                }
            }
        }
    }
}

/// One sequence of 90 tokens in pages, and the part of it that a step feeds.
#[derive(Clone, Copy)]
struct Feed {
    from: usize,
    to: usize,
    single: bool,
    fixed: bool,
    group: usize,
    window: Option<u32>,
    half: DType,
    /// Another row before it, of the same sequence's first tokens.
    company: usize,
}

const LENGTH: usize = 90;
const PAGE: usize = 16;
const HEADS: usize = 2;
const DIM: usize = 64;

fn attend(feed: &Feed, layout: &mut Layout) -> (Vec<Op>, Vec<Span>) {
    let Feed { from, to, single, group, company, .. } = *feed;
    let rows = if company > 0 { 2 } else { 1 };
    let tokens = company + to - from;
    let per_seat = LENGTH.div_ceil(PAGE);
    let limits = StepLimits {
        seats: 2,
        rows: rows as u32,
        tokens: tokens as u32,
        pages_per_seat: per_seat as u32,
        page_size: PAGE as u32,
        vocab: 32,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    };
    let state = layout.state(limits);
    // Both seats read the same pages.
    let pages: Vec<u32> = (0..3 * per_seat).map(|i| 1 + (i % per_seat) as u32).collect();
    let mut lengths = vec![to as u32];
    let mut starts = vec![0, tokens as u32];
    let mut positions: Vec<u32> = (from as u32..to as u32).collect();
    if company > 0 {
        lengths.insert(0, company as u32);
        starts.insert(1, company as u32);
        positions.splice(0..0, 0..company as u32);
    }
    let token_row: Vec<u32> = (0..tokens).map(|t| u32::from(company > 0 && t >= company)).collect();
    let mut counts = vec![0u32; count::WORDS as usize];
    counts[count::ROWS as usize] = rows as u32;
    counts[count::TOKENS as usize] = tokens as u32;
    counts[count::MAX_KV as usize] = to as u32;
    counts[count::SPLIT as usize] = 16;
    let seats: Vec<u32> = (0..rows as u32).collect();
    for (tensor, words) in [
        (&state.page_table, &pages),
        (&state.row_seat, &seats),
        (&state.kv_len, &lengths),
        (&state.q_start, &starts),
        (&state.position, &positions),
        (&state.token_row, &token_row),
        (&state.counts, &counts),
    ] {
        layout.set(tensor.span, words_to_bytes(words));
    }
    let rng = &mut Rng::new(77);
    let elems = (1 + per_seat) * 2 * HEADS * PAGE * DIM;
    let span = layout.bytes(Region::Kv, "kv", encode(feed.half, &rng.floats(elems, 1.0)));
    let kv = KvLayer {
        span,
        scales: None,
        latent: None,
        dtype: feed.half,
        pages: 1 + per_seat as u32,
        page_size: PAGE as u32,
        heads: HEADS as u32,
        head_dim: DIM as u32,
    };
    let cols = HEADS * (group + 2) * DIM;
    let all = rng.floats(LENGTH * cols, 2.0);
    let values: Vec<f32> =
        positions.iter().flat_map(|&p| all[p as usize * cols..][..cols].to_vec()).collect();
    let qkv = layout.floats(feed.half, tokens, cols, 0, &values);
    let q_heads = (HEADS * group) as u32;
    let out = layout.poison(feed.half, tokens, HEADS * group * DIM, 0);
    let attention = Attention {
        qkv,
        q_heads,
        kv,
        state,
        out,
        scale: 0.125,
        softcap: None,
        sinks: None,
        window: feed.window,
        causal: true,
        rows: rows as u32,
        single,
        even: None,
        last_only: false,
        scratch: None,
        pick: if feed.fixed { Pick::Fixed } else { Pick::Best },
    };
    let row = feed.half.bytes(out.stride as usize) as u64;
    let mine = out.span.part(company as u64 * row, (to - from) as u64 * row);
    (vec![Op::from(attention)], vec![mine])
}

/// Whether tokens get the same results whatever else is in the step.
fn same_everywhere(device: &device::Device, base: Feed) -> bool {
    let of = |feed: Feed| run(device, &|layout| attend(&feed, layout)).remove(0);
    let all = of(Feed { from: 0, to: LENGTH, ..base });
    let row = all.len() / LENGTH;
    let cut = [(0, 1), (40, 41), (89, 90), (10, 12), (13, 29), (29, 90), (33, 34), (31, 64)];
    cut.into_iter().all(|(from, to)| {
        [0, 9].into_iter().all(|company| {
            let part = of(Feed { from, to, company, ..base });
            let alone = to - from == 1 && company == 0;
            let single = !alone || of(Feed { from, to, single: true, ..base }) == part;
            single && part == all[from * row..to * row]
        })
    })
}

#[test]
fn attention_does_not_depend_on_the_tokens_beside_it() {
    for (name, device) in devices() {
        let mut differs = 0;
        for half in [DType::F16, DType::BF16] {
            for group in [1, 3, 4] {
                for window in [None, Some(33)] {
                    let base = Feed {
                        from: 0,
                        to: 0,
                        single: false,
                        fixed: true,
                        group,
                        window,
                        half,
                        company: 0,
                    };
                    let what = format!("{half:?}, group {group}, window {window:?} on {name}");
                    assert!(same_everywhere(&device, base), "{what}");
                    differs += u32::from(!same_everywhere(&device, Feed { fixed: false, ..base }));
                }
            }
        }
        // The kernels of other processors process one token at a time.
        let several = device.kind() == DeviceKind::Cuda || device.describe().contains("avx512");
        assert_eq!(differs > 0, several, "{name}: {differs} of 12 cases differ by default");
    }
}
