//! Quantised blocks as GGUF defines them, turned into f32. Every product and sum is one f32 operation
//! in the order the format's own reference uses, so results agree bit for bit; sixteen elements that
//! share a scale are one loop, which compilers turn into vectors.

use super::simd::levels;
use crate::DType;
use half::f16;

/// Whole blocks of `dtype` into `out`.
///
/// # Panics
/// If lengths do not match, or the dtype is not a GGUF block type.
pub(crate) fn dequantise(dtype: DType, blocks: &[u8], out: &mut [f32]) {
    dequantise_body::<false>(dtype, blocks, out);
}

levels! {
    /// As [`dequantise`], with the level's instructions.
    pub(crate) fn dequantise_with(dtype: DType, blocks: &[u8], out: &mut [f32]) = dequantise_body;
}

#[inline(always)]
fn dequantise_body<const FMA: bool>(dtype: DType, blocks: &[u8], out: &mut [f32]) {
    let (elems, bytes) = (dtype.block_elems(), dtype.block_bytes());
    assert_eq!(blocks.len() / bytes * elems, out.len());
    for (block, out) in blocks.chunks_exact(bytes).zip(out.chunks_exact_mut(elems)) {
        match dtype {
            DType::Q4_0 => q4(block, 2, out, |d, q| d * (f32::from(q) - 8.0)),
            DType::Q4_1 => {
                let m = half_at(block, 2);
                q4(block, 4, out, |d, q| d * f32::from(q) + m);
            }
            DType::Q5_0 => q5(block, 2, out, |d, q| d * (f32::from(q) - 16.0)),
            DType::Q5_1 => {
                let m = half_at(block, 2);
                q5(block, 4, out, |d, q| d * f32::from(q) + m);
            }
            DType::Q8_0 => {
                let d = half_at(block, 0);
                for (out, q) in out.iter_mut().zip(&block[2..]) {
                    *out = d * f32::from(*q as i8);
                }
            }
            DType::Q2K => q2k(block, out),
            DType::Q3K => q3k(block, out),
            DType::Q4K => q4k(block, out),
            DType::Q5K => q5k(block, out),
            DType::Q6K => q6k(block, out),
            other => panic!("{other:?} is not a GGUF block type"),
        }
    }
}

/// The f16 at a byte offset, as f32.
#[inline]
pub(crate) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Low nibbles are the first half of the block, high nibbles the second.
#[inline(always)]
fn q4(block: &[u8], at: usize, out: &mut [f32], value: impl Fn(f32, u8) -> f32) {
    let d = half_at(block, 0);
    for i in 0..16 {
        out[i] = value(d, block[at + i] & 15);
        out[i + 16] = value(d, block[at + i] >> 4);
    }
}

#[inline(always)]
fn q5(block: &[u8], at: usize, out: &mut [f32], value: impl Fn(f32, u8) -> f32) {
    let d = half_at(block, 0);
    let fifth = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    let bit = |i: usize| ((fifth >> i & 1) << 4) as u8;
    for i in 0..16 {
        let q = block[at + 4 + i];
        out[i] = value(d, q & 15 | bit(i));
        out[i + 16] = value(d, q >> 4 | bit(i + 16));
    }
}

/// Sixteen consecutive bytes, widened to the size of the floats they become, because vectors of bytes have no shifts.
#[inline(always)]
fn sixteen(bytes: &[u8], at: usize) -> [i32; 16] {
    let bytes: [u8; 16] = bytes[at..at + 16].try_into().expect("sixteen bytes");
    bytes.map(i32::from)
}

/// Sixteen elements from `at` on: scale·q − min.
#[inline(always)]
fn put(out: &mut [f32], at: usize, scale: f32, min: f32, q: impl Fn(usize) -> i32) {
    let out: &mut [f32; 16] = (&mut out[at..at + 16]).try_into().expect("sixteen floats");
    for (i, out) in out.iter_mut().enumerate() {
        *out = scale * q(i) as f32 - min;
    }
}

/// Where the two-bit values of a group of sixteen lie in a block of 256: the first of their bytes among 64, and their
/// shift. (Not a function that takes a closure: if that were not inlined, it would be compiled for the baseline
/// instruction set.)
#[inline(always)]
fn two_bits(group: usize) -> (usize, usize) {
    (32 * (group / 8) + 16 * (group % 2), group % 8 / 2 * 2)
}

#[inline(always)]
fn q2k(block: &[u8], out: &mut [f32]) {
    let (scales, qs) = (&block[..16], &block[16..80]);
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for (group, scale) in scales.iter().enumerate() {
        let (at, shift) = two_bits(group);
        let q = sixteen(qs, at);
        let min = dmin * f32::from(scale >> 4);
        put(out, 16 * group, d * f32::from(scale & 15), min, |i| q[i] >> shift & 3);
    }
}

#[inline(always)]
fn q3k(block: &[u8], out: &mut [f32]) {
    let (high, qs, packed) = (&block[..32], &block[32..96], &block[96..108]);
    let d = half_at(block, 108);
    // 16 six-bit scales: low nibbles in bytes 0..8, the top two bits in bytes 8..12.
    let scale = |j: usize| {
        let low = packed[j % 8] >> (j / 8 * 4) & 15;
        let top = packed[8 + j % 4] >> (j / 4 * 2) & 3;
        f32::from(low | top << 4) - 32.0
    };
    for group in 0..16 {
        let (at, shift) = two_bits(group);
        let (q, high, bit) = (sixteen(qs, at), sixteen(high, group % 2 * 16), group / 2);
        // A clear high bit lowers the value by 4; a set one adds the 4 that is subtracted.
        let value = |i: usize| (q[i] >> shift & 3) + ((high[i] >> bit & 1) << 2) - 4;
        put(out, 16 * group, d * scale(group), 0.0, value);
    }
}

/// The six-bit scale and minimum of sub-block `j` of Q4_K and Q5_K.
#[inline(always)]
pub(crate) fn scale_min(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let low = packed[j + 4];
        (low & 15 | packed[j - 4] >> 6 << 4, low >> 4 | packed[j] >> 6 << 4)
    }
}

#[inline(always)]
fn q4k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (packed, qs) = (&block[4..16], &block[16..144]);
    for group in 0..16 {
        let (scale, min) = scale_min(packed, group / 2);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        let (q, shift) = (sixteen(qs, group / 4 * 32 + group % 2 * 16), group / 2 % 2 * 4);
        put(out, 16 * group, scale, min, |i| q[i] >> shift & 15);
    }
}

#[inline(always)]
fn q5k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (packed, high, qs) = (&block[4..16], &block[16..48], &block[48..176]);
    for group in 0..16 {
        let (scale, min) = scale_min(packed, group / 2);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        let (q, shift) = (sixteen(qs, group / 4 * 32 + group % 2 * 16), group / 2 % 2 * 4);
        let (high, bit) = (sixteen(high, group % 2 * 16), group / 2);
        let value = |i: usize| q[i] >> shift & 15 | (high[i] >> bit & 1) << 4;
        put(out, 16 * group, scale, min, value);
    }
}

#[inline(always)]
fn q6k(block: &[u8], out: &mut [f32]) {
    let (ql, qh, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (group, scale) in scales.iter().enumerate() {
        let (at, shift) = two_bits(group);
        let low = sixteen(ql, group / 8 * 64 + group % 4 * 16);
        let (top, nibble) = (sixteen(qh, at), group % 8 / 4 * 4);
        let value = |i: usize| (low[i] >> nibble & 15 | (top[i] >> shift & 3) << 4) - 32;
        put(out, 16 * group, d * f32::from(*scale as i8), 0.0, value);
    }
}
