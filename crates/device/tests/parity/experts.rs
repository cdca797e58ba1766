//! The router and experts: every routing option, imbalance of every kind, any formats, fewer live tokens than rows.

use crate::scaled::{assert_near, exact, stored};
use crate::support::*;
use device::cpu::pack;
use device::cuda::lower::exchange_bytes;
use device::op::{
    Activation, Clamp, Experts, Fused, FusedKernel, Norm, RmsNorm, Route, Routing, Score,
};
use device::variant::{ExpertsVariant, Pick};
use device::{DType, Op, Region, Tensor};

/// Routing options of the families that have experts.
fn routings(top: u32, experts: u32) -> Vec<Routing> {
    let plain = Routing::softmax(top);
    let mut all = vec![
        plain,
        Routing { renormalise: true, ..plain },
        Routing { score: Score::Sigmoid, scale: 2.5, ..plain },
        Routing { score: Score::Sigmoid, renormalise: true, scale: 2.5, ..plain },
    ];
    for groups in [2, 4, 8] {
        let size = experts / groups;
        if experts.is_multiple_of(groups) && size >= 2 && top <= groups / 2 * size {
            let (kept, scale) = (groups / 2, 1.5);
            all.push(Routing { groups, kept, scale, ..plain });
            let score = Score::Sigmoid;
            all.push(Routing {
                groups,
                kept,
                group_top: 2,
                score,
                renormalise: true,
                scale,
                ..plain
            });
        }
    }
    all
}

/// Logits are far enough apart that no device may choose otherwise; weights are equal to what f32 gives.
#[test]
fn route() {
    let shapes = [
        (32, 4, 64),
        (60, 4, 96),
        (8, 2, 40),
        (128, 8, 256),
        (64, 8, 512),
        (256, 8, 256),
        (40, 5, 33),
    ];
    for (seed, (experts, top, wide)) in shapes.into_iter().enumerate() {
        for (number, routing) in routings(top, experts).into_iter().enumerate() {
            let rng = &mut Rng::new((seed * 100 + number) as u64);
            let rows = 1 + rng.below(40);
            let dtype = if number % 2 == 0 { DType::BF16 } else { DType::F32 };
            let (x_values, w_values) =
                (rng.floats(rows * wide, 1.0), rng.floats(experts as usize * wide, 1.0));
            let bias_values = rng.floats(experts as usize, 0.5);
            let live = rows - rng.below(rows.min(3));
            let build = |layout: &mut Layout| {
                let x = layout.floats(dtype, rows, wide, 0, &x_values);
                let w = layout.floats(dtype, experts as usize, wide, 0, &w_values);
                let bias = layout.floats(DType::F32, 1, experts as usize, 0, &bias_values);
                let bias = (routing.score == Score::Sigmoid || number % 3 == 0).then_some(bias);
                let y = layout.poison(DType::F32, rows, 2 * top as usize, 0);
                let y = Tensor { dtype: DType::U32, ..y };
                let live = Some(layout.words(&[live as u32]).span);
                (
                    vec![Op::Route(Route {
                        x,
                        w,
                        bias,
                        routing,
                        y,
                        live,
                        plans: None,
                        load: None,
                        scratch: None,
                        pick: Pick::Best,
                    })],
                    vec![y.span],
                )
            };
            against_reference(&build, &|device, want, got| {
                let (want, got) = (bytes_to_words(&want[0]), bytes_to_words(&got[0]));
                let top = top as usize;
                for row in 0..live {
                    let at = row * 2 * top;
                    let name = format!("{experts} experts, {routing:?}, row {row}, {device}");
                    assert_eq!(want[at..at + top], got[at..at + top], "{name}");
                    for place in at + top..at + 2 * top {
                        let (want, got) = (f32::from_bits(want[place]), f32::from_bits(got[place]));
                        assert!((want - got).abs() <= 2e-4 * want.abs(), "{name}: {want} {got}");
                    }
                }
            });
        }
    }
}

/// Equal scores go to the lower number, on every device.
#[test]
fn ties_go_to_the_lower_expert() {
    for (experts, top) in [(64usize, 8u32), (12, 3)] {
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(5);
            let some = rng.floats(4 * 256, 1.0);
            let same: Vec<f32> = some.iter().copied().cycle().take(experts * 256).collect();
            let x = layout.floats(DType::BF16, 9, 256, 0, &rng.floats(9 * 256, 1.0));
            let w = layout.floats(DType::BF16, experts, 256, 0, &same);
            let y = layout.poison(DType::F32, 9, 2 * top as usize, 0);
            let y = Tensor { dtype: DType::U32, ..y };
            let routing = Routing::softmax(top);
            let op = Route {
                x,
                w,
                bias: None,
                routing,
                y,
                live: None,
                plans: None,
                load: None,
                scratch: None,
                pick: Pick::Best,
            };
            (vec![Op::Route(op)], vec![y.span])
        };
        against_reference(&build, &|device, want, got| {
            let top = top as usize;
            for (want, got) in bytes_to_words(&want[0])
                .chunks(2 * top)
                .zip(bytes_to_words(&got[0]).chunks(2 * top))
            {
                assert_eq!(want[..top], got[..top], "{device}");
                let first = got[0] % 4;
                let equals = (experts / 4).min(top);
                let lower: Vec<u32> = (0..equals as u32).map(|i| first + 4 * i).collect();
                assert_eq!(got[..equals], lower, "{device}");
            }
        });
    }
}

/// Who gets which tokens.
#[derive(Clone, Copy, Debug)]
enum Load {
    /// Any experts.
    Even,
    /// Every token's first expert is the same.
    One,
    /// Neighbours share no expert.
    Spread,
    /// A few experts have everything.
    Few,
}

fn choice(rng: &mut Rng, load: Load, rows: usize, top: usize, experts: usize) -> Vec<u32> {
    let mut all = Vec::new();
    for row in 0..rows {
        let from = match load {
            Load::Few => (top + 1).min(experts),
            Load::Even | Load::One | Load::Spread => experts,
        };
        let mut ids: Vec<u32> = (0..from as u32).collect();
        for i in 0..top {
            let other = i + rng.below(from - i);
            ids.swap(i, other);
        }
        match load {
            Load::One => {
                let at = ids.iter().position(|id| *id == experts as u32 / 2).unwrap();
                ids.swap(0, at);
            }
            Load::Spread => (0..top).for_each(|i| ids[i] = ((row * top + i) % experts) as u32),
            Load::Even | Load::Few => {}
        }
        all.extend_from_slice(&ids[..top]);
        all.extend((0..top).map(|_| (0.25 + 0.75 * rng.float().abs()).to_bits()));
    }
    all
}

struct Case {
    rows: usize,
    live: usize,
    wide: usize,
    inner: usize,
    experts: usize,
    top: usize,
    act: DType,
    weights: DType,
    residual: bool,
    /// Squared ReLU has no gate.
    function: Activation,
    biases: bool,
    /// Gates have limits.
    clamped: bool,
    load: Load,
    pick: Pick<ExpertsVariant>,
}

fn check(case: &Case, seed: u64) {
    let Case { rows, live, wide, inner, experts, top, act, weights, residual, .. } = *case;
    let build = |layout: &mut Layout| {
        let rng = &mut Rng::new(seed);
        let x = match weights {
            // Kernels may make them e4m3.
            DType::F8Block => exact(rng, rows, wide),
            _ => rng.floats(rows * wide, 1.0),
        };
        let x = layout.floats(act, rows, wide, 0, &x);
        let words = choice(rng, case.load, rows, top, experts);
        let span = layout.bytes(Region::Workspace, "choice", words_to_bytes(&words));
        let choice = Tensor::dense(span, DType::U32, rows as u32, 2 * top as u32);
        let mut matrix = |layout: &mut Layout, weights: DType, n: usize, k: usize| {
            let values = rng.floats(n * k, 2.0 / (k as f32).sqrt());
            match weights {
                DType::F32 | DType::F16 | DType::BF16 => layout.floats(weights, n, k, 0, &values),
                DType::P4 => packed(layout, DType::Q4_0, n, k, &values),
                _ if device::scaled::is_scaled(weights) => stored(layout, weights, (n, k), &values),
                _ => packed(layout, DType::Q8_0, n, k, &values),
            }
        };
        let turned = if weights == DType::F8Block { DType::F8Turns } else { weights };
        let gated = case.function != Activation::ReluSquared;
        let up_rows = experts * if gated { 2 * inner } else { inner };
        let gate_up = matrix(layout, turned, up_rows, wide);
        let down = matrix(layout, weights, experts * wide, inner);
        let mut bias = |n: usize| {
            let values = Rng::new(seed ^ n as u64).floats(n, 0.5);
            let dtype = [DType::F32, DType::BF16][seed as usize % 2];
            case.biases.then(|| layout.floats(dtype, 1, n, 0, &values))
        };
        let (gate_up_bias, down_bias) = (bias(up_rows), bias(experts * wide));
        let values = rng.floats(rows * wide, 0.1);
        let residual = residual.then(|| layout.floats(act, rows, wide, 0, &values));
        let y = layout.poison(act, rows, wide, 0);
        let live = Some(layout.words(&[live as u32]).span);
        let load = layout.words(&vec![0; 2 * (experts + 2)]).span;
        let op = Experts {
            x,
            choice,
            experts: experts as u32,
            gate_up,
            down,
            gate_up_bias,
            down_bias,
            act: case.function,
            clamp: case.clamped.then_some(Clamp { alpha: 1.702, limit: 0.9 }),
            residual,
            y,
            live,
            scratch: None,
            planned: false,
            load: Some(load),
            pick: case.pick,
        };
        (vec![Op::Experts(op)], vec![y.span, load])
    };
    against_reference(&build, &|device, want, got| {
        let len = act.bytes(live * wide);
        let name = format!("{experts} experts, {rows} rows, {:?}, {device}", case.load);
        // What lies between the two GEMMs may become e4m3, which is rounded by 2.6 % on average.
        let (y, made) = (&want[0][..len], &got[0][..len]);
        if weights == DType::F8Block {
            let most = if rows == 1 || case.pick == Pick::Fixed { 0.01 } else { 0.04 };
            assert_near(&name, most, &decode(act, y), &decode(act, made));
        } else {
            // Each output of an expert may be rounded before the sum.
            let size = top as f32;
            assert_eq!(row_difference(act, size, wide, y, made), None, "{name}");
        }
        let rest = decode(act, &want[0][len..]);
        assert!(rest.iter().all(|value| value.is_nan()), "{name}: the reference left them alone");
        counted(&name, live * top, &want[1], &got[1]);
    });
}

/// Every device counts each expert's tokens, the experts that had any, and steps.
fn counted(name: &str, assignments: usize, want: &[u8], got: &[u8]) {
    assert_eq!(want, got, "{name}: the load");
    let words = bytes_to_words(got);
    let counts: Vec<u32> = words.iter().copied().step_by(2).collect();
    let (tokens, [chosen, steps]) = counts.split_last_chunk().expect("two counters more");
    assert_eq!(tokens.iter().sum::<u32>() as usize, assignments * *steps as usize, "{name}");
    let least = tokens.iter().filter(|tokens| **tokens > 0).count();
    assert!(*chosen as usize >= least && *steps > 0, "{name}: {chosen} of {least}");
}

/// Packed weights, made from blocks of a quantised type.
fn packed(layout: &mut Layout, from: DType, n: usize, k: usize, values: &[f32]) -> Tensor {
    let to = if from == DType::Q4_0 { DType::P4 } else { DType::P8 };
    let blocks = quantised(from, values);
    let bytes = from.bytes(k);
    let rows: Vec<(DType, &[u8])> = blocks.chunks_exact(bytes).map(|row| (from, row)).collect();
    let mut out = vec![0; to.bytes(n * k)];
    pack::pack_parts(to, &rows, k, &mut out);
    let span = layout.bytes(Region::Weights, "packed", out);
    Tensor::dense(span, to, n as u32, k as u32)
}

/// Values as blocks of Q4_0 or Q8_0: a scale in f16, then the numbers.
fn quantised(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut out = Vec::new();
    for block in values.chunks_exact(32) {
        let most = block.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let scale = half::f16::from_f32(most / if dtype == DType::Q4_0 { 7.0 } else { 127.0 });
        let number = |value: f32| (value / scale.to_f32().max(1e-9)).round() as i32;
        out.extend(scale.to_le_bytes());
        match dtype {
            DType::Q4_0 => out.extend((0..16).map(|i| {
                let nibble = |value: f32| (number(value) + 8).clamp(0, 15) as u8;
                nibble(block[i]) | nibble(block[i + 16]) << 4
            })),
            _ => out.extend(block.iter().map(|value| number(*value).clamp(-127, 127) as i8 as u8)),
        }
    }
    out
}

const LOADS: [Load; 4] = [Load::Even, Load::One, Load::Spread, Load::Few];

#[test]
fn experts_of_floats() {
    let rng = &mut Rng::new(21);
    for (seed, load) in LOADS.into_iter().cycle().take(16).enumerate() {
        let act = rng.pick(&[DType::F32, DType::BF16]);
        let rows = 1 + rng.below(40);
        let experts = rng.pick(&[4, 8, 12, 40]);
        let case = Case {
            rows,
            live: rows - rng.below(rows.min(4)),
            wide: rng.pick(&[40, 64, 96]),
            inner: 8 * (1 + rng.below(8)),
            experts,
            top: 1 + rng.below(4),
            act,
            weights: rng.pick(&[DType::F32, DType::BF16]),
            residual: seed % 3 > 0,
            function: match (seed % 7, seed % 5) {
                (3, _) => Activation::ReluSquared,
                (_, 0) => Activation::GeluTanh,
                _ => Activation::Silu,
            },
            biases: seed % 2 == 1,
            clamped: seed % 4 == 1 && seed % 5 > 0 && seed % 7 != 3,
            load,
            pick: Pick::Best,
        };
        check(&case, seed as u64);
    }
}

#[test]
fn experts_of_packed_weights() {
    for (seed, load) in LOADS.into_iter().cycle().take(8).enumerate() {
        let rows = [1, 3, 17, 40][seed % 4];
        let case = Case {
            rows,
            live: rows,
            wide: 64,
            inner: [32, 96][seed % 2],
            experts: 16,
            top: [1, 2, 4][seed % 3],
            act: DType::F32,
            weights: if seed < 4 { DType::P4 } else { DType::P8 },
            residual: true,
            function: [Activation::Silu, Activation::ReluSquared][usize::from(seed % 4 == 2)],
            biases: seed % 2 == 1,
            clamped: seed % 4 == 1,
            load,
            pick: Pick::Best,
        };
        check(&case, 100 + seed as u64);
    }
}

/// Four-bit floats with an exponent for 32 columns, as gpt-oss has them: with biases and limited gates, and without.
#[test]
fn experts_of_mxfp4() {
    for (seed, load) in LOADS.into_iter().cycle().take(8).enumerate() {
        let rows = [1, 3, 17, 40][seed % 4];
        let case = Case {
            rows,
            live: rows,
            wide: [64, 192][seed % 2],
            inner: [64, 128, 320][seed % 3],
            experts: 12,
            top: [1, 4, 3][seed % 3],
            act: [DType::F32, DType::BF16][seed / 2 % 2],
            weights: DType::Mxfp4,
            residual: seed % 3 > 0,
            function: Activation::Silu,
            biases: seed != 5,
            clamped: seed != 6,
            load,
            pick: Pick::Best,
        };
        check(&case, 150 + seed as u64);
    }
}

/// The Hopper kernel of four-bit floats: every tile, units of rows that do not fill warpgroups, stages of one to five pieces.
#[test]
fn experts_of_mxfp4_in_every_tile() {
    let tiles = [8, 16, 24, 32, 48, 64, 96, 128];
    // Of both shapes: 320 × 640 and 960 × 192 columns. Rows of units divide 2 · inner and wide.
    let shapes = [(320, 640, 80, 160), (960, 192, 192, 240), (960, 960, 240, 96)];
    for (seed, tile) in tiles.into_iter().enumerate() {
        let (wide, inner, up, down) = shapes[seed % 3];
        let variant = ExpertsVariant {
            tile: Some(tile),
            up: Some(up),
            down: Some(down),
            copiers: [None, Some(64), Some(16)][seed % 3],
            depth: [None, Some(1)][seed / 3 % 2],
            ..Default::default()
        };
        let rows = [5, 40, 150][seed % 3];
        let case = Case {
            rows,
            live: rows - seed % 2,
            wide,
            inner,
            experts: 4,
            top: 2,
            act: DType::BF16,
            weights: DType::Mxfp4,
            residual: seed % 2 == 0,
            function: Activation::Silu,
            biases: seed % 4 > 0,
            clamped: seed % 3 == 0,
            load: LOADS[seed % 4],
            pick: Pick::Named(variant),
        };
        check(&case, 170 + seed as u64);
    }
}

/// Blocks of e4m3: every form and tile of the rule, an odd number of blocks, the fixed order.
#[test]
fn experts_of_fp8() {
    let cases = [
        (1, 8, 2, Pick::Best),
        (3, 8, 2, Pick::Best),
        (6, 16, 1, Pick::Best),
        (20, 8, 2, Pick::Best),
        (40, 8, 2, Pick::Fixed),
        (60, 8, 2, Pick::Best),
        (130, 4, 2, Pick::Best),
        (300, 4, 2, Pick::Best),
    ];
    for (seed, (rows, experts, top, pick)) in cases.into_iter().enumerate() {
        let case = Case {
            rows,
            live: rows - seed % 3 * usize::from(rows > 2),
            wide: [256, 384, 512][seed % 3],
            inner: [128, 256, 384][seed % 3],
            experts,
            top,
            act: DType::BF16,
            weights: DType::F8Block,
            residual: seed % 2 == 0,
            function: [Activation::Silu, Activation::GeluTanh][usize::from(seed == 3)],
            biases: seed == 5,
            clamped: seed == 4,
            load: LOADS[seed % 4],
            pick,
        };
        check(&case, 190 + seed as u64);
    }
}

/// The shapes of the Hopper kernels: bf16, multiples of 64, every tile, with the fixed order and by name.
#[test]
fn experts_of_halves() {
    let named = |tile, up, down| {
        let variant = ExpertsVariant {
            tile: Some(tile),
            up: Some(up),
            down: Some(down),
            ..Default::default()
        };
        Pick::Named(variant)
    };
    let cases = [
        (1, 16, 4, Pick::Best),
        (3, 16, 4, Pick::Best),
        (40, 16, 4, Pick::Best),
        (40, 16, 4, Pick::Fixed),
        (100, 12, 3, Pick::Best),
        (70, 40, 5, named(8, 64, 64)),
        (70, 8, 2, named(32, 128, 128)),
        (70, 8, 2, named(64, 128, 64)),
        (130, 8, 2, named(128, 128, 128)),
        (300, 4, 2, Pick::Best),
    ];
    for (seed, (rows, experts, top, pick)) in cases.into_iter().enumerate() {
        for load in [LOADS[seed % 4], LOADS[(seed + 1) % 4]] {
            let case = Case {
                rows,
                live: rows - seed % 3 * usize::from(rows > 2),
                wide: 128,
                inner: [64, 128, 192][seed % 3],
                experts,
                top,
                act: DType::BF16,
                weights: DType::BF16,
                residual: seed % 4 > 0,
                function: [Activation::Silu, Activation::GeluTanh][usize::from(seed % 5 == 4)],
                biases: seed % 2 == 1,
                clamped: seed % 3 == 0 && seed % 5 < 4,
                load,
                // Devices without these kernels have no names for them.
                pick: if gpu_is_hopper() { pick } else { Pick::Best },
            };
            check(&case, 200 + seed as u64);
        }
    }
}

/// The router and its experts in a row, as in a model; with few tokens Hopper's router makes the plan, too.
#[test]
fn a_router_and_its_experts() {
    let (experts, top, wide, inner) = (64, 4, 256, 64);
    for (seed, rows) in [1usize, 3, 8, 16, 33, 200].into_iter().enumerate() {
        let live = rows - usize::from(rows > 3);
        let tile = if rows <= 8 { 8 } else { 16 };
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(300 + seed as u64);
            let bf16 = DType::BF16;
            let x = layout.floats(bf16, rows, wide, 0, &rng.floats(rows * wide, 1.0));
            let w = layout.floats(bf16, experts, wide, 0, &rng.floats(experts * wide, 1.0));
            let choice = layout.poison(DType::F32, rows, 2 * top, 0);
            let choice = Tensor { dtype: DType::U32, ..choice };
            let mut matrix = |n: usize, k: usize| {
                let values = rng.floats(n * k, 2.0 / (k as f32).sqrt());
                layout.floats(bf16, n, k, 0, &values)
            };
            let gate_up = matrix(experts * 2 * inner, wide);
            let down = matrix(experts * wide, inner);
            let y = layout.poison(bf16, rows, wide, 0);
            let live = Some(layout.words(&[live as u32]).span);
            let load = layout.words(&vec![0; 2 * (experts + 2)]).span;
            let plans = gpu_is_hopper() && rows <= 16;
            let routing = Routing { renormalise: true, ..Routing::softmax(top as u32) };
            let route = Route {
                x,
                w,
                bias: None,
                routing,
                y: choice,
                live,
                plans: plans.then_some(tile),
                load: plans.then_some(load),
                scratch: None,
                pick: Pick::Best,
            };
            let variant = ExpertsVariant { tile: Some(tile), ..Default::default() };
            let run = Experts {
                x,
                choice,
                experts: experts as u32,
                gate_up,
                down,
                gate_up_bias: None,
                down_bias: None,
                act: Activation::Silu,
                clamp: None,
                residual: None,
                y,
                live,
                scratch: None,
                planned: plans,
                load: Some(load),
                pick: if plans { Pick::Named(variant) } else { Pick::Best },
            };
            (vec![Op::Route(route), Op::Experts(run)], vec![y.span, load])
        };
        against_reference(&build, &|device, want, got| {
            let len = DType::BF16.bytes(live * wide);
            let name = format!("{rows} rows, {device}");
            let (y, made) = (&want[0][..len], &got[0][..len]);
            assert_eq!(row_difference(DType::BF16, 4.0, wide, y, made), None, "{name}");
            counted(&name, live * top, &want[1], &got[1]);
        });
    }
}

/// A norm, its router and experts as one node, twice in a row and the second time in place: on Hopper one kernel, whose
/// blocks exchange words with a tag that the launch before must not have left.
#[test]
fn a_layer_of_experts_as_one_node() {
    let norms = [DType::BF16, DType::F32];
    let shapes = [
        (1, 1, 2048, 8),
        (1, 1, 2048, 72),
        (2, 2, 2048, 64),
        (2, 1, 4096, 64),
        (3, 2, 2048, 128),
        (4, 4, 2048, 40),
        // Blocks of e4m3.
        (1, 1, 2048, 128),
        (2, 2, 4096, 256),
        (4, 3, 2048, 384),
    ];
    for (seed, (rows, live, wide, inner)) in shapes.into_iter().enumerate() {
        let (experts, top) = (if seed == 0 { 160 } else { 16 }, 4);
        let routing = routings(top as u32, experts as u32)[[1, 1, 3, 0, 5, 1, 1, 3, 1][seed]];
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(500 + seed as u64);
            let bf16 = DType::BF16;
            let x = layout.floats(bf16, rows, wide, 0, &rng.floats(rows * wide, 3.0));
            let y = layout.poison(bf16, rows, wide, 0);
            let live = Some(layout.words(&[live as u32]).span);
            let load = layout.words(&vec![0; 2 * (experts + 2)]).span;
            let ops: Vec<Op> = [(x, y, None), (y, y, Some(y))]
                .into_iter()
                .map(|(from, to, residual)| {
                    let weight: Vec<f32> = rng.floats(wide, 0.2).iter().map(|v| 1.0 + v).collect();
                    let weight = layout.floats(norms[seed % 2], 1, wide, 0, &weight);
                    let values = rng.floats(experts * wide, 8.0 / (wide as f32).sqrt());
                    let w = layout.floats(bf16, experts, wide, 0, &values);
                    let mut of_experts = |layout: &mut Layout, dtype, n: usize, k: usize| {
                        let values = rng.floats(n * k, 2.0 / (k as f32).sqrt());
                        match dtype {
                            DType::BF16 => layout.floats(dtype, n, k, 0, &values),
                            _ => stored(layout, dtype, (n, k), &values),
                        }
                    };
                    let fp8 = [DType::F8Turns, DType::F8Block];
                    let [up_type, down_type] = if seed < 6 { [bf16; 2] } else { fp8 };
                    let gate_up = of_experts(layout, up_type, experts * 2 * inner, wide);
                    let down = of_experts(layout, down_type, experts * wide, inner);
                    let bias = layout.floats(DType::F32, 1, experts, 0, &rng.floats(experts, 0.5));
                    let bias = (routing.score == Score::Sigmoid || seed == 1).then_some(bias);
                    let normed = layout.poison(bf16, rows, wide, 0);
                    let choice = layout.poison(DType::F32, rows, 2 * top, 0);
                    let choice = Tensor { dtype: DType::U32, ..choice };
                    let norm = RmsNorm { x: from, norm: Norm { weight, eps: 1e-5 }, y: normed };
                    let (x, y, pick) = (normed, choice, Pick::Best);
                    let route = Route {
                        x,
                        w,
                        bias,
                        routing,
                        y,
                        live,
                        plans: None,
                        load: None,
                        scratch: None,
                        pick,
                    };
                    let run = Experts {
                        x: normed,
                        choice,
                        experts: experts as u32,
                        gate_up,
                        down,
                        gate_up_bias: None,
                        down_bias: None,
                        act: if seed == 3 { Activation::GeluTanh } else { Activation::Silu },
                        clamp: None,
                        residual,
                        y: to,
                        live,
                        scratch: None,
                        planned: false,
                        load: Some(load),
                        pick: Pick::Best,
                    };
                    let members = vec![Op::RmsNorm(norm), Op::Route(route), Op::Experts(run)];
                    let exchange = None;
                    Op::Fused(Fused { members, kernel: FusedKernel::ExpertLayer { exchange } })
                })
                .collect();
            // Enough for any GPU; it is zero at the start.
            let bytes = exchange_bytes(&ops[0], &device::cuda::launch::Target::h200());
            assert!(bytes > 0, "{rows} rows of {wide} have a kernel");
            let exchange = layout.bytes(Region::State, "exchange", vec![0; bytes as usize]);
            let ops = ops.into_iter().map(|op| {
                let Op::Fused(Fused { members, .. }) = op else { unreachable!("made above") };
                let exchange = Some(exchange);
                Op::Fused(Fused { members, kernel: FusedKernel::ExpertLayer { exchange } })
            });
            (ops.collect(), vec![y.span, load])
        };
        against_reference(&build, &|device, want, got| {
            let len = DType::BF16.bytes(live * wide);
            let name = format!("{rows} rows of {wide}, {device}");
            let (y, made) = (&want[0][..len], &got[0][..len]);
            assert_eq!(row_difference(DType::BF16, 8.0, wide, y, made), None, "{name}");
            counted(&name, live * top, &want[1], &got[1]);
        });
    }
}
