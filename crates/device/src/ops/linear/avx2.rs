//! AVX2: as the AVX-512 kernel, with eight rows per register and dot products in two steps.
#![cfg(target_arch = "x86_64")]

use super::packed::Task;
use crate::DType;
use crate::cpu::pack::{self, COLS, ROWS, SCALES};
use std::arch::x86_64::*;

/// Groups of 16 weight rows for every row of activations.
///
/// # Safety
/// As [`Task::run`]; the processor has AVX2, FMA and F16C.
pub(super) unsafe fn run(task: &Task<'_>, groups: std::ops::Range<usize>) {
    for group in groups {
        let mut row = 0;
        while row < task.rows {
            // SAFETY: the caller's promise.
            row += unsafe {
                match (task.dtype, task.rows - row) {
                    (DType::P4, 4..) => tile::<4, false>(task, group, row),
                    (DType::P4, _) => tile::<1, false>(task, group, row),
                    (_, 4..) => tile::<4, true>(task, group, row),
                    _ => tile::<1, true>(task, group, row),
                }
            };
        }
    }
}

/// Eight sums of four products each. Products of unsigned and signed bytes are added in pairs to 16 bits: values of
/// P4 are at most 15, and those of P8 become magnitude times signed activation, so neither overflows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot<const P8: bool>(sum: __m256i, w: __m256i, four: __m256i) -> __m256i {
    let pairs = if P8 {
        let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four, w))
    } else {
        _mm256_maddubs_epi16(w, four)
    };
    _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// One group for `M` rows of activations from `row` on; returns `M`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const M: usize, const P8: bool>(task: &Task<'_>, group: usize, row: usize) -> usize {
    let acts = task.acts;
    let bytes = pack::block_bytes(task.dtype);
    let low = _mm256_set1_epi8(15);
    let mut acc = [[_mm256_setzero_ps(); 2]; M];
    // SAFETY: the group lies in w and the rows in the activations.
    unsafe {
        let mut block = task.w.add(group * task.group_bytes());
        for at in 0..acts.blocks() {
            let mut dots = [[_mm256_setzero_si256(); 2]; M];
            for g in 0..if P8 { 8 } else { 4 } {
                for half in 0..2 {
                    let line = block.add(SCALES + 64 * g + 32 * half);
                    let line = _mm256_loadu_si256(line.cast());
                    for (i, dots) in dots.iter_mut().enumerate() {
                        let q = acts.q.add(acts.index(row + i, at) * COLS).cast::<i32>();
                        let four = _mm256_set1_epi32(q.add(g).read_unaligned());
                        if P8 {
                            dots[half] = dot::<true>(dots[half], line, four);
                        } else {
                            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(line), low);
                            let late = _mm256_set1_epi32(q.add(g + 4).read_unaligned());
                            let line = _mm256_and_si256(line, low);
                            dots[half] = dot::<false>(dots[half], line, four);
                            dots[half] = dot::<false>(dots[half], high, late);
                        }
                    }
                }
            }
            for half in 0..2 {
                let d = _mm256_cvtph_ps(_mm_loadu_si128(block.add(16 * half).cast()));
                let m = block.add(2 * ROWS + 16 * half);
                let m = _mm256_cvtph_ps(_mm_loadu_si128(m.cast()));
                for (i, acc) in acc.iter_mut().enumerate() {
                    let index = acts.index(row + i, at);
                    let scale = _mm256_mul_ps(d, _mm256_set1_ps(*acts.d.add(index)));
                    let dots = _mm256_cvtepi32_ps(dots[i][half]);
                    acc[half] = _mm256_fmadd_ps(dots, scale, acc[half]);
                    acc[half] = _mm256_fmadd_ps(m, _mm256_set1_ps(*acts.s.add(index)), acc[half]);
                }
            }
            block = block.add(bytes);
        }
    }
    for (i, acc) in acc.into_iter().enumerate() {
        let mut products = [0.0f32; ROWS];
        // SAFETY: two times eight floats.
        unsafe {
            _mm256_storeu_ps(products.as_mut_ptr(), acc[0]);
            _mm256_storeu_ps(products.as_mut_ptr().add(8), acc[1]);
        }
        task.finish.row16(row + i, group * ROWS, &mut products);
    }
    M
}
