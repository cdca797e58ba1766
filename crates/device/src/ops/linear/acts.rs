//! Activations quantised to 8 bits per 32 columns, the form that packed weights are multiplied with.

use crate::cpu::pack::{self, COLS};
use crate::cpu::simd::{Level, levels};
use half::f16;

/// Rows whose scales lie side by side: the rows of a tile.
const TILE: usize = 16;

/// Rows of quantised activations in scratch: values, and per block of 32 columns the scale, the scaled sum, and −128
/// times the integer sum (the correction for weights stored as unsigned bytes). Scales and sums of the same block of
/// 16 rows are consecutive, and so are the values: see [`Acts::index`].
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Acts {
    pub(in crate::ops) q: *mut i8,
    pub(in crate::ops) d: *mut f32,
    pub(in crate::ops) s: *mut f32,
    pub(in crate::ops) z: *mut i32,
    pub(in crate::ops) cols: usize,
}

// SAFETY: chunks write different rows, and all are written before any is read.
unsafe impl Sync for Acts {}

impl Acts {
    /// Bytes for `rows` rows.
    pub(in crate::ops) fn bytes(rows: usize, cols: usize) -> usize {
        Self::values(rows, cols) + 3 * Self::scales(rows, cols)
    }

    /// Rows are padded to whole tiles of 16, so that a tile load stays inside.
    fn values(rows: usize, cols: usize) -> usize {
        (rows.next_multiple_of(TILE) * cols).next_multiple_of(64)
    }

    fn scales(rows: usize, cols: usize) -> usize {
        (rows.next_multiple_of(TILE) * (cols / COLS) * 4).next_multiple_of(64)
    }

    /// Lays the arrays out at `at`, which has [`Acts::bytes`].
    pub(in crate::ops) fn new(at: *mut u8, rows: usize, cols: usize) -> Acts {
        let (values, scales) = (Self::values(rows, cols), Self::scales(rows, cols));
        Acts {
            q: at.cast(),
            d: at.wrapping_add(values).cast(),
            s: at.wrapping_add(values + scales).cast(),
            z: at.wrapping_add(values + 2 * scales).cast(),
            cols,
        }
    }

    /// Blocks per row.
    pub(in crate::ops) fn blocks(&self) -> usize {
        self.cols / COLS
    }

    /// Where the scale and the sums of a row's block lie; its values are at 32 times that.
    #[inline(always)]
    pub(in crate::ops) fn index(&self, row: usize, block: usize) -> usize {
        (row / TILE * self.blocks() + block) * TILE + row % TILE
    }

    /// Rounds a row's scaled sums to f16.
    ///
    /// # Safety
    /// As for [`Acts::store`], which came before.
    pub(in crate::ops) unsafe fn round_sums(&self, row: usize) {
        for block in 0..self.blocks() {
            // SAFETY: the caller's promise.
            unsafe {
                let s = self.s.add(self.index(row, block));
                *s = f16::from_f32(*s).to_f32();
            }
        }
    }

    /// Quantises a row. Any values are allowed: pad rows hold arbitrary old bytes, NaN and infinities included, and
    /// their sums may wrap; their results are never read.
    ///
    /// # Safety
    /// `row` is one of the rows laid out, and no other thread touches it now.
    pub(in crate::ops) unsafe fn store(&self, level: Level, row: usize, values: &[f32]) {
        let at = self.index(row, 0);
        // SAFETY: the caller's promise; the level was detected.
        unsafe {
            let (q, d) = (self.q.add(at * COLS), self.d.add(at));
            let (s, z) = (self.s.add(at), self.z.add(at));
            match level {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => quantise_avx512(values, q, d, s, z),
                _ => quantise_row(level, values, q, d, s, z),
            }
        }
    }
}

/// As [`pack::quantise`]; blocks are [`TILE`] entries apart.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn quantise_avx512(values: &[f32], q: *mut i8, d: *mut f32, s: *mut f32, z: *mut i32) {
    use std::arch::x86_64::*;
    for (block, x) in values.chunks_exact(COLS).enumerate() {
        // SAFETY: 32 floats; the caller gave room for every block.
        unsafe {
            let (a, b) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16)));
            let amax = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
            let inverse = _mm512_set1_ps(if amax == 0.0 { 0.0 } else { 127.0 / amax });
            // Conversion rounds to nearest even.
            let a = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
            let b = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
            let to = q.add(TILE * COLS * block);
            _mm_storeu_si128(to.cast(), _mm512_cvtsepi32_epi8(a));
            _mm_storeu_si128(to.add(16).cast(), _mm512_cvtsepi32_epi8(b));
            let sum = _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
            let scale = amax / 127.0;
            let half = _mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(scale));
            *d.add(TILE * block) = _mm_cvtss_f32(_mm_cvtph_ps(half));
            *s.add(TILE * block) = scale * sum as f32;
            *z.add(TILE * block) = sum.wrapping_mul(-128);
        }
    }
}

/// As [`pack::quantise`], in a form that compilers vectorise.
#[inline(always)]
unsafe fn quantise_body<const FMA: bool>(
    values: &[f32],
    q: *mut i8,
    d: *mut f32,
    s: *mut f32,
    z: *mut i32,
) {
    const MAGIC: f32 = 12_582_912.0;
    for (block, x) in values.chunks_exact(pack::COLS).enumerate() {
        let mut lanes = [0.0f32; 16];
        for i in 0..16 {
            let (a, b) = (x[i].abs(), x[i + 16].abs());
            lanes[i] = if a > b { a } else { b };
        }
        let mut half = 8;
        while half > 0 {
            for i in 0..half {
                lanes[i] = if lanes[i] > lanes[i + half] { lanes[i] } else { lanes[i + half] };
            }
            half /= 2;
        }
        let amax = lanes[0];
        let inverse = if amax == 0.0 { 0.0 } else { 127.0 / amax };
        let mut ints = [0i32; pack::COLS];
        for i in 0..pack::COLS {
            // The sum's low mantissa bits are the value rounded to nearest even, in two's complement.
            let bits = (x[i] * inverse + MAGIC).to_bits() as i32;
            ints[i] = bits.wrapping_sub(MAGIC.to_bits() as i32);
        }
        let sum = ints.iter().fold(0i32, |sum, int| sum.wrapping_add(*int));
        let scale = amax / 127.0;
        // SAFETY: the caller gave room for every block.
        unsafe {
            for (i, int) in ints.iter().enumerate() {
                *q.add(TILE * COLS * block + i) = *int as i8;
            }
            *d.add(TILE * block) = f16::from_f32(scale).to_f32();
            *s.add(TILE * block) = scale * sum as f32;
            *z.add(TILE * block) = sum.wrapping_mul(-128);
        }
    }
}

levels! {
    /// Quantises a row into its place.
    fn quantise_row(values: &[f32], q: *mut i8, d: *mut f32, s: *mut f32, z: *mut i32) = quantise_body;
}
