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
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => wide::run(task, vnni, groups),
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
mod wide {
    use super::LANES;
    use crate::DType;
    use crate::cpu::pack::{self, COLS, ROWS};
    use crate::ops::linear::packed::Task;
    use crate::ops::linear::vnni::Block;
    use std::arch::x86_64::*;

    /// As [`super::run`], by AVX-512.
    pub(super) unsafe fn run(task: &Task<'_>, vnni: bool, groups: std::ops::Range<usize>) {
        // SAFETY: the caller's promise.
        unsafe {
            match (vnni, task.dtype) {
                (true, DType::P8) => groups.for_each(|group| with_vnni::<true>(task, group)),
                (true, _) => groups.for_each(|group| with_vnni::<false>(task, group)),
                (false, DType::P8) => groups.for_each(|group| without::<true>(task, group)),
                (false, _) => groups.for_each(|group| without::<false>(task, group)),
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn with_vnni<const P8: bool>(task: &Task<'_>, group: usize) {
        // SAFETY: the caller's promise.
        unsafe { rows::<P8, true>(task, group) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn without<const P8: bool>(task: &Task<'_>, group: usize) {
        // SAFETY: the caller's promise.
        unsafe { rows::<P8, false>(task, group) }
    }

    /// One group for every row of activations.
    #[inline(always)]
    unsafe fn rows<const P8: bool, const VNNI: bool>(task: &Task<'_>, group: usize) {
        let mut row = 0;
        // SAFETY: the caller's promise.
        unsafe {
            while row + 2 <= task.rows {
                tile::<2, P8, VNNI>(task, group, row);
                row += 2;
            }
            if row < task.rows {
                tile::<1, P8, VNNI>(task, group, row);
            }
        }
    }

    /// The sums of four products each of a line and four activations.
    #[inline(always)]
    unsafe fn sums<const P8: bool, const VNNI: bool>(line: __m512i, four: __m512i) -> __m512i {
        // SAFETY: the caller's promise: the processor has AVX-512, and VNNI if that.
        unsafe {
            let (zero, offset) = (_mm512_setzero_si512(), _mm512_set1_epi8(-128));
            match (P8, VNNI) {
                (true, true) => {
                    // The stored bytes are 128 more than the values.
                    let more = _mm512_dpbusd_epi32(zero, offset, four);
                    _mm512_sub_epi32(_mm512_dpbusd_epi32(zero, line, four), more)
                }
                (false, true) => _mm512_dpbusd_epi32(zero, line, four),
                // Pairs of products fit 16 bits: values of P4 are at most 15, magnitudes of P8 times activations
                // at most 128 · 127.
                (true, false) => {
                    let w = _mm512_xor_si512(line, offset);
                    let signed = _mm512_mask_sub_epi8(four, _mm512_movepi8_mask(w), zero, four);
                    let pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed);
                    _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))
                }
                (false, false) => {
                    _mm512_madd_epi16(_mm512_maddubs_epi16(line, four), _mm512_set1_epi16(1))
                }
            }
        }
    }

    /// One group for `M` rows of activations from `row` on.
    #[inline(always)]
    unsafe fn tile<const M: usize, const P8: bool, const VNNI: bool>(
        task: &Task<'_>,
        group: usize,
        row: usize,
    ) {
        let acts = task.acts;
        let bytes = pack::block_bytes(if P8 { DType::P8 } else { DType::P4 });
        // SAFETY: the group lies in w and the rows in the activations; this task alone computes the group.
        unsafe {
            let mut lanes = [[_mm512_setzero_ps(); LANES]; M];
            let mut mins = [_mm512_setzero_ps(); M];
            let mut block = task.w.add(group * task.group_bytes());
            for at in 0..acts.blocks() {
                let Block { d, m, lines } = Block::load::<P8>(block);
                for i in 0..M {
                    let index = acts.index(row + i, at);
                    let q = acts.q.add(index * COLS).cast::<i32>();
                    let scale = _mm512_mul_ps(d, _mm512_set1_ps(*acts.d.add(index)));
                    for g in 0..LANES {
                        let four = _mm512_set1_epi32(q.add(g).read_unaligned());
                        let sums = _mm512_cvtepi32_ps(sums::<P8, VNNI>(lines[g], four));
                        lanes[i][g] = _mm512_fmadd_ps(scale, sums, lanes[i][g]);
                    }
                    mins[i] = _mm512_fmadd_ps(m, _mm512_set1_ps(*acts.s.add(index)), mins[i]);
                }
                block = block.add(bytes);
            }
            for (i, (lanes, mins)) in lanes.into_iter().zip(mins).enumerate() {
                let [a, b, c, d, e, f, g, h] = lanes;
                let even = _mm512_add_ps(_mm512_add_ps(a, e), _mm512_add_ps(c, g));
                let odd = _mm512_add_ps(_mm512_add_ps(b, f), _mm512_add_ps(d, h));
                let products = _mm512_add_ps(_mm512_add_ps(even, odd), mins);
                task.finish.lanes16(row + i, group * ROWS, products);
            }
        }
    }
}
