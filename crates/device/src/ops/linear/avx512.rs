//! AVX-512 without dot products of bytes: as the VNNI kernel, with sums in two steps of 16 and 32 bits.
#![cfg(target_arch = "x86_64")]

use super::packed::Task;
use super::vnni::Block;
use crate::cpu::pack::{self, COLS, ROWS};
use std::arch::x86_64::*;

/// Groups of 16 weight rows for every row of activations.
///
/// # Safety
/// As [`Task::run`]; the processor has AVX-512.
pub(super) unsafe fn run<const P8: bool>(task: &Task<'_>, groups: std::ops::Range<usize>) {
    for group in groups {
        let mut row = 0;
        while row < task.rows {
            // SAFETY: the caller's promise.
            row += unsafe {
                match task.rows - row {
                    8.. => tile::<8, P8>(task, group, row),
                    2.. => tile::<2, P8>(task, group, row),
                    _ => tile::<1, P8>(task, group, row),
                }
            };
        }
    }
}

/// Products of unsigned and signed bytes, added in pairs to 16 bits, of the eight lines of a block. Values of P4 are at
/// most 15, so that the pairs of all eight lines fit 16 bits too; those of P8 become magnitude times signed activation,
/// of which one pair fits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn dots<const P8: bool>(
    lines: &[__m512i; 8],
    signs: &[__mmask64; 8],
    q: *const i32,
) -> __m512i {
    let ones = _mm512_set1_epi16(1);
    let mut sums = [_mm512_setzero_si512(); 2];
    for g in 0..8 {
        // SAFETY: the caller's promise: 32 activations.
        let four = _mm512_set1_epi32(unsafe { q.add(g).read_unaligned() });
        if P8 {
            let four = _mm512_mask_sub_epi8(four, signs[g], _mm512_setzero_si512(), four);
            let pairs = _mm512_madd_epi16(_mm512_maddubs_epi16(lines[g], four), ones);
            sums[g % 2] = _mm512_add_epi32(sums[g % 2], pairs);
        } else {
            sums[g % 2] = _mm512_add_epi16(sums[g % 2], _mm512_maddubs_epi16(lines[g], four));
        }
    }
    match P8 {
        true => _mm512_add_epi32(sums[0], sums[1]),
        false => _mm512_madd_epi16(_mm512_add_epi16(sums[0], sums[1]), ones),
    }
}

/// One group for `M` rows of activations from `row` on; returns `M`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn tile<const M: usize, const P8: bool>(task: &Task<'_>, group: usize, row: usize) -> usize {
    let acts = task.acts;
    let bytes = pack::block_bytes(task.dtype);
    let mut acc = [_mm512_setzero_ps(); M];
    // SAFETY: the group lies in w and the rows in the activations.
    unsafe {
        let mut block = task.w.add(group * task.group_bytes());
        for at in 0..acts.blocks() {
            let Block { d, m, mut lines } = Block::load::<P8>(block);
            let mut signs = [0; 8];
            if P8 {
                for (line, sign) in lines.iter_mut().zip(&mut signs) {
                    let w = _mm512_xor_si512(*line, _mm512_set1_epi8(-128));
                    (*line, *sign) = (_mm512_abs_epi8(w), _mm512_movepi8_mask(w));
                }
            }
            for (i, acc) in acc.iter_mut().enumerate() {
                let index = acts.index(row + i, at);
                let dots = dots::<P8>(&lines, &signs, acts.q.add(index * COLS).cast());
                let scale = _mm512_mul_ps(d, _mm512_set1_ps(*acts.d.add(index)));
                *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, *acc);
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
