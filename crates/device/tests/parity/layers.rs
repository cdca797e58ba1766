//! Layers as one node against their members run in order: ragged rows, pad rows, NaN wherever no live token is. On a
//! GPU that has the kernel for it, this is the persistent kernel.

use crate::attention::{Case, Laid, Row, lay_out};
use crate::support::*;
use device::cuda::lower::{exchange_bytes, unfit_layers};
use device::op::{
    Activation, AttentionChain, Epilogue, Fused, FusedKernel, LinearChain, Norm, Pairs,
};
use device::{DType, Op, Region, Tensor};

fn matrix(layout: &mut Layout, rng: &mut Rng, rows: usize, cols: usize) -> Tensor {
    let values = rng.floats(rows * cols, 2.0 / (cols as f32).sqrt());
    layout.floats(DType::BF16, rows, cols, 0, &values)
}

fn norm(layout: &mut Layout, rng: &mut Rng, dtype: DType, cols: usize) -> Norm {
    let values: Vec<f32> = rng.floats(cols, 0.2).iter().map(|v| 1.0 + v).collect();
    Norm { weight: layout.floats(dtype, 1, cols, 0, &values), eps: 1e-6 }
}

fn linear(x: Tensor, w: Tensor, norm: Option<Norm>, epilogue: Epilogue, y: Tensor) -> Op {
    Op::from(LinearChain { norm, epilogue, ..LinearChain::new(x, w, y) })
}

/// Two layers of a small hidden size.
fn layers(case: &Case, inner: usize, layout: &mut Layout) -> (Vec<Op>, Tensor) {
    let rng = &mut Rng::new(case.seed ^ 0x1A7E);
    let Laid { rope, attention } = lay_out(case, layout, false);
    let (hidden, rows) = (128, case.bucket_rows);
    let (cols, mixed) = (attention.qkv.cols as usize, attention.out.cols as usize);
    let x = layout.floats(DType::BF16, rows, hidden, 0, &rng.floats(rows * hidden, 1.0));
    let mid = layout.poison(DType::BF16, rows, inner, 0);
    let norms = if case.seed.is_multiple_of(3) { DType::F32 } else { DType::BF16 };
    let mut members = Vec::new();
    for _ in 0..2 {
        let (norm1, norm2) = (norm(layout, rng, norms, hidden), norm(layout, rng, norms, hidden));
        let mut rope = rope.clone();
        if case.seed.is_multiple_of(2) {
            rope.q_norm = Some(norm(layout, rng, norms, case.dim));
            rope.k_norm = Some(norm(layout, rng, norms, case.dim));
        }
        let (qkv, mix) = (attention.qkv, attention.out);
        let rope = Some(Box::new(rope));
        let attend = Op::from(AttentionChain { attention: attention.clone(), rope });
        let w_qkv = matrix(layout, rng, cols, hidden);
        let w_o = matrix(layout, rng, hidden, mixed);
        let w_up = matrix(layout, rng, 2 * inner, hidden);
        let w_down = matrix(layout, rng, hidden, inner);
        members.extend([
            linear(x, w_qkv, Some(norm1), Epilogue::Store, qkv),
            attend,
            linear(mix, w_o, None, Epilogue::Residual(x), x),
            linear(x, w_up, Some(norm2), Epilogue::GateMul(Activation::Silu), mid),
            linear(mid, w_down, None, Epilogue::Residual(x), x),
        ]);
    }
    (members, x)
}

fn case(seed: u64) -> Case {
    let rng = &mut Rng::new(seed);
    let row = |rng: &mut Rng| Row { q_len: 1, kv_len: 1 + rng.below(700) };
    let rows: Vec<Row> = (0..1 + seed as usize % 8).map(|_| row(rng)).collect();
    Case {
        seed,
        bucket_rows: (rows.len() + rng.below(2)).min(8),
        bucket_tokens: 0,
        rows,
        kv_heads: 1 + rng.below(2),
        group: rng.pick(&[1, 2, 3]),
        dim: rng.pick(&[64, 128]),
        page_size: 16,
        kv: DType::BF16,
        x: DType::BF16,
        single: true,
        softcap: None,
        sinks: false,
        window: None,
        causal: true,
        norms: false,
        pairs: Pairs::Halves,
    }
}

fn check(mut case: Case, inner: usize) {
    case.bucket_tokens = case.bucket_rows;
    let (seed, live) = (case.seed, case.rows.len() as u64);
    let build = |layout: &mut Layout| {
        let (members, x) = layers(&case, inner, layout);
        let one = |exchange| {
            let members = members.clone();
            Op::Fused(Fused { members, kernel: FusedKernel::Layers { exchange } })
        };
        // Enough for any GPU; it is zero at the start.
        let gpu = device::cuda::launch::Target::h200();
        let bytes = exchange_bytes(&one(None), &gpu);
        assert!(bytes > 0, "seed {seed}: {:?}", unfit_layers(&one(None), &gpu));
        let exchange = layout.bytes(Region::State, "exchange", vec![0; bytes as usize]);
        let row = x.span.len / u64::from(x.rows);
        (vec![one(Some(exchange))], vec![x.span.part(0, live * row)])
    };
    against_reference(&build, &|device, want, got| {
        let what = format!("seed {seed} on {device}");
        assert_close(&what, DType::BF16, 8.0, &want[0], &got[0]);
    });
}

#[test]
fn layers_as_one_node() {
    (0..8).for_each(|seed| check(case(seed), 512));
}

/// As wide as the kernel's registers allow with this many rows.
#[test]
fn wide_layers_as_one_node() {
    for (rows, inner, kv_heads, group) in
        [(1, 12 << 10, 2, 2), (2, 8 << 10, 2, 2), (4, 5 << 10, 8, 3), (8, 3 << 10, 4, 4)]
    {
        let all = (0..rows).map(|row| Row { q_len: 1, kv_len: 1 + 97 * row }).collect();
        let case = Case { rows: all, bucket_rows: rows, kv_heads, group, dim: 128, ..case(2) };
        check(case, inner);
    }
}
