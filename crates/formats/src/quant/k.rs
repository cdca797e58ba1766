//! Blocks of 256 ("K quants"): a pair of f16 factors over small integer scales per sub-block.

use super::scale;

/// 16 sub-blocks of 16; 4-bit scale and minimum each. Layout: scales 16, quants 64, d, dmin.
pub(super) fn q2(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, quants) = (&block[..16], &block[16..80]);
    let (d, dmin) = (scale(block, 80), scale(block, 82));
    for (i, out) in out.iter_mut().enumerate() {
        let sub = scales[i / 16];
        let q = (quants[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2)) & 3;
        *out = (d * f32::from(sub & 15)) * f32::from(q) - dmin * f32::from(sub >> 4);
    }
}

/// 16 sub-blocks of 16; 6-bit signed scales, no minimum; the third bit, when clear, means −4.
/// Layout: high bits 32, quants 64, scales 12, d.
pub(super) fn q3(block: &[u8; 110], out: &mut [f32; 256]) {
    let (high, quants, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let d = scale(block, 108);
    for (i, out) in out.iter_mut().enumerate() {
        let sub = i / 16;
        let low4 = (scales[sub % 8] >> (sub / 8 * 4)) & 15;
        let high2 = (scales[8 + sub % 4] >> (sub / 4 * 2)) & 3;
        let factor = i32::from(low4 | high2 << 4) - 32;
        let q = (quants[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2)) & 3;
        let absent = i32::from((high[i % 32] >> (i / 32)) & 1 == 0);
        *out = (d * factor as f32) * (i32::from(q) - 4 * absent) as f32;
    }
}

/// The 6-bit scale and minimum of sub-block `j` of 8, from the 12 bytes Q4_K and Q5_K share.
fn scale_min(packed: &[u8], j: usize) -> (f32, f32) {
    let (s, m) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (
            (packed[j + 4] & 15) | (packed[j - 4] >> 2) & 0x30,
            (packed[j + 4] >> 4) | (packed[j] >> 2) & 0x30,
        )
    };
    (f32::from(s), f32::from(m))
}

/// 8 sub-blocks of 32. Layout: d, dmin, scales 12, quants 128.
pub(super) fn q4(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin, quants) = (scale(block, 0), scale(block, 2), &block[16..]);
    for (j, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (s, m) = scale_min(&block[4..16], j);
        for (i, out) in out.iter_mut().enumerate() {
            let q = (quants[j / 2 * 32 + i] >> (j % 2 * 4)) & 15;
            *out = (d * s) * f32::from(q) - dmin * m;
        }
    }
}

/// As Q4_K with a fifth bit. Layout: d, dmin, scales 12, high bits 32, quants 128.
pub(super) fn q5(block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin, high, quants) = (scale(block, 0), scale(block, 2), &block[16..48], &block[48..]);
    for (j, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (s, m) = scale_min(&block[4..16], j);
        for (i, out) in out.iter_mut().enumerate() {
            let low = (quants[j / 2 * 32 + i] >> (j % 2 * 4)) & 15;
            let q = low | ((high[i] >> j) & 1) << 4;
            *out = (d * s) * f32::from(q) - dmin * m;
        }
    }
}

/// 16 sub-blocks of 16; 8-bit signed scales. Layout: low nibbles 128, high pairs 64, scales 16, d.
pub(super) fn q6(block: &[u8; 210], out: &mut [f32; 256]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = scale(block, 208);
    for (i, out) in out.iter_mut().enumerate() {
        let nibble = (low[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4)) & 15;
        let pair = (high[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2)) & 3;
        let q = i32::from(nibble | pair << 4) - 32;
        *out = (d * f32::from(scales[i / 16] as i8)) * q as f32;
    }
}
