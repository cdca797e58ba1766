//! Adapters: any mix of them, rows without one, one part and several, by token and by row.

use crate::support::*;
use device::op::{Lora, LoraParts};
use device::step::{PARAM_WORDS, param};
use device::{DType, Op, StepLimits};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const ROWS: usize = 5;
const SLOTS: usize = 3;

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
            let limits = StepLimits {
                seats: 4,
                rows: ROWS as u32,
                tokens: 4 * ROWS as u32,
                pages_per_seat: 1,
                page_size: 16,
                vocab: 32,
                penalties: false,
                tokens_per_row: 1,
                tables: 1,
            };
            let state = layout.state(limits);
            // A seat without an adapter, one past the slots, pad rows and pad tokens.
            let mut params = vec![0u32; state.params.span.len as usize / 4];
            for (seat, adapter) in [2, 0, 1, SLOTS as u32 + 1].into_iter().enumerate() {
                params[seat * PARAM_WORDS as usize + param::ADAPTER as usize] = adapter;
            }
            let mut row_seat: Vec<u32> = vec![2, 0, 1, 3, 4];
            row_seat.resize(state.row_seat.span.len as usize / 4, 4);
            let token_row = |at: u32| if at % 7 == 6 { ROWS as u32 } else { at % ROWS as u32 };
            let words = state.token_row.span.len as u32 / 4;
            layout.set(state.params.span, words_to_bytes(&params));
            layout.set(state.row_seat.span, words_to_bytes(&row_seat));
            let token_rows: Vec<u32> = (0..words).map(token_row).collect();
            layout.set(state.token_row.span, words_to_bytes(&token_rows));
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
