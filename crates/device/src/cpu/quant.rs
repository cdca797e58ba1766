//! Quantised blocks as GGUF defines them, turned into f32 one element at a time. Every product and sum
//! is one f32 operation in the order the format's own reference uses, so results agree bit for bit.

use crate::DType;
use half::f16;

/// Whole blocks of `dtype` into `out`.
///
/// # Panics
/// If lengths do not match, or the dtype is not a GGUF block type.
pub(crate) fn dequantise(dtype: DType, blocks: &[u8], out: &mut [f32]) {
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
pub(crate) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Low nibbles are the first half of the block, high nibbles the second.
fn q4(block: &[u8], at: usize, out: &mut [f32], value: impl Fn(f32, u8) -> f32) {
    let d = half_at(block, 0);
    for i in 0..16 {
        out[i] = value(d, block[at + i] & 15);
        out[i + 16] = value(d, block[at + i] >> 4);
    }
}

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

fn q2k(block: &[u8], out: &mut [f32]) {
    let (scales, qs) = (&block[..16], &block[16..80]);
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for (i, out) in out.iter_mut().enumerate() {
        let scale = scales[i / 16];
        let q = qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        *out = d * f32::from(scale & 15) * f32::from(q) - dmin * f32::from(scale >> 4);
    }
}

fn q3k(block: &[u8], out: &mut [f32]) {
    let (high, qs, packed) = (&block[..32], &block[32..96], &block[96..108]);
    let d = half_at(block, 108);
    // 16 six-bit scales: low nibbles in bytes 0..8, the top two bits in bytes 8..12.
    let scale = |j: usize| {
        let low = packed[j % 8] >> (j / 8 * 4) & 15;
        let top = packed[8 + j % 4] >> (j / 4 * 2) & 3;
        f32::from(low | top << 4) - 32.0
    };
    for (i, out) in out.iter_mut().enumerate() {
        let low = qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        let minus = if high[i % 32] >> (i / 32) & 1 == 0 { 4 } else { 0 };
        *out = d * scale(i / 16) * f32::from(low as i8 - minus);
    }
}

/// The six-bit scale and minimum of sub-block `j` of Q4_K and Q5_K.
pub(crate) fn scale_min(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let low = packed[j + 4];
        (low & 15 | packed[j - 4] >> 6 << 4, low >> 4 | packed[j] >> 6 << 4)
    }
}

fn q4k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (packed, qs) = (&block[4..16], &block[16..144]);
    for (i, out) in out.iter_mut().enumerate() {
        let (scale, min) = scale_min(packed, i / 32);
        let q = qs[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
        *out = d * f32::from(scale) * f32::from(q) - dmin * f32::from(min);
    }
}

fn q5k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (packed, high, qs) = (&block[4..16], &block[16..48], &block[48..176]);
    for (i, out) in out.iter_mut().enumerate() {
        let (scale, min) = scale_min(packed, i / 32);
        let low = qs[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
        let q = low | (high[i % 32] >> (i / 32) & 1) << 4;
        *out = d * f32::from(scale) * f32::from(q) - dmin * f32::from(min);
    }
}

fn q6k(block: &[u8], out: &mut [f32]) {
    let (ql, qh, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (i, out) in out.iter_mut().enumerate() {
        let (half, j) = (i / 128, i % 128);
        let low = ql[half * 64 + j % 64] >> (j / 64 * 4) & 15;
        let top = qh[half * 32 + j % 32] >> (j / 32 * 2) & 3;
        let q = i32::from(low | top << 4) - 32;
        *out = d * f32::from(scales[i / 16] as i8) * q as f32;
    }
}
