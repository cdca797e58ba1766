//! The four-bit float e2m1, and GGUF's blocks of 32 of them with one exponent.

use super::fp8::e8m0;

/// Sign, two bits of exponent with bias 1, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
pub(crate) fn e2m1(code: u8) -> f32 {
    const SIZES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let size = SIZES[usize::from(code & 7)];
    if code & 8 == 0 { size } else { -size }
}

pub(super) fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    let power = e8m0(block[0]);
    // GGUF's package has no negative zero: adding 0 takes its sign away.
    for (i, byte) in block[1..].iter().enumerate() {
        out[i] = e2m1(byte & 15) * power + 0.0;
        out[i + 16] = e2m1(byte >> 4) * power + 0.0;
    }
}
