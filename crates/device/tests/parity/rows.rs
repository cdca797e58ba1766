//! Ops that work row by row: embed, norms, add, add_gated, scale, gate_mul, gather, copy, fill, noise.

use crate::support::*;
use device::cpu::pack;
use device::op::{
    Activate, Activation, Add, AddGated, Copy, Embed, Fill, GateMul, Gather, LayerNorm, Lookup,
    Noise, Norm, Pool, Pooling, RmsNorm, RmsNormColumns, Scale,
};
use device::step::GIVEN_ROW;
use device::{DType, Op, Region, StepLimits, Tensor};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn rms_norm() {
    let rng = &mut Rng::new(1);
    for seed in 0..12 {
        let (rows, cols, gap) = (1 + rng.below(20), 1 + rng.below(300), rng.pick(&[0, 8]));
        let (from, to, weight) = (rng.pick(&FLOATS), rng.pick(&FLOATS), rng.pick(&FLOATS));
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(seed);
            let values = rng.floats(rows * cols, 3.0);
            let x = layout.floats(from, rows, cols, gap, &values);
            let weight = layout.floats(weight, 1, cols, 0, &rng.floats(cols, 1.0));
            let y = layout.poison(to, rows, cols, 0);
            let norm = Norm { weight, eps: 1e-6 };
            (vec![Op::RmsNorm(RmsNorm { x, norm, y })], vec![y.span])
        };
        against_reference(&build, &|device, want, got| {
            assert_close(&format!("seed {seed} {device}"), to, 1.0, &want[0], &got[0]);
        });
    }
}

/// Any types, ragged widths and offsets far from 0, in place or not, with and without a bias.
#[test]
fn layer_norm() {
    let rng = &mut Rng::new(13);
    for seed in 0..18 {
        let (rows, cols, gap) = (1 + rng.below(20), 1 + rng.below(3000), rng.pick(&[0, 8]));
        let cols = if seed % 2 == 0 { cols } else { cols.next_multiple_of(8) };
        let [from, to, w, b] = [(); 4].map(|()| rng.pick(&FLOATS));
        let (in_place, with_bias) = (seed % 3 == 0, seed % 4 < 2);
        // A mean that is large relative to the deviation, where computing with its square would lose digits.
        let mean = if from == DType::F32 { 30.0 } else { 1.0 };
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(seed);
            let values: Vec<f32> = rng.floats(rows * cols, 3.0).iter().map(|v| v + mean).collect();
            let x = layout.floats(from, rows, cols, gap, &values);
            let weight = layout.floats(w, 1, cols, 0, &rng.floats(cols, 1.0));
            let bias = layout.floats(b, 1, cols, 0, &rng.floats(cols, 1.0));
            let bias = with_bias.then_some(bias);
            let y = if in_place { x } else { layout.poison(to, rows, cols, gap) };
            (vec![Op::LayerNorm(LayerNorm { x, weight, bias, eps: 1e-5, y })], vec![y.span])
        };
        let to = if in_place { from } else { to };
        against_reference(&build, &|device, want, got| {
            assert_close(&format!("seed {seed} {device}"), to, 1.0, &want[0], &got[0]);
        });
    }
}

/// Each part is normalised like a separate matrix, and the columns beside it keep their bits.
#[test]
fn rms_norm_columns() {
    let reference = device::cpu::open(None, true).expect("a CPU");
    for (seed, dtype) in FLOATS.into_iter().cycle().take(9).enumerate() {
        let rng = &mut Rng::new(900 + seed as u64);
        let (rows, gap) = (1 + rng.below(12), rng.pick(&[0, 8]));
        let (from, cols, after) = (8 * rng.below(9), 1 + rng.below(300), rng.below(40));
        let all = from + cols + after;
        let values = rng.floats(rows * all, 3.0);
        let weights = rng.floats(cols, 1.0);
        let build = |layout: &mut Layout| {
            let x = layout.floats(dtype, rows, all, gap, &values);
            let weight = layout.floats(DType::F32, 1, cols, 0, &weights);
            let norm = Norm { weight, eps: 1e-6 };
            let op = RmsNormColumns { x, from: from as u32, norm, y: x };
            (vec![Op::RmsNormColumns(op)], vec![x.span])
        };
        let part: Vec<f32> =
            values.chunks_exact(all).flat_map(|row| row[from..from + cols].to_vec()).collect();
        let alone = run(&reference, &|layout: &mut Layout| {
            let x = layout.floats(dtype, rows, cols, 0, &part);
            let weight = layout.floats(DType::F32, 1, cols, 0, &weights);
            let y = layout.poison(dtype, rows, cols, 0);
            let norm = Norm { weight, eps: 1e-6 };
            (vec![Op::RmsNorm(RmsNorm { x, norm, y })], vec![y.span])
        });
        let alone = decode(dtype, &alone[0]);
        let before = decode(dtype, &encode(dtype, &values));
        against_reference(&build, &|device, want, got| {
            assert_close(&format!("seed {seed} {device}"), dtype, 1.0, &want[0], &got[0]);
            for bytes in [&want[0], &got[0]] {
                for (row, got) in decode(dtype, bytes).chunks(all + gap).enumerate() {
                    let old = &before[row * all..][..all];
                    assert_eq!(got[..from], old[..from], "seed {seed} {device}");
                    assert_eq!(got[from + cols..all], old[from + cols..], "seed {seed} {device}");
                }
            }
            for (row, want) in decode(dtype, &want[0]).chunks(all + gap).enumerate() {
                assert_eq!(want[from..from + cols], alone[row * cols..][..cols], "seed {seed}");
            }
        });
    }
}

/// Any types, ragged widths, in place or not; rows past the live ones do not change.
#[test]
fn add_and_gate_mul() {
    let rng = &mut Rng::new(11);
    for seed in 0..24 {
        let (rows, cols, gap) = (1 + rng.below(20), 1 + rng.below(300), rng.pick(&[0, 8]));
        let cols = if seed % 2 == 0 { cols } else { cols.next_multiple_of(8) };
        let (a_type, b_type, to) = (rng.pick(&FLOATS), rng.pick(&FLOATS), rng.pick(&FLOATS));
        let (live, in_place, add) = (rng.below(rows + 1), seed % 3 == 0, seed % 4 < 2);
        let act = rng.pick(&[Activation::Silu, Activation::GeluTanh]);
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(seed);
            let live = Some(layout.words(&[live as u32]).span);
            if !add {
                let values = rng.floats(rows * 2 * cols, 3.0);
                let x = layout.floats(a_type, rows, 2 * cols, gap, &values);
                let y = layout.poison(to, rows, cols, gap);
                return (vec![Op::GateMul(GateMul { x, act, y, live })], vec![y.span]);
            }
            let a = layout.floats(a_type, rows, cols, gap, &rng.floats(rows * cols, 3.0));
            let b = layout.floats(b_type, rows, cols, 0, &rng.floats(rows * cols, 3.0));
            let y = if in_place { a } else { layout.poison(to, rows, cols, gap) };
            (vec![Op::Add(Add { a, b, y, live })], vec![y.span])
        };
        let to = if add && in_place { a_type } else { to };
        against_reference(&build, &|device, want, got| {
            assert_close(&format!("seed {seed} {device}"), to, 1.0, &want[0], &got[0]);
        });
    }
}

/// Every function, any types, ragged widths, in place or not; rows past the live ones do not change.
#[test]
fn activate_and_gates_without_a_kernel_of_their_own() {
    let rng = &mut Rng::new(12);
    for seed in 0..20 {
        let (rows, cols, gap) = (1 + rng.below(20), 1 + rng.below(300), rng.pick(&[0, 8]));
        let cols = if seed % 2 == 0 { cols } else { cols.next_multiple_of(8) };
        let (from, to) = (rng.pick(&FLOATS), rng.pick(&FLOATS));
        let (live, in_place) = (rng.below(rows + 1), seed % 3 == 0);
        let act = Activation::ALL[seed as usize % Activation::ALL.len()];
        let gates = seed % 4 == 3;
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(seed);
            let live = Some(layout.words(&[live as u32]).span);
            if gates {
                let values = rng.floats(rows * 2 * cols, 5.0);
                let x = layout.floats(from, rows, 2 * cols, gap, &values);
                let y = layout.poison(to, rows, cols, gap);
                return (vec![Op::GateMul(GateMul { x, act, y, live })], vec![y.span]);
            }
            let x = layout.floats(from, rows, cols, gap, &rng.floats(rows * cols, 5.0));
            let y = if in_place { x } else { layout.poison(to, rows, cols, gap) };
            (vec![Op::Activate(Activate { x, act, y, live })], vec![y.span])
        };
        let to = if in_place && !gates { from } else { to };
        against_reference(&build, &|device, want, got| {
            assert_close(&format!("seed {seed} {act:?} {device}"), to, 2.0, &want[0], &got[0]);
        });
    }
}

/// GELU at a few points, from tables of the normal distribution.
#[test]
fn gelu_by_hand() {
    let reference = device::cpu::open(None, true).expect("a CPU");
    let got = run(&reference, &|layout: &mut Layout| {
        let x = layout.floats(DType::F32, 1, 6, 0, &[0.0, 1.0, -1.0, 2.0, -3.0, 4.0]);
        let y = layout.poison(DType::F32, 1, 6, 0);
        let op = Activate { x, act: Activation::Gelu, y, live: None };
        (vec![Op::Activate(op)], vec![y.span])
    });
    let want = [0.0, 0.841_344_7, -0.158_655_3, 1.954_499_7, -0.004_049_7, 3.999_873_3];
    for (got, want) in decode(DType::F32, &got[0]).iter().zip(want) {
        assert!((got - want).abs() < 1e-6, "{got} {want}");
    }
}

/// Any types, rows of every length, pad rows; the mean, the first and the last token, of unit length or not.
#[test]
fn pool() {
    let rng = &mut Rng::new(21);
    for seed in 0..18 {
        let (from, to) = (rng.pick(&FLOATS), rng.pick(&FLOATS));
        let (rows, cols) = (1 + rng.below(6), rng.pick(&[1, 33, 64, 384, 700]));
        let lengths: Vec<u32> = (0..rows).map(|_| rng.pick(&[1, 2, 17, 40])).collect();
        let live: u32 = lengths.iter().sum();
        let (tokens, bucket) = (live as usize + rng.below(9), rows + rng.below(3));
        let pooling = [Pooling::Mean, Pooling::First, Pooling::Last][seed as usize % 3];
        let unit = seed % 2 == 0;
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(seed);
            let limits = StepLimits {
                seats: 8,
                rows: bucket as u32,
                tokens: tokens as u32,
                pages_per_seat: 4,
                page_size: 16,
                vocab: 32,
                penalties: false,
                tokens_per_row: 1,
                tables: 1,
            };
            let state = layout.state(limits);
            let mut starts = vec![0];
            lengths.iter().for_each(|length| starts.push(starts[starts.len() - 1] + length));
            starts.resize(bucket + 1, live);
            let bytes = starts.iter().flat_map(|word| word.to_le_bytes()).collect();
            layout.set(state.q_start.span, bytes);
            let mut values = rng.floats(tokens * cols, 2.0);
            values[live as usize * cols..].fill(f32::NAN);
            let x = layout.floats(from, tokens, cols, 0, &values);
            let y = layout.poison(to, bucket, cols, 0);
            (vec![Op::Pool(Pool { x, pooling, unit, state, y })], vec![y.span])
        };
        against_reference(&build, &|device, want, got| {
            assert_close(&format!("seed {seed} {device}"), to, 1.0, &want[0], &got[0]);
        });
    }
}

/// Rows selected by parts of ids.
#[test]
fn embed_by_parts_of_ids() {
    for by in [Lookup::Low(5), Lookup::High(5), Lookup::Position] {
        let build = |layout: &mut Layout| {
            let table = layout.floats(DType::F32, 5, 24, 0, &Rng::new(9).floats(5 * 24, 1.0));
            let ids = layout.words(&[0, 4, 5, 9, 14, 24, 25, 1000]);
            let out = layout.poison(DType::F32, 8, 24, 0);
            let op = Embed { by, ids, table, given: None, out };
            (vec![Op::Embed(op)], vec![out.span])
        };
        against_reference(&build, &|device, want, got| {
            assert_eq!(want, got, "{by:?} on {device}");
            let rows =
                |all: &[u8]| decode(DType::F32, all).chunks(24).map(|r| r[0]).collect::<Vec<_>>();
            let (made, table) = (rows(&want[0]), Rng::new(9).floats(5 * 24, 1.0));
            let expected = match by {
                Lookup::Low(_) => [0, 4, 0, 4, 4, 4, 0, 0],
                Lookup::High(_) => [0, 0, 1, 1, 2, 4, 0, 0],
                Lookup::Token | Lookup::Position => [0, 4, 0, 0, 0, 0, 0, 0],
            };
            assert_eq!(made, expected.map(|row| table[row * 24]), "{by:?}");
        });
    }
}

/// Any types, ragged widths, gates near 0, 1 and between, in place or not; rows past the live ones do not change.
#[test]
fn add_gated() {
    let rng = &mut Rng::new(14);
    for seed in 0..24 {
        let (rows, cols, wide) = (1 + rng.below(20), 1 + rng.below(2500), 1 + rng.below(2500));
        let gap = rng.pick(&[0, 8]);
        let even = |n: usize| if seed % 2 == 0 { n } else { n.next_multiple_of(8) };
        let (cols, wide) = (even(cols), even(wide));
        let [a, b, x, w, to] = [(); 5].map(|()| rng.pick(&FLOATS));
        let (live, in_place) = (rng.below(rows + 1), seed % 3 == 0);
        let steep = rng.pick(&[0.02, 0.3]);
        let to = if in_place { a } else { to };
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(seed);
            let live = Some(layout.words(&[live as u32]).span);
            let a = layout.floats(a, rows, cols, gap, &rng.floats(rows * cols, 3.0));
            let b = layout.floats(b, rows, cols, 0, &rng.floats(rows * cols, 3.0));
            let x = layout.floats(x, rows, wide, gap, &rng.floats(rows * wide, 2.0));
            let w = layout.floats(w, 1, wide, 0, &rng.floats(wide, steep));
            let y = if in_place { a } else { layout.poison(to, rows, cols, gap) };
            (vec![Op::AddGated(AddGated { a, b, x, w, y, live })], vec![y.span])
        };
        against_reference(&build, &|device, want, got| {
            assert_close(&format!("seed {seed} {device}"), to, 1.0, &want[0], &got[0]);
        });
    }
}

/// Any types, ragged widths and rows of several blocks, in place or not, with and without a cap.
#[test]
fn scale() {
    let rng = &mut Rng::new(12);
    for seed in 0..24 {
        let (rows, cols, gap) = (1 + rng.below(9), 1 + rng.below(9000), rng.pick(&[0, 8]));
        let cols = if seed % 2 == 0 { cols } else { cols.next_multiple_of(8) };
        let (from, to) = (rng.pick(&FLOATS), rng.pick(&FLOATS));
        let (live, in_place) = (rng.below(rows + 1), seed % 3 == 0);
        let (factor, cap) =
            rng.pick(&[(0.22, None), (45.25, None), (1.0, Some(30.0)), (0.5, Some(0.7))]);
        let build = |layout: &mut Layout| {
            let live = Some(layout.words(&[live as u32]).span);
            let values = Rng::new(seed).floats(rows * cols, 90.0);
            let x = layout.floats(from, rows, cols, gap, &values);
            let y = if in_place { x } else { layout.poison(to, rows, cols, gap) };
            (vec![Op::Scale(Scale { x, factor, cap, y, live })], vec![y.span])
        };
        let to = if in_place { from } else { to };
        against_reference(&build, &|device, want, got| {
            assert_close(&format!("seed {seed} {device}"), to, 0.0, &want[0], &got[0]);
        });
    }
}

/// Values are copied or dequantised one by one: the same bits everywhere.
#[test]
fn embed() {
    let tables = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q4_1,
        DType::Q8_0,
        DType::Q6K,
        DType::P4,
        DType::P8,
    ];
    for (seed, dtype) in tables.into_iter().enumerate() {
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(seed as u64);
            let (vocab, cols, tokens) = (48, 256, 11);
            let bytes = match dtype {
                DType::F32 | DType::F16 | DType::BF16 => {
                    encode(dtype, &rng.floats(vocab * cols, 1.0))
                }
                DType::P4 | DType::P8 => {
                    let source = if dtype == DType::P4 { DType::Q4_1 } else { DType::Q8_0 };
                    let blocks = random_blocks(rng, source, vocab * cols);
                    let mut packed = vec![0; dtype.bytes(vocab * cols)];
                    pack::pack_rows(source, &blocks, vocab, cols, &mut packed);
                    packed
                }
                _ => random_blocks(rng, dtype, vocab * cols),
            };
            let table = layout.bytes(Region::Weights, "table", bytes);
            let table = Tensor::dense(table, dtype, vocab as u32, cols as u32);
            let mut ids: Vec<u32> = (0..tokens).map(|_| rng.below(vocab) as u32).collect();
            ids[3] = 9999;
            // Rows of the input, and one past its end.
            (ids[5], ids[6], ids[8]) = (GIVEN_ROW + 3, GIVEN_ROW, GIVEN_ROW + 4);
            let ids = layout.words(&ids);
            let out = layout.poison(rng.pick(&FLOATS), tokens, cols, 0);
            let rows = encode(out.dtype, &rng.floats(4 * cols, 1.0));
            let rows = layout.bytes(Region::State, "given", rows);
            let given = Some(Tensor::dense(rows, out.dtype, 4, cols as u32));
            (vec![Op::Embed(Embed { by: Lookup::Token, ids, table, given, out })], vec![out.span])
        };
        against_reference(&build, &|device, want, got| {
            assert_eq!(want, got, "{dtype:?} on {device}");
        });
    }
}

/// Packing loses nothing: a packed table gives the rows of its source.
#[test]
fn packing_keeps_every_weight() {
    let reference = device::cpu::open(None, true).expect("a CPU");
    for source in [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0] {
        let rows = |packed: bool| {
            run(&reference, &|layout: &mut Layout| {
                let blocks = random_blocks(&mut Rng::new(5), source, 32 * 96);
                let (dtype, bytes) = match pack::packed_dtype(source, 32, 96) {
                    Some(dtype) if packed => {
                        let mut bytes = vec![0; dtype.bytes(32 * 96)];
                        pack::pack_rows(source, &blocks, 32, 96, &mut bytes);
                        (dtype, bytes)
                    }
                    _ => (source, blocks),
                };
                let table = layout.bytes(Region::Weights, "table", bytes);
                let table = Tensor::dense(table, dtype, 32, 96);
                let ids = layout.words(&(0..32).collect::<Vec<u32>>());
                let out = layout.poison(DType::F32, 32, 96, 0);
                let op = Embed { by: Lookup::Token, ids, table, given: None, out };
                (vec![Op::Embed(op)], vec![out.span])
            })
        };
        let (plain, packed) = (rows(false), rows(true));
        assert_eq!(decode(DType::F32, &plain[0]), decode(DType::F32, &packed[0]), "{source:?}");
    }
    assert_eq!(pack::packed_dtype(DType::Q4_1, 17, 32), None);
    assert_eq!(pack::packed_dtype(DType::Q6K, 32, 256), None);
}

#[test]
fn gather_copy_fill_noise() {
    for dtype in FLOATS {
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(3);
            let values = rng.floats(9 * 33, 1.0);
            let x = layout.floats(dtype, 9, 33, 7, &values);
            let index = layout.words(&[8, 0, 3, 3, 100]);
            let y = layout.poison(dtype, 5, 33, 0);
            let copied = layout.poison(dtype, 5, 33, 0);
            let filled = layout.bytes(Region::State, "filled", vec![7; 64]);
            let noise = layout.poison(dtype, 40, 100, 3);
            let ops = vec![
                Op::Gather(Gather { index, x, y }),
                Op::Copy(Copy { from: y.span, to: copied.span }),
                Op::Fill(Fill { to: filled.part(16, 32), word: 0xABCD_0123 }),
                Op::Noise(Noise { to: noise, seed: 42, mean: 0.5, scale: 0.02 }),
            ];
            (ops, vec![y.span, copied.span, filled, noise.span])
        };
        against_reference(&build, &|device, want, got| {
            assert_eq!(want, got, "{dtype:?} on {device}");
            assert_eq!(want[0], want[1]);
        });
    }
}

/// The first numbers of the generator, computed by hand from its definition.
#[test]
fn noise_is_the_documented_sequence() {
    let reference = device::cpu::open(None, true).expect("a CPU");
    let got = run(&reference, &|layout: &mut Layout| {
        let to = layout.poison(DType::F32, 1, 3, 0);
        (vec![Op::Noise(Noise { to, seed: 0, mean: 0.0, scale: 1.0 })], vec![to.span])
    });
    // SplitMix64 of seed 0: e220a8397b1dcdaf, 6e789e6aa1b965f4, 06c45d188009454f.
    let unit = |hash: u64| (hash >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    let want = [0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, 0x06c45d188009454f].map(unit);
    assert_eq!(decode(DType::F32, &got[0]), want);
}
