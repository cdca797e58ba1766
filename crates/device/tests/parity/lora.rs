//! Adapters: any mix of them, rows without one, one part and several, by token and by row; in a launch of their own and in
//! that of a linear.

use crate::support::*;
use device::op::{Activation, Epilogue, LinearChain, Lora, LoraParts, Norm, NormHandoff};
use device::step::{PARAM_WORDS, param};
use device::variant::Pick;
use device::{DType, Op, StepLimits, StepState, Tensor};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const ROWS: usize = 5;
const SLOTS: usize = 3;

/// Tables of a step of `rows` rows and four times as many tokens: seats with an adapter, without one, and with one past the
/// slots; pad rows and pad tokens.
fn tables(layout: &mut Layout, rows: u32, slots: u32) -> StepState {
    let limits = StepLimits {
        seats: 4,
        rows,
        tokens: 4 * rows,
        pages_per_seat: 1,
        page_size: 16,
        vocab: 32,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    };
    let state = layout.state(limits);
    let mut params = vec![0u32; state.params.span.len as usize / 4];
    for (seat, adapter) in [2, 0, 1, slots + 1].into_iter().enumerate() {
        params[seat * PARAM_WORDS as usize + param::ADAPTER as usize] = adapter;
    }
    let mut row_seat: Vec<u32> = (0..rows).map(|row| [2, 0, 1, 3, 4][row as usize % 5]).collect();
    row_seat.resize(state.row_seat.span.len as usize / 4, 4);
    let token_row = |at: u32| if at % 7 == 6 { rows } else { at % rows };
    let words = state.token_row.span.len as u32 / 4;
    layout.set(state.params.span, words_to_bytes(&params));
    layout.set(state.row_seat.span, words_to_bytes(&row_seat));
    layout
        .set(state.token_row.span, words_to_bytes(&(0..words).map(token_row).collect::<Vec<_>>()));
    state
}

#[test]
fn lora() {
    let rng = &mut Rng::new(31);
    for seed in 0..30 {
        let (wide, rank) = (1 + rng.below(700), 1 + rng.below(20));
        let wide = if seed % 2 == 0 { wide } else { wide.next_multiple_of(8) };
        let cols = 6 * (1 + rng.below(120));
        let [mut x_type, mut a_type, mut b_type, y_type] = [(); 4].map(|()| rng.pick(&FLOATS));
        let (mut wide, mut rank) = (wide, rank);
        // The kernels whose blocks belong to adapters, with one and several slices of k.
        if seed % 3 == 1 {
            (x_type, a_type, b_type) = (DType::BF16, DType::BF16, DType::BF16);
            (wide, rank) = (8 * (1 + rng.below(600)), 8 * (1 + rng.below(4)));
        }
        let n = cols as u32;
        let parts = match rng.below(3) {
            0 => LoraParts::Stacked(vec![n]),
            1 => LoraParts::Stacked(vec![n / 2, n / 3 * 2, n]),
            _ => LoraParts::Turns(2),
        };
        let by_row = seed % 3 == 0;
        let tokens = if by_row { ROWS } else { 4 * ROWS };
        let (live, gap) = (rng.below(tokens + 1), rng.pick(&[0, 8]));
        let inner = parts.count() as usize * rank;
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(seed);
            let state = tables(layout, ROWS as u32, SLOTS as u32);
            let live = Some(layout.words(&[live as u32]).span);
            let x = layout.floats(x_type, tokens, wide, gap, &rng.floats(tokens * wide, 1.0));
            let y = layout.floats(y_type, tokens, cols, gap, &rng.floats(tokens * cols, 2.0));
            let rows = SLOTS * inner;
            let a = layout.floats(a_type, rows, wide, 0, &rng.floats(rows * wide, 0.1));
            let rows = SLOTS * cols;
            let b = layout.floats(b_type, rows, rank, 0, &rng.floats(rows * rank, 0.3));
            let bytes = 2 << 20;
            let scratch = Some(layout.bytes(device::Region::State, "scratch", vec![0; bytes]));
            let parts = parts.clone();
            let op = Lora { x, base: y, a, b, parts, y, state, by_row, live, scratch };
            (vec![Op::Lora(op)], vec![y.span])
        };
        against_reference(&build, &|device, want, got| {
            assert_close(&format!("seed {seed} {device}"), y_type, 2.0, &want[0], &got[0]);
        });
    }
}

/// A linear whose kernel adds what adapters do (on a GPU that has it; elsewhere its members run one by one).
struct Case {
    rows: usize,
    k: usize,
    n: u32,
    live: usize,
    rank: usize,
    parts: LoraParts,
    /// 0 store, 1 residual in place, 2 silu·mul, 3 gelu, 4 store in f32.
    epilogue: usize,
    norm: bool,
    by_row: bool,
    variant: &'static str,
}

const HALF: DType = DType::BF16;

fn matrix(layout: &mut Layout, rng: &mut Rng, rows: usize, cols: usize, scale: f32) -> Tensor {
    let values = rng.floats(rows * cols, scale);
    layout.floats(HALF, rows, cols, 0, &values)
}

fn adapters(
    layout: &mut Layout,
    rng: &mut Rng,
    state: StepState,
    linear: &LinearChain,
    (parts, rank, by_row): (&LoraParts, usize, bool),
) -> Option<Box<Lora>> {
    let (n, k) = (linear.w.rows as usize, linear.w.cols as usize);
    // What they add is ten times what rounding costs.
    let a = matrix(layout, rng, SLOTS * parts.count() as usize * rank, k, 0.3);
    let b = matrix(layout, rng, SLOTS * n, rank, 1.0);
    let LinearChain { x, y, live, .. } = *linear;
    let parts = parts.clone();
    Some(Box::new(Lora { x, base: y, a, b, parts, y, state, by_row, live, scratch: None }))
}

impl Case {
    /// The op twice, after one that leaves NaN in the scratch.
    fn ops(&self, layout: &mut Layout) -> (Vec<Op>, Vec<device::Span>) {
        let Case { rows, k, live, rank, epilogue, norm, by_row, .. } = *self;
        let rng = &mut Rng::new(900 + rows as u64);
        let n = self.n as usize;
        let state = tables(layout, rows as u32, SLOTS as u32);
        let mut values = rng.floats(rows * k, 1.0);
        values[live * k..].fill(f32::NAN);
        let x = layout.floats(HALF, rows, k, 0, &values);
        let poison = layout.poison(HALF, rows, k, 0);
        let w = matrix(layout, rng, n, k, 0.1);
        let norm = norm.then(|| {
            let weight: Vec<f32> = rng.floats(k, 0.5).iter().map(|w| w + 1.0).collect();
            Norm { weight: layout.floats(HALF, 1, k, 0, &weight), eps: 1e-5 }
        });
        let bias = (epilogue == 0).then(|| matrix(layout, rng, 1, n, 1.0));
        let live_bytes = |y: &Tensor| y.dtype.bytes(live * y.stride as usize) as u64;
        let counted = Some(layout.words(&[live as u32]).span);
        let pick = match self.variant {
            "" => Pick::Best,
            variant => Pick::Named(variant.parse().expect("a variant")),
        };
        let residual = rng.floats(rows * n, 1.0);
        let one = |layout: &mut Layout, x: Tensor| {
            let (epilogue, y) = match epilogue {
                1 => {
                    let y = layout.floats(HALF, rows, n, 0, &residual);
                    (Epilogue::Residual(y), y)
                }
                2 => (Epilogue::GateMul(Activation::Silu), layout.poison(HALF, rows, n / 2, 0)),
                3 => (Epilogue::Activate(Activation::Gelu), layout.poison(HALF, rows, n, 0)),
                4 => (Epilogue::Store, layout.poison(DType::F32, rows, n, 0)),
                _ => (Epilogue::Store, layout.poison(HALF, rows, n, 8)),
            };
            LinearChain { bias, norm, epilogue, live: counted, pick, ..LinearChain::new(x, w, y) }
        };
        let first = one(layout, x);
        let lora = adapters(layout, rng, state, &first, (&self.parts, rank, by_row));
        let others = [poison, x].map(|x| one(layout, x));
        let chains = [&others[0], &first, &others[1]];
        let ops = chains.map(|chain| LinearChain { lora: lora.clone(), ..chain.clone() }.into());
        let outs = [first.y, others[1].y].map(|y| y.span.part(0, live_bytes(&y)));
        (ops.into(), outs.into())
    }

    fn check(&self) {
        against_reference(&|layout| self.ops(layout), &|device, want, got| {
            let Case { rows, n, k, epilogue, variant, .. } = self;
            let what = format!("{rows}×{n}×{k}, epilogue {epilogue}, {variant} on {device}");
            let dtype = if *epilogue == 4 { DType::F32 } else { HALF };
            // `x · Aᵀ` may be rounded to bf16.
            let scale = (*k as f32).sqrt() * if dtype == HALF { 2.0 } else { 500.0 };
            assert_close(&what, dtype, scale, &want[0], &got[0]);
            assert!(got[0] == got[1], "{what}: another result the second time");
        });
    }
}

#[test]
fn adapters_in_the_launch_of_a_linear() {
    let case = Case {
        rows: 9,
        k: 256,
        n: 320,
        live: 9,
        rank: 16,
        parts: LoraParts::Stacked(vec![192, 256, 320]),
        epilogue: 0,
        norm: true,
        by_row: false,
        variant: "",
    };
    case.check();
    let gated = LoraParts::Turns(2);
    let variant = "wgmma,wide=192,split=1";
    Case { rows: 24, n: 400, live: 23, parts: gated, epilogue: 2, norm: false, variant, ..case }
        .check();
}

#[test]
fn adapters_in_the_launch_of_a_split_linear() {
    let case = Case {
        rows: 16,
        k: 512,
        n: 272,
        live: 13,
        rank: 32,
        parts: LoraParts::Stacked(vec![272]),
        epilogue: 1,
        norm: false,
        by_row: true,
        variant: "wgmma,wide=64,split=2",
    };
    case.check();
    let variant = "wgmma,wide=128,split=1";
    Case {
        k: 192,
        parts: LoraParts::Stacked(vec![80, 272]),
        epilogue: 3,
        rank: 64,
        variant,
        ..case
    }
    .check();
    let variant = "wgmma,wide=48,split=1";
    let parts = LoraParts::Stacked(vec![208]);
    Case { rows: 64, k: 192, n: 208, live: 61, parts, epilogue: 4, variant, ..case }.check();
}

/// A linear with adapters prepares its result for the norm of the next one, which has adapters, too.
#[test]
fn adapters_beside_a_prepared_norm() {
    let (rows, n, k, live) = (24, 256, 192, 22);
    let build = |layout: &mut Layout| {
        let rng = &mut Rng::new(950);
        let state = tables(layout, rows as u32, SLOTS as u32);
        let mut values = rng.floats(rows * k, 1.0);
        values[live * k..].fill(f32::NAN);
        let x = layout.floats(HALF, rows, k, 0, &values);
        let mid = matrix(layout, rng, rows, n, 1.0);
        let weight: Vec<f32> = rng.floats(n, 0.5).iter().map(|w| w + 1.0).collect();
        let norm = Norm { weight: layout.floats(HALF, 1, n, 0, &weight), eps: 1e-5 };
        let (w, w2) = (matrix(layout, rng, n, k, 0.1), matrix(layout, rng, 96, n, 0.1));
        let y = layout.poison(HALF, rows, 96, 0);
        let counted = Some(layout.words(&[live as u32]).span);
        let mut first = LinearChain {
            epilogue: Epilogue::Residual(mid),
            handoff: NormHandoff::Produce(norm),
            live: counted,
            ..LinearChain::new(x, w, mid)
        };
        let (norm, handoff) = (Some(norm), NormHandoff::Consume);
        let mut second =
            LinearChain { norm, handoff, live: counted, ..LinearChain::new(mid, w2, y) };
        for (linear, end) in [(&mut first, n), (&mut second, 96)] {
            let parts = LoraParts::Stacked(vec![end as u32]);
            linear.lora = adapters(layout, rng, state, linear, (&parts, 16, false));
        }
        let outs = [(mid, n), (y, 96)].map(|(y, cols)| y.span.part(0, (live * cols * 2) as u64));
        (vec![first.into(), second.into()], outs.into())
    };
    against_reference(&build, &|device, want, got| {
        let scale = (k as f32).sqrt() * 2.0;
        assert_close(&format!("first on {device}"), HALF, scale, &want[0], &got[0]);
        assert_close(&format!("second on {device}"), HALF, 4.0 * scale, &want[1], &got[1]);
    });
}
