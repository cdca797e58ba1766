//! y = epilogue(norm(x)·wᵀ + bias), every weight dtype, every epilogue.

use crate::support::*;
use device::cpu::{Limit, Numerics, pack};
use device::op::{Activation, Epilogue, Linear, LinearChain, Norm, NormHandoff};
use device::variant::{LinearVariant, Pick};
use device::{DType, Op, Region, Span, Tensor};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

struct Shape {
    rows: usize,
    n: usize,
    k: usize,
    w: DType,
    x: DType,
    y: DType,
}

fn weights(layout: &mut Layout, rng: &mut Rng, dtype: DType, rows: usize, cols: usize) -> Tensor {
    let bytes = match dtype {
        DType::F32 | DType::F16 | DType::BF16 => encode(dtype, &rng.floats(rows * cols, 0.1)),
        DType::P4 | DType::P8 => {
            let from: &[DType] = match dtype {
                DType::P4 => &[DType::Q4_0, DType::Q4_1],
                _ => &[DType::Q5_0, DType::Q5_1, DType::Q8_0],
            };
            let source = rng.pick(from);
            let blocks = random_blocks(rng, source, rows * cols);
            let mut packed = vec![0; dtype.bytes(rows * cols)];
            assert_eq!(pack::packed_dtype(source, rows, cols), Some(dtype));
            pack::pack_rows(source, &blocks, rows, cols, &mut packed);
            packed
        }
        _ => random_blocks(rng, dtype, rows * cols),
    };
    let span = layout.bytes(Region::Weights, "w", bytes);
    Tensor::dense(span, dtype, rows as u32, cols as u32)
}

fn case(layout: &mut Layout, seed: u64, shape: &Shape) -> (Vec<Op>, Vec<Span>) {
    let rng = &mut Rng::new(seed);
    let Shape { rows, n, k, w, x, y } = *shape;
    let gap = rng.pick(&[0, 0, 16]);
    let values = rng.floats(rows * k, 1.0);
    let x = layout.floats(x, rows, k, gap, &values);
    let w = weights(layout, rng, w, n, k);
    let norm = (rng.below(2) == 0).then(|| {
        let weight: Vec<f32> = rng.floats(k, 0.5).iter().map(|w| w + 1.0).collect();
        let dtype = rng.pick(&FLOATS);
        Norm { weight: layout.floats(dtype, 1, k, 0, &weight), eps: 1e-5 }
    });
    let bias = (rng.below(3) == 0).then(|| {
        let bias = rng.floats(n, 1.0);
        layout.floats(rng.pick(&FLOATS), 1, n, 0, &bias)
    });
    let (epilogue, y) = match rng.below(5) {
        0 if n % 2 == 0 => {
            let act = rng.pick(&[Activation::Silu, Activation::GeluTanh]);
            (Epilogue::GateMul(act), layout.poison(y, rows, n / 2, gap))
        }
        1 => {
            let residual = rng.floats(rows * n, 1.0);
            let residual = layout.floats(rng.pick(&FLOATS), rows, n, 0, &residual);
            (Epilogue::Residual(residual), layout.poison(y, rows, n, gap))
        }
        2 => {
            // In place: y is its own residual.
            let y = layout.floats(y, rows, n, gap, &rng.floats(rows * n, 1.0));
            (Epilogue::Residual(y), y)
        }
        3 => (Epilogue::Activate(rng.pick(&Activation::ALL)), layout.poison(y, rows, n, gap)),
        _ => (Epilogue::Store, layout.poison(y, rows, n, gap)),
    };
    let linear = LinearChain { bias, norm, epilogue, ..LinearChain::new(x, w, y) };
    (vec![Op::from(linear)], vec![y.span])
}

fn check(seed: u64, shape: &Shape) {
    against_reference(&|layout| case(layout, seed, shape), &|device, want, got| {
        let Shape { rows, n, k, w, .. } = shape;
        let what = format!("seed {seed}: {rows}×{n}×{k} {w:?} on {device}");
        // Sums of k products of about 0.05 each; a gate squares them.
        let mut scale = (*k as f32).sqrt();
        if shape.x != DType::F32 {
            // A norm may be rounded to the neighbouring value of x's dtype if the mean differs in its last bit: one
            // such flip per few hundred elements.
            scale *= 4.0;
        }
        assert_close(&what, shape.y, scale, &want[0], &got[0]);
    });
}

#[test]
fn plain_weights() {
    let rng = &mut Rng::new(1);
    for seed in 0..24 {
        let (rows, n, k) = (1 + rng.below(11), 1 + rng.below(70), 1 + rng.below(150));
        let (w, x, y) = (rng.pick(&FLOATS), rng.pick(&FLOATS), rng.pick(&FLOATS));
        check(seed, &Shape { rows, n, k, w, x, y });
    }
}

#[test]
fn quantised_weights_as_they_are() {
    let rng = &mut Rng::new(2);
    let small = [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0];
    let large = [DType::Q2K, DType::Q3K, DType::Q4K, DType::Q5K, DType::Q6K];
    for (seed, w) in small.into_iter().chain(large).enumerate() {
        let (rows, n) = (1 + rng.below(6), 1 + rng.below(20));
        let k = w.block_elems() * (1 + rng.below(3));
        check(100 + seed as u64, &Shape { rows, n, k, w, x: DType::F32, y: DType::F32 });
    }
}

/// What a GPU reads as it is for a few rows: eight at once, and turns of them.
#[test]
fn quantised_weights_of_few_rows() {
    let rng = &mut Rng::new(4);
    let small = [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0];
    let large = [DType::Q4K, DType::Q5K, DType::Q6K];
    for (seed, w) in small.into_iter().chain(large).cycle().take(24).enumerate() {
        let rows = rng.pick(&[1, 1, 2, 3, 4, 7, 8, 11, 16]);
        let (n, k) = (16 * (1 + rng.below(20)), 256 * (1 + rng.below(5)));
        let half = rng.pick(&[DType::F16, DType::BF16]);
        check(600 + seed as u64, &Shape { rows, n, k, w, x: half, y: half });
    }
}

#[test]
fn packed_weights() {
    let rng = &mut Rng::new(3);
    for seed in 0..40 {
        let w = rng.pick(&[DType::P4, DType::P8]);
        let rows = rng.pick(&[1, 1, 2, 3, 5, 8, 9, 16, 17, 33, 40]);
        let (n, k) = (16 * (1 + rng.below(6)), 32 * (1 + rng.below(8)));
        let (x, y) = (rng.pick(&[DType::F32, DType::F32, DType::BF16]), rng.pick(&FLOATS));
        check(200 + seed, &Shape { rows, n, k, w, x, y });
    }
}

/// Rows past the live count are unchanged or computed, and live rows never depend on them.
#[test]
fn rows_past_the_live_count_do_not_matter() {
    for (rows, live) in [(8usize, 3u32), (40, 17), (5, 0), (4, 9)] {
        for dtype in [DType::F32, DType::P4, DType::P8] {
            let build = |layout: &mut Layout| {
                let rng = &mut Rng::new(u64::from(live));
                let mut values = rng.floats(rows * 64, 1.0);
                let kept = (live as usize).min(rows);
                values[kept * 64..].fill(f32::NAN);
                let x = layout.floats(DType::F32, rows, 64, 0, &values);
                let w = weights(layout, rng, dtype, 32, 64);
                let y = layout.poison(DType::F32, rows, 32, 0);
                let live = Some(layout.words(&[live]).span);
                let linear = LinearChain { live, ..LinearChain::new(x, w, y) };
                (vec![Op::from(linear)], vec![y.span.part(0, kept as u64 * 32 * 4)])
            };
            against_reference(&build, &|device, want, got| {
                assert_close(device, DType::F32, 8.0, &want[0], &got[0]);
            });
        }
    }
}

/// Many rows by tiles (on a GPU that has them; elsewhere by whatever kernel there is): every epilogue, edges of tiles
/// in both directions, pad rows of NaN.
#[test]
fn many_rows_by_tiles() {
    for shape in [(300, 272, 128, 300), (520, 256, 64, 257), (256, 528, 192, 1)] {
        many_rows(shape, "tiles");
    }
}

/// The same by the library, with additions and activations of its own or as a launch after it.
#[test]
fn many_rows_by_the_library() {
    many_rows((300, 272, 128, 300), "gemm");
    many_rows((96, 64, 192, 96), "gemm");
}

/// The same with weight rows as the tall operand, for up to 256 rows: registers that move to the warpgroups that run
/// MMA; K split over blocks with one or two tiles of tokens each.
#[test]
fn up_to_256_rows_by_tall_tiles() {
    many_rows((256, 400, 640, 256), "wgmma,wide=192");
    many_rows((250, 1168, 192, 231), "wgmma,wide=192");
    many_rows((256, 400, 512, 256), "wgmma,wide=192,columns=128,split=2");
    many_rows((256, 400, 256, 256), "wgmma,wide=128,columns=128,split=1");
    many_rows((140, 336, 256, 129), "wgmma,wide=64,columns=64,split=2");
    // Shares of 14, 14 and 13 chunks.
    many_rows((64, 272, 2624, 61), "wgmma,wide=64,split=3");
    many_rows((168, 400, 256, 168), "wgmma,wide=192");
    many_rows((224, 272, 384, 217), "wgmma,wide=192,columns=112,split=2");
}

/// More rows in tiles that divide them: several rounds, the last of them not full; tiles of tokens that are not live; weight
/// rows that are no whole tile, and its half.
#[test]
fn many_rows_in_even_rounds() {
    many_rows((640, 400, 640, 640), "wgmma,wide=192,columns=160,split=1,even=1");
    many_rows((520, 272, 192, 130), "wgmma,wide=128,columns=144,split=1,even=1");
    many_rows((500, 2_064, 64, 1), "wgmma,wide=64,columns=64,split=1,even=1");
    many_rows((300, 400, 640, 290), "wgmma,wide=192,columns=104,split=1,even=1");
    many_rows((700, 9_232, 64, 449), "wgmma,wide=128,columns=256,split=1,even=1");
}

/// Tiles as wide as there are rows, rounded to eights, for every bucket that is no power of two.
#[test]
fn tiles_of_any_width() {
    for (rows, live) in [(13, 13), (24, 24), (40, 33), (48, 47), (80, 80), (104, 81)] {
        many_rows((rows, 400, 256, live), "wgmma,wide=64,split=2");
        many_rows((rows, 208, 192, live), "wgmma,wide=48,split=1");
        many_rows((rows, 272, 128, live), "wgmma,wide=192,split=1");
    }
}

/// Rows, columns, inner dimension and live rows of a linear by a variant, with every epilogue, with and without a bias.
fn many_rows((rows, n, k, live): (usize, usize, usize, u32), variant: &str) {
    let bf16 = [0, 1, 2, 3, 4, 5, 6, 7].map(|which| (which, DType::BF16));
    for (which, half) in bf16.into_iter().chain([(2, DType::F16), (3, DType::F16)]) {
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(700 + rows as u64);
            let mut values = rng.floats(rows * k, 1.0);
            values[live as usize * k..].fill(f32::NAN);
            let x = layout.floats(half, rows, k, 0, &values);
            let w = weights(layout, rng, half, n, k);
            let (epilogue, y) = match which {
                0 | 4 => (Epilogue::Store, layout.poison(half, rows, n, 8)),
                1 | 5 => {
                    let y = layout.floats(half, rows, n, 0, &rng.floats(rows * n, 1.0));
                    (Epilogue::Residual(y), y)
                }
                2 => (Epilogue::GateMul(Activation::Silu), layout.poison(half, rows, n / 2, 0)),
                6 => (Epilogue::Activate(Activation::Gelu), layout.poison(half, rows, n, 0)),
                7 => (Epilogue::Activate(Activation::Tanh), layout.poison(half, rows, n, 0)),
                _ => (Epilogue::GateMul(Activation::GeluTanh), layout.poison(half, rows, n / 2, 0)),
            };
            let bias = (which > 3).then(|| {
                let of = if which == 4 && variant != "gemm" { DType::F32 } else { half };
                layout.floats(of, 1, n, 0, &rng.floats(n, 1.0))
            });
            let live_bytes = half.bytes(live as usize * y.stride as usize) as u64;
            let live = Some(layout.words(&[live]).span);
            let pick = Pick::Named(variant.parse().expect("a variant"));
            let linear = LinearChain { bias, epilogue, live, pick, ..LinearChain::new(x, w, y) };
            (vec![Op::from(linear)], vec![y.span.part(0, live_bytes.min(y.span.len))])
        };
        against_reference(&build, &|device, want, got| {
            let what = format!("{variant}: {rows}×{n}×{k}, epilogue {which}, {half:?} on {device}");
            assert_close(&what, half, (k as f32).sqrt(), &want[0], &got[0]);
        });
    }
}

/// A linear prepares its result for the norm of the next one (on a GPU that can; elsewhere the norm is applied as
/// usual): every batch from one tile of tokens to several, K split or not, every epilogue after it, pad rows of NaN.
#[test]
fn a_product_prepares_the_input_of_the_next() {
    let shapes = [
        (9, 256, 64, 9, None),
        (16, 1024, 256, 11, None),
        (24, 512, 256, 23, None),
        (40, 256, 512, 40, None),
        (80, 512, 192, 77, None),
        (64, 512, 1024, 64, None),
        (100, 256, 128, 97, None),
        (300, 512, 64, 261, Some(LinearVariant::Tiles)),
        (256, 768, 576, 256, Some(LinearVariant::Tiles)),
        (520, 256, 128, 1, Some(LinearVariant::Tiles)),
    ];
    for (seed, (rows, n, k, live, variant)) in shapes.into_iter().enumerate() {
        for which in [0, 2] {
            let build = |layout: &mut Layout| {
                let rng = &mut Rng::new(800 + seed as u64);
                let half = DType::BF16;
                let mut values = rng.floats(rows * k, 1.0);
                values[live * k..].fill(f32::NAN);
                let x = layout.floats(half, rows, k, 0, &values);
                let mid = layout.floats(half, rows, n, 0, &rng.floats(rows * n, 1.0));
                let weight: Vec<f32> = rng.floats(n, 0.5).iter().map(|w| w + 1.0).collect();
                let weights_of_norm = layout.floats(half, 1, n, 0, &weight);
                let norm = Norm { weight: weights_of_norm, eps: 1e-5 };
                let (w, w2) = (weights(layout, rng, half, n, k), weights(layout, rng, half, 96, n));
                let (epilogue, cols) = if which == 0 {
                    (Epilogue::Store, 96)
                } else {
                    (Epilogue::GateMul(Activation::Silu), 48)
                };
                let y = layout.poison(half, rows, cols, 0);
                let counted = Some(layout.words(&[live as u32]).span);
                let asked = |linear: LinearChain| {
                    let pick = variant.map_or(Pick::Best, Pick::Named);
                    Op::from(LinearChain { live: counted, pick, ..linear })
                };
                let first = asked(LinearChain {
                    epilogue: Epilogue::Residual(mid),
                    handoff: NormHandoff::Produce(norm),
                    ..LinearChain::new(x, w, mid)
                });
                let (norm, handoff) = (Some(norm), NormHandoff::Consume);
                let second =
                    asked(LinearChain { norm, epilogue, handoff, ..LinearChain::new(mid, w2, y) });
                let live_bytes = |cols: usize| (live * cols * 2) as u64;
                let mut outs =
                    vec![mid.span.part(0, live_bytes(n)), y.span.part(0, live_bytes(cols))];
                outs.extend([w2.span, weights_of_norm.span]);
                (vec![first, second], outs)
            };
            against_reference(&build, &|device, want, got| {
                let what = format!("{rows}×{n}×{k}, epilogue {which} on {device}");
                assert_close(&what, DType::BF16, (k as f32).sqrt(), &want[0], &got[0]);
                let [mid, y, w2, weight] = [0, 1, 2, 3].map(|out| decode(DType::BF16, &got[out]));
                assert_normed_product(&what, which == 2, &mid, &weight, &w2, &y);
            });
        }
    }
}

/// `y` against norm and linear of `mid` in f64, with the roundings that a device may make.
///
/// Each of the n normalised inputs of a sum is rounded to bf16 once, by at most U = 2⁻⁸ of itself either way, before
/// it is multiplied by its weight: the term aᵢwᵢ is wrong by at most U·|aᵢwᵢ|. The roundings are independent, so
/// (Hoeffding) their sum exceeds 7·U·√Σ(aᵢwᵢ)² with a probability below 2·exp(−7²/2) = 5e-11; there are 20,000 sums.
/// Adding up in f32 is wrong by less than n·2⁻²⁴·Σ|aᵢwᵢ|, the scale by a few 2⁻²⁴ of itself. These add up to the
/// error e of a plain linear. For a gate g with error eₘ and an up u with error eᵤ, SiLU(g)·u is wrong by at most
/// 1.1·eₘ·|u| + |SiLU(g)|·eᵤ + 1.1·eₘ·eᵤ, because |SiLU′| < 1.1; its exponential and quotient are accurate to 2⁻²⁰.
/// The result is rounded to bf16 once more.
#[track_caller]
fn assert_normed_product(
    what: &str,
    silu: bool,
    mid: &[f32],
    weight: &[f32],
    w: &[f32],
    y: &[f32],
) {
    const U: f64 = 1.0 / 256.0;
    let n = weight.len();
    for (row, x) in mid.chunks_exact(n).enumerate() {
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n as f64;
        let scale = 1.0 / (mean + 1e-5).sqrt();
        let sums: Vec<(f64, f64)> = w
            .chunks_exact(n)
            .map(|w| {
                let terms = x.iter().zip(weight).zip(w);
                let terms =
                    terms.map(|((x, a), w)| f64::from(*x) * f64::from(*a) * scale * f64::from(*w));
                let (mut sum, mut squares, mut sizes) = (0.0, 0.0, 0.0);
                for term in terms {
                    (sum, squares, sizes) = (sum + term, squares + term * term, sizes + term.abs());
                }
                (sum, 7.0 * U * f64::sqrt(squares) + n as f64 * f64::from(f32::EPSILON) * sizes)
            })
            .collect();
        let wanted: Vec<(f64, f64)> = if silu {
            let of = |pair: &[(f64, f64)]| {
                let ((gate, gate_off), (up, up_off)) = (pair[0], pair[1]);
                let part = gate / (1.0 + (-gate).exp());
                let off = 1.1 * gate_off * (up.abs() + up_off) + part.abs() * up_off;
                (part * up, off + 1e-6 * (part * up).abs())
            };
            sums.chunks_exact(2).map(of).collect()
        } else {
            sums
        };
        for (i, (want, off)) in wanted.iter().enumerate() {
            let got = f64::from(y[row * wanted.len() + i]);
            let most = off + U * (want.abs() + off);
            let close = (got - want).abs() <= most;
            assert!(close, "{what}: row {row}, element {i} is {got}, should be {want} ± {most}");
        }
    }
}

/// A linear of packed weights is close to the exact one: quantising activations costs less than 1/127 of the largest
/// activation per term, and the errors are independent.
#[test]
fn packing_stays_close_to_exact() {
    let (rows, n, k) = (4, 32, 256);
    let reference = device::cpu::open(None, true).expect("a CPU");
    for source in [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0] {
        let product = |packed: bool| {
            run(&reference, &|layout: &mut Layout| {
                let rng = &mut Rng::new(7);
                let values = rng.floats(rows * k, 1.0);
                let x = layout.floats(DType::F32, rows, k, 0, &values);
                let blocks = random_blocks(rng, source, n * k);
                let (dtype, bytes) = match pack::packed_dtype(source, n, k) {
                    Some(dtype) if packed => {
                        let mut bytes = vec![0; dtype.bytes(n * k)];
                        pack::pack_rows(source, &blocks, n, k, &mut bytes);
                        (dtype, bytes)
                    }
                    _ => (source, blocks),
                };
                let w = layout.bytes(Region::Weights, "w", bytes);
                let w = Tensor::dense(w, dtype, n as u32, k as u32);
                let y = layout.poison(DType::F32, rows, n, 0);
                (vec![Op::Linear(Linear::new(x, w, y))], vec![y.span])
            })
        };
        let (exact, packed) = (product(false), product(true));
        let exact = decode(DType::F32, &exact[0]);
        let packed = decode(DType::F32, &packed[0]);
        let size = (exact.iter().map(|v| v * v).sum::<f32>() / exact.len() as f32).sqrt();
        let error = exact.iter().zip(&packed).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
        let error = (error / exact.len() as f32).sqrt();
        assert!(error < 0.01 * size, "{source:?}: error {error} of {size}");
    }
}

/// Many rows of floats: by default every sum is as close as bf16 in two parts, with [`Numerics::Exact`] as f32.
#[test]
fn floats_are_multiplied_as_closely_as_asked() {
    let (rows, n, k) = (40, 48, 384);
    let rng = &mut Rng::new(11);
    let (x, w) = (rng.floats(rows * k, 1.0), rng.floats(n * k, 1.0));
    for (numerics, most) in [(Numerics::Fast, 2e-5), (Numerics::Exact, 2e-6)] {
        let device = device::cpu::open_guarded(Some(2), numerics, Limit::None).expect("a CPU");
        let y = run(&device, &|layout: &mut Layout| {
            let x = layout.floats(DType::F32, rows, k, 0, &x);
            let span = layout.bytes(Region::Weights, "w", encode(DType::F32, &w));
            let w = Tensor::dense(span, DType::F32, n as u32, k as u32);
            let y = layout.poison(DType::F32, rows, n, 0);
            (vec![Op::Linear(Linear::new(x, w, y))], vec![y.span])
        });
        let y = decode(DType::F32, &y[0]);
        for (at, got) in y.iter().enumerate() {
            let terms = x[at / n * k..][..k].iter().zip(&w[at % n * k..][..k]);
            let products = terms.map(|(x, w)| f64::from(*x) * f64::from(*w));
            let (sum, squares) =
                products.fold((0.0, 0.0), |(sum, squares), p| (sum + p, squares + p * p));
            let off = (f64::from(*got) - sum).abs() / squares.sqrt();
            assert!(off < most, "{numerics:?}: sum {at} is off by {off:.1e} of its terms");
        }
    }
}
