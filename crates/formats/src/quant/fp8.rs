//! The two types of one byte: e4m3 for elements, e8m0 (an exponent alone) for scales.

/// Sign, four bits of exponent with bias 7, three of mantissa. There is no infinity; all ones is NaN.
pub(crate) fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(byte >> 3) & 15, u32::from(byte) & 7);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        // Multiples of 2⁻⁹.
        (0, _) => mantissa as f32 * f32::from_bits((127 - 9) << 23),
        _ => f32::from_bits((exponent + 127 - 7) << 23 | mantissa << 20),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// 2 to the power of the byte less 127; 255 is NaN.
pub(crate) fn e8m0(byte: u8) -> f32 {
    match byte {
        255 => f32::NAN,
        // 2⁻¹²⁷ is below the smallest normal f32.
        0 => f32::from_bits(1 << 22),
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}
