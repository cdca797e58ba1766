//! Blocks of 32: one f16 scale (and minimum), low nibbles first, fifth bits apart.

use super::scale;

pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = scale(block, 0);
    for (i, byte) in block[2..].iter().enumerate() {
        out[i] = d * (i32::from(byte & 15) - 8) as f32;
        out[i + 16] = d * (i32::from(byte >> 4) - 8) as f32;
    }
}

pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (scale(block, 0), scale(block, 2));
    for (i, byte) in block[4..].iter().enumerate() {
        out[i] = d * f32::from(byte & 15) + m;
        out[i + 16] = d * f32::from(byte >> 4) + m;
    }
}

/// Element `i` of a five-bit block: nibbles in `low`, bit `i` of `high` on top.
fn five(low: &[u8], high: u32, i: usize) -> u8 {
    let nibble = if i < 16 { low[i] & 15 } else { low[i - 16] >> 4 };
    nibble | (((high >> i) & 1) as u8) << 4
}

pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = scale(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * (i32::from(five(&block[6..], high, i)) - 16) as f32;
    }
}

pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (scale(block, 0), scale(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * f32::from(five(&block[8..], high, i)) + m;
    }
}

pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = scale(block, 0);
    for (byte, out) in block[2..].iter().zip(out) {
        *out = f32::from(*byte as i8) * d;
    }
}
