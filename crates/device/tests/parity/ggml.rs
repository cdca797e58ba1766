//! ggml numerics: the same bits as llama.cpp (`tools/ggml_goldens.py`), with every instruction set.

use crate::support::*;
use device::cpu::{Limit, Numerics, open_guarded, pack};
use device::op::{
    Activation, Attention, Epilogue, GateMul, KvLayer, Linear, LinearChain, Norm, Pairs, RopeKv,
};
use device::step::count;
use device::{DType, Device, Op, Region, StepLimits, StepState, Tensor};
use half::f16;

/// The parts of the golden file, in order.
struct Golden(&'static [u8]);

impl Golden {
    fn open() -> Golden {
        Golden(include_bytes!("../goldens/ggml.bin"))
    }

    fn bytes(&mut self) -> &'static [u8] {
        let (len, rest) = self.0.split_at(4);
        let (part, rest) = rest.split_at(bytes_to_words(len)[0] as usize);
        self.0 = rest;
        part
    }

    fn floats(&mut self) -> Vec<f32> {
        decode(DType::F32, self.bytes())
    }

    fn skip(&mut self, parts: usize) {
        (0..parts).for_each(|_| {
            self.bytes();
        });
    }
}

const WEIGHTS: [DType; 4] = [DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0];
const WEIGHT_PARTS: usize = 3 * WEIGHTS.len();
const SWIGLU_PARTS: usize = 5;
const ATTENTION_PARTS: usize = 8;
const ROTATION_PARTS: usize = 4;
const K_PARTS: usize = 1 + 4 * 4;

fn devices() -> Vec<(Limit, Device)> {
    let limits = [Limit::None, Limit::Avx512, Limit::Avx2, Limit::Portable];
    let open = |limit| open_guarded(Some(2), Numerics::Ggml, limit).expect("a CPU");
    limits.map(|limit| (limit, open(limit))).into()
}

#[track_caller]
fn same_bits(what: &str, build: Build<'_>, want: &[f32]) {
    for (limit, device) in devices() {
        let got = decode(DType::F32, &run(&device, build)[0]);
        assert_eq!(got.len(), want.len());
        let wrong: Vec<usize> =
            (0..got.len()).filter(|&i| got[i].to_bits() != want[i].to_bits()).collect();
        if let Some(&i) = wrong.first() {
            let (got, want, wrong, all) = (got[i], want[i], wrong.len(), got.len());
            panic!(
                "{what}, {limit:?}: {wrong} of {all} differ, the first is {i}: {got}, not {want}"
            );
        }
    }
}

fn packed(layout: &mut Layout, source: DType, blocks: &[u8], rows: usize, cols: usize) -> Tensor {
    let dtype = pack::packed_dtype(source, rows, cols).expect("rows that can be packed");
    let mut bytes = vec![0; dtype.bytes(rows * cols)];
    pack::pack_rows(source, blocks, rows, cols, &mut bytes);
    let span = layout.bytes(Region::Weights, "w", bytes);
    Tensor::dense(span, dtype, rows as u32, cols as u32)
}

#[test]
fn products() {
    let golden = &mut Golden::open();
    let (n, k) = (32, 160);
    for source in WEIGHTS {
        let (blocks, x, want) = (golden.bytes(), golden.floats(), golden.floats());
        for rows in [1, 2, x.len() / k] {
            let build = |layout: &mut Layout| {
                let x = layout.floats(DType::F32, rows, k, 0, &x[..rows * k]);
                let w = packed(layout, source, blocks, n, k);
                let y = layout.poison(DType::F32, rows, n, 0);
                (vec![Op::Linear(Linear::new(x, w, y))], vec![y.span])
            };
            same_bits(&format!("{source:?}, {rows} rows"), &build, &want[..rows * n]);
        }
    }
}

/// Sums are in another order for a single row, for few rows and for many.
#[test]
fn products_of_blocks_of_256() {
    let golden = &mut Golden::open();
    golden.skip(WEIGHT_PARTS + SWIGLU_PARTS + ATTENTION_PARTS + ROTATION_PARTS);
    let (k, x) = (512, golden.floats());
    for (source, n) in [(DType::Q4K, 40), (DType::Q4K, 36), (DType::Q5K, 40), (DType::Q6K, 40)] {
        let blocks = golden.bytes();
        for rows in [1, 5, x.len() / k] {
            let want = golden.floats();
            let build = |layout: &mut Layout| {
                let x = layout.floats(DType::F32, rows, k, 0, &x[..rows * k]);
                let w = layout.bytes(Region::Weights, "w", blocks.to_vec());
                let w = Tensor::dense(w, source, n as u32, k as u32);
                let y = layout.poison(DType::F32, rows, n, 0);
                (vec![Op::Linear(Linear::new(x, w, y))], vec![y.span])
            };
            same_bits(&format!("{source:?}, {n} by {rows} rows"), &build, &want);
        }
    }
}

#[test]
fn norm_products_and_swiglu() {
    let golden = &mut Golden::open();
    golden.skip(WEIGHT_PARTS);
    let (n, k) = (32, 576);
    let (x, weight, gate, up) = (golden.floats(), golden.floats(), golden.bytes(), golden.bytes());
    let want = golden.floats();
    let row_bytes = gate.len() / n;
    let alternating: Vec<u8> = gate
        .chunks_exact(row_bytes)
        .zip(up.chunks_exact(row_bytes))
        .flat_map(|(gate, up)| [gate, up].concat())
        .collect();
    let build = |layout: &mut Layout| {
        let rows = x.len() / k;
        let x = layout.floats(DType::F32, rows, k, 0, &x);
        let w = packed(layout, DType::Q4_1, &alternating, 2 * n, k);
        let weight = layout.floats(DType::F32, 1, k, 0, &weight);
        let y = layout.poison(DType::F32, rows, n, 0);
        let norm = Some(Norm { weight, eps: 1e-5 });
        let op = LinearChain {
            norm,
            epilogue: Epilogue::GateMul(Activation::Silu),
            ..LinearChain::new(x, w, y)
        };
        (vec![Op::from(op)], vec![y.span])
    };
    same_bits("norm, gate and up", &build, &want);
}

/// ggml looks GELU up in a table with one f16 result for each f16 input, except beyond ±10. The table is made with
/// the C library's tanh in f32, so that a result may be the neighbour of what f64 rounds to.
#[test]
fn gelu_is_a_table_of_halves() {
    let gates: Vec<f32> = (-24_000..=24_000).map(|i| i as f32 * 5.013e-4).collect();
    let build = |layout: &mut Layout| {
        let pairs: Vec<f32> = gates.iter().flat_map(|gate| [*gate, 1.0]).collect();
        let x = layout.floats(DType::F32, 1, pairs.len(), 0, &pairs);
        let y = layout.poison(DType::F32, 1, gates.len(), 0);
        let op = GateMul { x, act: Activation::GeluTanh, y, live: None };
        (vec![Op::GateMul(op)], vec![y.span])
    };
    for (limit, device) in devices() {
        let got = decode(DType::F32, &run(&device, &build)[0]);
        for (&gate, &got) in gates.iter().zip(&got) {
            if gate.abs() >= 10.0 {
                assert_eq!(got, gate.max(0.0), "{limit:?}: gelu({gate})");
                continue;
            }
            let x = f64::from(f16::from_f32(gate));
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            let want = f16::from_f64(0.5 * x * (1.0 + inner.tanh()));
            let half = f16::from_f32(got);
            // 1 + tanh in f32 is accurate to 6e-8, which x/2 multiplies.
            let near = half.to_bits().abs_diff(want.to_bits()) <= 1
                || (f64::from(half) - f64::from(want)).abs() < 4e-7;
            assert!(near && half.to_f32() == got, "{limit:?}: gelu({gate}) = {got}, not {want}");
        }
    }
}

/// Heads of a layer.
#[derive(Clone, Copy)]
struct Heads {
    heads: usize,
    kv_heads: usize,
    dim: usize,
}

const SMALL: Heads = Heads { heads: 6, kv_heads: 2, dim: 64 };
const LARGE: Heads = Heads { heads: 4, kv_heads: 1, dim: 256 };

/// Heads × tokens × elements to tokens × heads × elements, or back.
fn swapped(values: &[f32], outer: usize, dim: usize) -> Vec<f32> {
    let inner = values.len() / outer / dim;
    let at = |i: usize, o: usize| &values[(o * inner + i) * dim..][..dim];
    (0..inner).flat_map(|i| (0..outer).flat_map(move |o| at(i, o))).copied().collect()
}

#[test]
fn attention() {
    let golden = &mut Golden::open();
    golden.skip(WEIGHT_PARTS + SWIGLU_PARTS);
    (0..2).for_each(|_| same_attention(golden, SMALL, None));
    golden.skip(ROTATION_PARTS + K_PARTS);
    (0..2).for_each(|_| same_attention(golden, LARGE, Some(20)));
}

fn same_attention(golden: &mut Golden, shape: Heads, window: Option<u32>) {
    let Heads { heads, kv_heads, dim } = shape;
    let q = golden.floats();
    let (k, v) = (golden.bytes(), golden.bytes());
    let want = golden.floats();
    let tokens = q.len() / heads / dim;
    let len = k.len() / 2 / kv_heads / dim;
    let build = |layout: &mut Layout| {
        let (state, kv) = lay_out(layout, shape, [k, v], tokens, len);
        let q = swapped(&q, heads, dim);
        let attention: Attention = Attention {
            qkv: layout.floats(DType::F32, tokens, heads * dim, 0, &q),
            q_heads: heads as u32,
            kv,
            state,
            out: layout.poison(DType::F32, tokens, heads * dim, 0),
            scale: (dim as f32).powf(-0.5),
            softcap: None,
            sinks: None,
            window,
            causal: true,
            rows: 1,
            single: tokens == 1,
            even: None,
            last_only: false,
            scratch: None,
            pick: Default::default(),
        };
        let out = attention.out.span;
        (vec![Op::from(attention)], vec![out])
    };
    let what = format!("{tokens} tokens at the end of {len}, window {window:?}");
    same_bits(&what, &build, &swapped(&want, heads, dim));
}

/// Rotation of neighbours and of halves, as in llama.cpp's graphs. A processor without fused multiply-adds rounds
/// twice.
#[test]
fn rotation() {
    let golden = &mut Golden::open();
    golden.skip(WEIGHT_PARTS + SWIGLU_PARTS + ATTENTION_PARTS + 1);
    // Pairs of (1, 0) become cosine and sine.
    let turned = golden.floats();
    let every = |from: usize| turned.iter().skip(from).step_by(2).copied();
    let (cos, sin): (Vec<f32>, Vec<f32>) = (every(0).collect(), every(1).collect());
    let half = SMALL.dim / 2;
    let table = cos.chunks_exact(half).zip(sin.chunks_exact(half));
    let table: Vec<f32> = table.flat_map(|(cos, sin)| [cos, sin].concat()).collect();
    same_rotation(SMALL, Pairs::Neighbours, &table, &golden.floats(), &golden.floats());
    golden.skip(K_PARTS + ATTENTION_PARTS);
    let table = golden.floats();
    same_rotation(LARGE, Pairs::Halves, &table, &golden.floats(), &golden.floats());
}

fn same_rotation(shape: Heads, pairs: Pairs, table: &[f32], q: &[f32], want: &[f32]) {
    let Heads { heads, kv_heads, dim } = shape;
    let tokens = table.len() / dim;
    let cols = (heads + 2 * kv_heads) * dim;
    let build = |layout: &mut Layout| {
        let (state, kv) = lay_out(layout, shape, [&[], &[]], tokens, tokens);
        let mut rows = Vec::new();
        for q in q.chunks_exact(heads * dim) {
            rows.extend_from_slice(q);
            rows.resize(rows.len() + 2 * kv_heads * dim, 0.5);
        }
        let qkv = layout.floats(DType::F32, tokens, cols, 0, &rows);
        let rope = layout.floats(DType::F32, tokens, dim, 0, table);
        let (q_heads, q_norm, k_norm) = (heads as u32, None, None);
        let op = RopeKv { qkv, out: qkv, q_heads, q_norm, k_norm, rope, pairs, state, kv };
        (vec![Op::RopeKv(op)], vec![qkv.span])
    };
    for limit in [Limit::None, Limit::Avx2] {
        let device = open_guarded(Some(2), Numerics::Ggml, limit).expect("a CPU");
        let fused = device.describe().contains("avx2");
        let got = decode(DType::F32, &run(&device, &build)[0]);
        let rows = got.chunks_exact(cols).zip(want.chunks_exact(heads * dim));
        for (i, (got, want)) in rows.flat_map(|(got, want)| got.iter().zip(want)).enumerate() {
            let same = got.to_bits() == want.to_bits();
            let near = !fused && (got - want).abs() < 1e-5;
            assert!(same || near, "{pairs:?}, {i}: {got}, not {want}");
        }
    }
}

/// One row of `tokens` at the end of `len` positions, on pages in order.
fn lay_out(
    layout: &mut Layout,
    shape: Heads,
    kv: [&[u8]; 2],
    tokens: usize,
    len: usize,
) -> (StepState, KvLayer) {
    let Heads { kv_heads, dim, .. } = shape;
    let size = 16;
    let pages = len.div_ceil(size);
    let limits = StepLimits {
        seats: 1,
        rows: 1,
        tokens: tokens as u32,
        pages_per_seat: pages as u32,
        page_size: size as u32,
        vocab: 32,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    };
    let state = layout.state(limits);
    let mut counts = vec![0u32; count::WORDS as usize];
    (counts[count::ROWS as usize], counts[count::TOKENS as usize]) = (1, tokens as u32);
    counts[count::MAX_KV as usize] = len as u32;
    let mut table: Vec<u32> = (1..=pages as u32).collect();
    table.resize(2 * pages, 0);
    for (tensor, words) in [
        (&state.page_table, table),
        (&state.row_seat, vec![0]),
        (&state.kv_len, vec![len as u32]),
        (&state.q_start, vec![0, tokens as u32]),
        (&state.position, (0..tokens as u32).collect()),
        (&state.kv_slot, (0..tokens as u32).map(|t| size as u32 + t).collect()),
        (&state.counts, counts),
    ] {
        layout.set(tensor.span, words_to_bytes(&words));
    }
    // From heads × positions to pages × (k, v) × heads × positions.
    let mut bytes = vec![0xffu8; (pages + 1) * 2 * kv_heads * size * dim * 2];
    for (part, values) in kv.into_iter().enumerate() {
        for (at, line) in values.chunks_exact(dim * 2).enumerate() {
            let (head, p) = (at / len, at % len);
            let slot = (((p / size + 1) * 2 + part) * kv_heads + head) * size + p % size;
            bytes[slot * dim * 2..][..dim * 2].copy_from_slice(line);
        }
    }
    let kv = KvLayer {
        span: layout.bytes(Region::Kv, "kv", bytes),
        scales: None,
        latent: None,
        dtype: DType::F16,
        pages: pages as u32 + 1,
        page_size: size as u32,
        heads: kv_heads as u32,
        head_dim: dim as u32,
    };
    (state, kv)
}
