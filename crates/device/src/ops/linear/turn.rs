//! Squares of words turned in registers: rows of weights become columns.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::*;

/// Turns 16 × 16 words: line i of `to`, `step` bytes after the one before, has word i of each line of `from`.
///
/// # Safety
/// The processor has AVX-512; each line has 64 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn turn(from: &[*const u8; 16], to: *mut u8, step: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut a = [_mm512_setzero_si512(); 16];
        for (line, from) in a.iter_mut().zip(from) {
            *line = _mm512_loadu_si512(from.cast());
        }
        // Pairs of words, pairs of pairs, then the four quarters of a register.
        let mut b = a;
        for i in 0..8 {
            b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
        }
        for i in 0..4 {
            for half in 0..2 {
                let (low, high) = (b[4 * i + half], b[4 * i + 2 + half]);
                a[4 * i + 2 * half] = _mm512_unpacklo_epi64(low, high);
                a[4 * i + 2 * half + 1] = _mm512_unpackhi_epi64(low, high);
            }
        }
        for i in 0..4 {
            b[i] = _mm512_shuffle_i32x4::<0b10_00_10_00>(a[i], a[4 + i]);
            b[4 + i] = _mm512_shuffle_i32x4::<0b11_01_11_01>(a[i], a[4 + i]);
            b[8 + i] = _mm512_shuffle_i32x4::<0b10_00_10_00>(a[8 + i], a[12 + i]);
            b[12 + i] = _mm512_shuffle_i32x4::<0b11_01_11_01>(a[8 + i], a[12 + i]);
        }
        for i in 0..4 {
            let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(b[i], b[8 + i]);
            let odd = _mm512_shuffle_i32x4::<0b10_00_10_00>(b[4 + i], b[12 + i]);
            let more_even = _mm512_shuffle_i32x4::<0b11_01_11_01>(b[i], b[8 + i]);
            let more_odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(b[4 + i], b[12 + i]);
            for (at, line) in [(i, even), (4 + i, odd), (8 + i, more_even), (12 + i, more_odd)] {
                _mm512_storeu_si512(to.add(step * at).cast(), line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_turned() {
        if !std::is_x86_feature_detected!("avx512bw") {
            return;
        }
        let from: Vec<u32> = (0..256).collect();
        let mut to = vec![0u32; 256];
        // SAFETY: two tiles, and the processor has AVX-512.
        unsafe {
            let lines = std::array::from_fn(|line| from.as_ptr().add(16 * line).cast());
            turn(&lines, to.as_mut_ptr().cast(), 64);
        }
        for (at, word) in to.iter().enumerate() {
            assert_eq!(*word as usize, at % 16 * 16 + at / 16);
        }
    }
}
