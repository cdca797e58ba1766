//! The eight-bit float e4m3: a sign, four bits of exponent with bias 7, three of mantissa; no infinity, 0x7f is not a
//! number, the largest is 448.

/// The largest finite value.
pub const MOST: f32 = 448.0;

/// Every byte's value.
static VALUES: [f32; 256] = values();

const fn values() -> [f32; 256] {
    let mut all = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, mantissa) = (byte as u32 >> 3 & 15, byte as u32 & 7);
        let size = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, mantissa) => mantissa as f32 / 512.0,
            _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
        };
        all[byte] = if byte >= 128 { -size } else { size };
        byte += 1;
    }
    all
}

/// The value of a byte.
#[inline(always)]
pub fn decode(byte: u8) -> f32 {
    VALUES[usize::from(byte)]
}

/// The nearest value, ties to even; what is larger than [`MOST`] becomes [`MOST`].
#[inline(always)]
pub fn encode(value: f32) -> u8 {
    let bits = value.to_bits();
    let (sign, size) = ((bits >> 24) as u8 & 0x80, bits & 0x7fff_ffff);
    let code = if size < 0x3c80_0000 {
        // Below 2⁻⁶ values are 2⁻⁹ apart.
        (f32::from_bits(size) * 512.0).round_ties_even() as u32
    } else {
        let rounded = size + 0x7_ffff + (size >> 20 & 1);
        ((rounded >> 20) - (120 << 3)).min(0x7e)
    };
    let code = if size > 0x7f80_0000 { 0x7f } else { code };
    sign | code as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_format() {
        let known =
            [(0x00, 0.0), (0x01, 0.001_953_125), (0x08, 0.015_625), (0x38, 1.0), (0x7e, 448.0)];
        assert!(known.iter().all(|&(byte, value)| decode(byte) == value));
        assert!(decode(0x7f).is_nan() && decode(0xff).is_nan() && decode(0xb8) == -1.0);
    }

    /// Every value comes back, everything between goes to the nearer neighbour, halves to the even one.
    #[test]
    fn encoding_is_nearest_even() {
        for byte in 0..0x7eu8 {
            let (low, high) = (decode(byte), decode(byte + 1));
            assert_eq!((encode(low), encode(-low)), (byte, byte | 0x80));
            let middle = f32::midpoint(low, high);
            assert_eq!(encode(middle), byte + (byte & 1), "{middle}");
            assert_eq!(encode(f32::midpoint(low, middle)), byte);
            assert_eq!(encode(f32::midpoint(middle, high)), byte + 1);
        }
        assert_eq!([448.0, 463.9, 1e9, f32::INFINITY].map(encode), [0x7e; 4]);
        assert_eq!(encode(f32::NAN) & 0x7f, 0x7f);
    }
}
