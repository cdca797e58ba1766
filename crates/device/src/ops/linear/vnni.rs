//! AVX-512 VNNI: a line of a packed block is 16 rows × 4 columns, multiplied with 4 broadcast
//! activations in one instruction. Weights are unpacked once for up to 8 rows of activations.
#![cfg(target_arch = "x86_64")]

use super::packed::{AHEAD, Task};
use crate::DType;
use crate::cpu::pack::{self, COLS, ROWS, SCALES};
use std::arch::x86_64::*;

/// A packed block in registers: scales and minima of 16 rows, and eight lines of 16 rows × 4 columns.
pub(super) struct Block {
    pub(super) d: __m512,
    pub(super) m: __m512,
    pub(super) lines: [__m512i; 8],
}

impl Block {
    /// Reads the block at `from` and prefetches those ahead of it.
    ///
    /// # Safety
    /// A block of P8 or P4 lies there; the processor has AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn load<const P8: bool>(from: *const u8) -> Block {
        let low = _mm512_set1_epi8(15);
        let mut lines = [_mm512_setzero_si512(); 8];
        // SAFETY: the caller's promise; prefetches may point anywhere.
        unsafe {
            for line in 0..pack::block_bytes(if P8 { DType::P8 } else { DType::P4 }) / 64 {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD + 64 * line).cast());
            }
            for g in 0..if P8 { 8 } else { 4 } {
                let line = _mm512_loadu_si512(from.add(SCALES + 64 * g).cast());
                if P8 {
                    lines[g] = line;
                } else {
                    lines[g] = _mm512_and_si512(line, low);
                    lines[g + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(line), low);
                }
            }
            Block {
                d: _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())),
                m: _mm512_cvtph_ps(_mm256_loadu_si256(from.add(2 * ROWS).cast())),
                lines,
            }
        }
    }
}

/// Groups of 16 weight rows for every row of activations.
///
/// # Safety
/// As [`Task::run`]; the processor has AVX-512 VNNI.
pub(super) unsafe fn run<const P8: bool>(task: &Task<'_>, groups: std::ops::Range<usize>) {
    // SAFETY: the caller's promise.
    unsafe {
        for group in groups {
            let mut row = 0;
            while row < task.rows {
                row += match task.rows - row {
                    8.. => tile::<8, P8>(task, group, row),
                    4.. => tile::<4, P8>(task, group, row),
                    2.. => tile::<2, P8>(task, group, row),
                    _ => tile::<1, P8>(task, group, row),
                };
            }
        }
    }
}

/// One group for `M` rows of activations from `row` on; returns `M`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn tile<const M: usize, const P8: bool>(task: &Task<'_>, group: usize, row: usize) -> usize {
    let acts = task.acts;
    let bytes = pack::block_bytes(if P8 { DType::P8 } else { DType::P4 });
    let mut acc = [_mm512_setzero_ps(); M];
    // SAFETY: the group lies in w and the rows in the activations.
    unsafe {
        let mut block = task.w.add(group * task.group_bytes());
        for at in 0..acts.blocks() {
            let Block { d, m, lines } = Block::load::<P8>(block);
            for (i, acc) in acc.iter_mut().enumerate() {
                let index = acts.index(row + i, at);
                let q = acts.q.add(index * COLS).cast::<i32>();
                let start = if P8 { *acts.z.add(index) } else { 0 };
                let mut dots = [_mm512_set1_epi32(start), _mm512_setzero_si512()];
                for (g, line) in lines.iter().enumerate() {
                    let four = _mm512_set1_epi32(q.add(g).read_unaligned());
                    dots[g % 2] = _mm512_dpbusd_epi32(dots[g % 2], *line, four);
                }
                let dots = _mm512_cvtepi32_ps(_mm512_add_epi32(dots[0], dots[1]));
                let scale = _mm512_mul_ps(d, _mm512_set1_ps(*acts.d.add(index)));
                *acc = _mm512_fmadd_ps(dots, scale, *acc);
                *acc = _mm512_fmadd_ps(m, _mm512_set1_ps(*acts.s.add(index)), *acc);
            }
            block = block.add(bytes);
        }
    }
    for (i, acc) in acc.into_iter().enumerate() {
        // SAFETY: this task alone computes the group.
        unsafe { task.finish.lanes16(row + i, group * ROWS, acc) };
    }
    M
}
