//! Linears whose weights have scales: every format, kernel and epilogue.

use crate::support::*;
use device::op::{Activation, Epilogue, LinearChain, Noise, Norm};
use device::scaled::{self, Chunk, e4m3};
use device::variant::Pick;
use device::{DType, Op, Region, Tensor};

const TYPES: [DType; 7] = [
    DType::F8Row,
    DType::F8Block,
    DType::F8Pairs,
    DType::F8Turns,
    DType::I4,
    DType::I4G64,
    DType::I4G32,
];

fn weights(layout: &mut Layout, rng: &mut Rng, dtype: DType, rows: usize, cols: usize) -> Tensor {
    // Rows and columns of different sizes: a wrong scale shows.
    let size: Vec<f32> = (0..rows).map(|_| 0.02 + 0.1 * rng.float().abs()).collect();
    let floats: Vec<f32> = (0..rows * cols).map(|i| rng.float() * size[i / cols]).collect();
    stored(layout, dtype, (rows, cols), &floats)
}

/// A matrix of floats in a type with scales.
pub(crate) fn stored(
    layout: &mut Layout,
    dtype: DType,
    (rows, cols): (usize, usize),
    floats: &[f32],
) -> Tensor {
    let mut chunk = Chunk::new(dtype, (rows, cols), 0..rows);
    chunk.quantise(floats);
    let mut bytes = vec![0; dtype.matrix_bytes(rows, cols)];
    for (at, part) in chunk.parts() {
        bytes[at as usize..][..part.len()].copy_from_slice(&part);
    }
    let span = layout.bytes(Region::Weights, "w", bytes);
    Tensor::dense(span, dtype, rows as u32, cols as u32)
}

/// Numbers that e4m3 holds: every 128 columns of a row have the largest value, so that quantising them again with a
/// scale for 128 columns or for a row changes nothing.
pub(crate) fn exact(rng: &mut Rng, rows: usize, cols: usize) -> Vec<f32> {
    let value = |i: usize, rng: &mut Rng| {
        let byte = rng.below(0x6f) as u8 | (rng.below(2) as u8) << 7;
        if i % 128 == 5 { 7.0 } else { e4m3::decode(byte) / 64.0 }
    };
    (0..rows * cols).map(|i| value(i % cols, rng)).collect()
}

#[derive(Clone, Copy, Debug)]
struct Case {
    w: DType,
    /// Rows, output columns, inner dimension, live rows.
    shape: (usize, usize, usize, usize),
    variant: Option<&'static str>,
    norm: bool,
    bias: bool,
    gate: bool,
}

fn check(seed: u64, case: Case) {
    let Case { w: dtype, shape: (rows, n, k, live), variant, norm, bias, gate } = case;
    let half = DType::BF16;
    let residual = !gate && !bias;
    let build = |layout: &mut Layout| {
        let rng = &mut Rng::new(seed);
        let mut values = exact(rng, rows, k);
        values[live * k..].fill(f32::NAN);
        let x = layout.floats(half, rows, k, 0, &values);
        let w = weights(layout, rng, dtype, n, k);
        let norm = norm.then(|| {
            let weight: Vec<f32> = rng.floats(k, 0.5).iter().map(|w| w + 1.0).collect();
            Norm { weight: layout.floats(half, 1, k, 0, &weight), eps: 1e-5 }
        });
        let bias = bias.then(|| layout.floats(DType::F32, 1, n, 0, &rng.floats(n, 1.0)));
        let (epilogue, y) = match (gate, residual) {
            (true, _) => (Epilogue::GateMul(Activation::Silu), layout.poison(half, rows, n / 2, 0)),
            (_, true) => {
                let y = layout.floats(half, rows, n, 0, &rng.floats(rows * n, 1.0));
                (Epilogue::Residual(y), y)
            }
            _ => (Epilogue::Store, layout.poison(half, rows, n, 8)),
        };
        let bytes = (live * y.stride as usize * 2) as u64;
        let counted = (live < rows).then(|| layout.words(&[live as u32]).span);
        let pick = variant.map_or(Pick::Best, |name| Pick::Named(name.parse().expect("a variant")));
        let linear =
            LinearChain { norm, bias, epilogue, live: counted, pick, ..LinearChain::new(x, w, y) };
        (vec![Op::from(linear)], vec![y.span.part(0, bytes.min(y.span.len))])
    };
    against_reference(&build, &|device, want, got| {
        let what = format!("{case:?} on {device}");
        // Normalised rows are rounded to e4m3 by some kernels: by 2⁻⁴ at most, 2.6 % on average, and independently.
        if norm && scaled::is_fp8(dtype) && rows > 8 {
            return assert_near(&what, 0.04, &decode(half, &want[0]), &decode(half, &got[0]));
        }
        let scale = if norm { 4.0 } else { 1.0 } * (k as f32).sqrt();
        assert_close(&what, half, scale, &want[0], &got[0]);
    });
}

/// The error of all elements is at most `most` of their size. Elements that are no part of the result are NaN in both.
#[track_caller]
pub(crate) fn assert_near(what: &str, most: f64, want: &[f32], got: &[f32]) {
    let (mut error, mut size) = (0.0, 0.0);
    for (want, got) in want.iter().zip(got).filter(|(want, _)| !want.is_nan()) {
        assert!(got.is_finite(), "{what}: {got} instead of {want}");
        error += f64::from(want - got).powi(2);
        size += f64::from(*want).powi(2);
    }
    let error = (error / size).sqrt();
    assert!(error <= most, "{what}: {error}");
}

/// Small and odd shapes, which every device computes with the kernel for all formats.
#[test]
fn every_format_in_any_shape() {
    let rng = &mut Rng::new(31);
    for (seed, w) in TYPES.into_iter().chain(TYPES).enumerate() {
        let rows = 1 + rng.below(6);
        let (n, k) = match scaled::group(w) {
            Some(group) => (16 * (1 + rng.below(5)), group * (1 + rng.below(4))),
            None => (2 * (1 + rng.below(200)), 16 * (1 + rng.below(20))),
        };
        let (norm, bias) = (rng.below(2) == 0, rng.below(3) == 0);
        let gate = w == DType::F8Pairs || (w != DType::F8Block && rng.below(2) == 0);
        let shape = (rows, n, k, rows);
        check(3100 + seed as u64, Case { w, shape, variant: None, norm, bias, gate });
    }
}

fn kinds() -> impl Iterator<Item = (DType, bool)> {
    let gated = [DType::F8Pairs, DType::F8Row, DType::I4, DType::I4G32].map(|w| (w, true));
    let others = [DType::F8Block, DType::F8Row, DType::I4, DType::I4G64].map(|w| (w, false));
    gated.into_iter().chain(others)
}

/// Few rows: weights are widened in registers, with x in registers and in shared memory.
#[test]
fn few_rows_by_stream() {
    for (w, gate) in kinds() {
        for (at, rows) in [1, 2, 3, 5, 8].into_iter().enumerate() {
            for (k, norm, bias) in
                [(512, true, true), (2048, false, false), (9216, at % 2 == 0, false)]
            {
                if k == 9216 && rows == 5 {
                    continue;
                }
                let case = Case { w, shape: (rows, 256, k, rows), variant: None, norm, bias, gate };
                check(3200 + at as u64, case);
            }
        }
    }
}

/// More rows by `wgmma`, x in e4m3 or bf16, K split or not, one tile of tokens or several.
#[test]
fn rows_by_wgmma() {
    for (w, gate) in kinds() {
        for (at, (rows, live)) in
            [(9, 9), (40, 33), (64, 64), (128, 128), (200, 177)].into_iter().enumerate()
        {
            let bytes: &[&str] =
                if scaled::group(w).is_some() { &[""] } else { &[",bytes=0", ",bytes=1"] };
            for bytes in bytes {
                for tile in
                    ["wide=64,split=1", "wide=64,split=2", "wide=128,split=1", "wide=192,split=1"]
                {
                    let variant: &'static str = format!("wgmma,{tile}{bytes}").leak();
                    // Clusters have one tile each.
                    if tile.ends_with('2') && rows > 128 {
                        continue;
                    }
                    let (norm, bias) = (at % 3 == 1, at % 2 == 0);
                    let shape = (rows, 512, 256, live);
                    check(
                        3300 + at as u64,
                        Case { w, shape, variant: Some(variant), norm, bias, gate },
                    );
                }
            }
        }
    }
}

/// Few rows of a long x: two blocks have half of it each.
#[test]
fn blocks_that_share_k() {
    for (w, gate) in kinds().filter(|(_, gate)| !gate) {
        for (at, rows) in [3, 8].into_iter().enumerate() {
            for (n, bias) in [(256, true), (4128, false)] {
                // Blocks of 128 rows have a scale.
                let n = if w == DType::F8Block { n / 128 * 128 } else { n };
                let shape = (rows, n, 9216, rows);
                let case = Case { w, shape, variant: None, norm: false, bias, gate };
                check(3500 + at as u64, case);
            }
        }
    }
}

/// Warpgroups of a block that take turns with K, as many chunks for each or not, one tile of a block or several.
#[test]
fn warpgroups_that_take_turns() {
    let bytes = [(DType::F8Pairs, true), (DType::F8Block, false), (DType::F8Row, false)];
    let int4 = [(DType::I4, true), (DType::I4, false), (DType::I4G32, false), (DType::I4G64, true)];
    for (w, gate) in bytes.into_iter().chain(int4) {
        for (at, (rows, live)) in [(9, 9), (40, 33), (64, 64)].into_iter().enumerate() {
            for tile in [
                "wide=64,split=1,turns=2",
                "wide=64,split=1,turns=3",
                "wide=64,split=2,turns=4",
                "wide=128,split=1,turns=2",
            ] {
                let variant: &'static str = format!("wgmma,{tile}").leak();
                // More tiles than multiprocessors.
                let many = at == 2 && tile.ends_with("turns=3") && w != DType::F8Row;
                let (n, k) = if many { (8704, 768) } else { (512, 1280) };
                let shape = (rows, n, k, live);
                let (norm, bias) = (at == 1, at == 2);
                check(
                    3600 + at as u64,
                    Case { w, shape, variant: Some(variant), norm, bias, gate },
                );
            }
        }
    }
}

/// Many rows by tiles of e4m3, or with weights widened to bf16 before.
#[test]
fn many_rows() {
    for (w, gate) in kinds() {
        for (at, (rows, live)) in [(300, 300), (520, 257), (640, 1)].into_iter().enumerate() {
            for variant in ["tiles", "widen"] {
                if scaled::group(w).is_some() && variant == "tiles" {
                    continue;
                }
                for norm in [false, true] {
                    let shape = (
                        rows,
                        768,
                        384 + 128 * (at % 2)
                            + if scaled::group(w).is_some() { 128 - 128 * (at % 2) } else { 0 },
                        live,
                    );
                    let case = Case { w, shape, variant: Some(variant), norm, bias: false, gate };
                    check(3400 + at as u64, case);
                }
            }
        }
    }
}

/// The kernel that takes a row's sums in the same order whatever the others are.
#[test]
fn fixed_kernels() {
    for (w, gate) in kinds() {
        let rows = |layout: &mut Layout, rows: usize| {
            let rng = &mut Rng::new(35);
            let values = exact(rng, 200, 512);
            let x = layout.floats(DType::BF16, rows, 512, 0, &values[..rows * 512]);
            let w = weights(layout, rng, w, 768, 512);
            let cols = if gate { 384 } else { 768 };
            let y = layout.poison(DType::BF16, rows, cols, 0);
            let act = Epilogue::GateMul(Activation::Silu);
            let epilogue = if gate { act } else { Epilogue::Store };
            let linear = LinearChain { epilogue, pick: Pick::Fixed, ..LinearChain::new(x, w, y) };
            (vec![Op::from(linear)], vec![y.span.part(0, (cols * 2) as u64)])
        };
        for (name, device) in &devices() {
            let first = run(device, &|layout| rows(layout, 1));
            for many in [2, 9, 40, 129, 200] {
                assert_eq!(
                    run(device, &|layout| rows(layout, many)),
                    first,
                    "{w:?}, {many} rows on {name}"
                );
            }
        }
    }
}

/// Linears in MXFP4 have no kernel of their own on a GPU: the one for every format, and weights in bf16 for many rows.
#[test]
fn linears_of_mxfp4() {
    for (seed, rows) in [1usize, 3, 8, 9, 40].into_iter().enumerate() {
        let shape = (rows, [48, 96][seed % 2], [64, 192, 512][seed % 3], rows);
        let (w, gate) = (DType::Mxfp4, seed == 3);
        let case = Case { w, shape, variant: None, norm: false, bias: seed == 1, gate };
        check(60 + seed as u64, case);
    }
}

/// Weights from a seed have the same bits everywhere.
#[test]
fn noise_is_the_same_everywhere() {
    for dtype in TYPES.into_iter().chain([DType::Mxfp4]) {
        let (rows, cols) = (288, 256);
        let build = |layout: &mut Layout| {
            let bytes = vec![0xff; dtype.matrix_bytes(rows, cols)];
            let span = layout.bytes(Region::Weights, "w", bytes);
            let to = Tensor::dense(span, dtype, rows as u32, cols as u32);
            (vec![Op::Noise(Noise { to, seed: 3, mean: 0.0, scale: 0.04 })], vec![to.span])
        };
        against_reference(&build, &|device, want, got| {
            assert_eq!(want, got, "{dtype:?} on {device}");
        });
    }
}
