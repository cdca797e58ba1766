//! Packed weights as ggml multiplies them. A block's 32 products are added four by four, exactly, as integers. Each
//! of the eight sums goes to its own float lane by a fused multiply-add with both blocks' scales. At the end of the
//! row the lanes are added by halves. Minima are summed separately, against the activations' sums rounded to f16, and
//! added last.
//!
//! A line of our packed blocks holds exactly four such columns of 16 rows, so the lanes of 16 rows are eight
//! registers, and the sums are the same for any number of rows.

use super::packed::Task;
use crate::DType;
use crate::cpu::pack::{self, COLS, ROWS, SCALES};
use crate::cpu::quant::half_at;
use crate::cpu::simd::{Level, levels};

/// Integer sums of a block: one for each line.
const LANES: usize = 8;

/// Groups of 16 weight rows for every row of activations.
///
/// # Safety
/// As [`Task::run`]; the processor has the level, and AVX-512 VNNI if `vnni`.
pub(super) unsafe fn run(
    task: &Task<'_>,
    level: Level,
    vnni: bool,
    groups: std::ops::Range<usize>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match vnni {
            #[cfg(target_arch = "x86_64")]
            true => vnni::run(task, groups),
            _ => run_level(level, task, groups),
        }
    }
}

levels! {
    /// Without dot-product instructions.
    fn run_level(task: &Task<'_>, groups: std::ops::Range<usize>) = run_body;
}

#[inline(always)]
unsafe fn run_body<const FMA: bool>(task: &Task<'_>, groups: std::ops::Range<usize>) {
    let bytes = task.group_bytes();
    for group in groups {
        // SAFETY: a group of w.
        let weights = unsafe { std::slice::from_raw_parts(task.w.add(group * bytes), bytes) };
        for row in 0..task.rows {
            // SAFETY: a row that was prepared.
            let mut products = unsafe { products(task, weights, row) };
            task.finish.row16(row, group * ROWS, &mut products);
        }
    }
}

#[inline(always)]
unsafe fn products(task: &Task<'_>, weights: &[u8], row: usize) -> [f32; ROWS] {
    let mut lanes = [[0.0f32; ROWS]; LANES];
    let mut mins = [0.0f32; ROWS];
    for (at, block) in weights.chunks_exact(pack::block_bytes(task.dtype)).enumerate() {
        // SAFETY: the caller's promise.
        let (q, d, s) = unsafe {
            let index = task.acts.index(row, at);
            let q = &*task.acts.q.add(index * COLS).cast::<[i8; COLS]>();
            (q, *task.acts.d.add(index), *task.acts.s.add(index))
        };
        let mut scales = [0.0f32; ROWS];
        for r in 0..ROWS {
            scales[r] = half_at(block, 2 * r) * d;
            mins[r] = half_at(block, 2 * ROWS + 2 * r).mul_add(s, mins[r]);
        }
        for (g, lane) in lanes.iter_mut().enumerate() {
            let four: &[i8; 4] = q[4 * g..4 * g + 4].try_into().expect("four columns");
            let sums = sums(task.dtype, &block[SCALES..], g, four);
            for r in 0..ROWS {
                lane[r] = scales[r].mul_add(sums[r] as f32, lane[r]);
            }
        }
    }
    std::array::from_fn(|r| {
        let lane = |g: usize| lanes[g][r] + lanes[g + 4][r];
        (lane(0) + lane(2)) + (lane(1) + lane(3)) + mins[r]
    })
}

/// The sum of the four products of columns 4·g.. of each row.
#[inline(always)]
fn sums(dtype: DType, lines: &[u8], g: usize, four: &[i8; 4]) -> [i32; ROWS] {
    let (line, shift) = match dtype {
        DType::P8 => (g, 0),
        _ => (g % 4, g / 4 * 4),
    };
    let line: &[u8; 4 * ROWS] = lines[64 * line..64 * line + 64].try_into().expect("a line");
    let mut sums = [0i32; ROWS];
    for (r, sum) in sums.iter_mut().enumerate() {
        for (b, q) in four.iter().enumerate() {
            let byte = line[4 * r + b];
            let value = match dtype {
                DType::P8 => i32::from((byte ^ 0x80) as i8),
                _ => i32::from(byte >> shift & 15),
            };
            *sum += value * i32::from(*q);
        }
    }
    sums
}

#[cfg(target_arch = "x86_64")]
mod vnni {
    use super::LANES;
    use crate::DType;
    use crate::cpu::pack::{self, COLS, ROWS};
    use crate::ops::linear::packed::Task;
    use crate::ops::linear::vnni::Block;
    use std::arch::x86_64::*;

    /// As [`super::run`].
    pub(super) unsafe fn run(task: &Task<'_>, groups: std::ops::Range<usize>) {
        for group in groups {
            let mut row = 0;
            while row < task.rows {
                // SAFETY: the caller's promise.
                row += unsafe {
                    match (task.dtype, task.rows - row) {
                        (DType::P8, 2..) => tile::<2, true>(task, group, row),
                        (DType::P8, _) => tile::<1, true>(task, group, row),
                        (_, 2..) => tile::<2, false>(task, group, row),
                        _ => tile::<1, false>(task, group, row),
                    }
                };
            }
        }
    }

    /// One group for `M` rows of activations from `row` on; returns `M`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn tile<const M: usize, const P8: bool>(
        task: &Task<'_>,
        group: usize,
        row: usize,
    ) -> usize {
        let acts = task.acts;
        let bytes = pack::block_bytes(if P8 { DType::P8 } else { DType::P4 });
        let zero = _mm512_setzero_si512();
        let offset = _mm512_set1_epi8(-128);
        let mut lanes = [[_mm512_setzero_ps(); LANES]; M];
        let mut mins = [_mm512_setzero_ps(); M];
        // SAFETY: the group lies in w and the rows in the activations.
        unsafe {
            let mut block = task.w.add(group * task.group_bytes());
            for at in 0..acts.blocks() {
                let Block { d, m, lines } = Block::load::<P8>(block);
                for i in 0..M {
                    let index = acts.index(row + i, at);
                    let q = acts.q.add(index * COLS).cast::<i32>();
                    let scale = _mm512_mul_ps(d, _mm512_set1_ps(*acts.d.add(index)));
                    for g in 0..LANES {
                        let four = _mm512_set1_epi32(q.add(g).read_unaligned());
                        let mut sums = _mm512_dpbusd_epi32(zero, lines[g], four);
                        if P8 {
                            // The stored bytes are 128 more than the values.
                            let more = _mm512_dpbusd_epi32(zero, offset, four);
                            sums = _mm512_sub_epi32(sums, more);
                        }
                        let sums = _mm512_cvtepi32_ps(sums);
                        lanes[i][g] = _mm512_fmadd_ps(scale, sums, lanes[i][g]);
                    }
                    mins[i] = _mm512_fmadd_ps(m, _mm512_set1_ps(*acts.s.add(index)), mins[i]);
                }
                block = block.add(bytes);
            }
        }
        for (i, (lanes, mins)) in lanes.into_iter().zip(mins).enumerate() {
            let [a, b, c, d, e, f, g, h] = lanes;
            let even = _mm512_add_ps(_mm512_add_ps(a, e), _mm512_add_ps(c, g));
            let odd = _mm512_add_ps(_mm512_add_ps(b, f), _mm512_add_ps(d, h));
            let products = _mm512_add_ps(_mm512_add_ps(even, odd), mins);
            // SAFETY: this task alone computes the group.
            unsafe { task.finish.lanes16(row + i, group * ROWS, products) };
        }
        M
    }
}
