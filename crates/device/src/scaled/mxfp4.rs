//! MXFP4: four bits for each element (a sign, two bits of exponent, one of mantissa), a byte for 32 columns of a row that
//! is an exponent alone. Element `k` of a row is the lower half of byte `k / 2` where k is even.

use crate::cpu::simd::levels;

/// Columns with one exponent.
pub(crate) const GROUP: usize = 32;
/// Bytes of the elements of a group.
const BYTES: usize = GROUP / 2;
/// Twice the magnitude of an element by its lower three bits.
const DOUBLED: [u8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
/// The exponent of 2 that a byte of 0 stands for.
const LOWEST: i32 = -127;
/// The exponent of the largest element, 6.
const MOST_EXPONENT: i32 = 2;

/// 2 to the power that a byte stands for; 255 is no number.
pub(crate) fn power(byte: u8) -> f32 {
    match byte {
        255 => f32::NAN,
        // Below the smallest normal f32.
        0 => f32::from_bits(1 << 22),
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// Half of it, exactly: with elements doubled to whole numbers.
#[inline(always)]
fn half_power(byte: u8) -> f32 {
    match byte {
        255 => f32::NAN,
        0 => f32::from_bits(1 << 21),
        1 => f32::from_bits(1 << 22),
        exponent => f32::from_bits((u32::from(exponent) - 1) << 23),
    }
}

#[inline(always)]
fn read_body<const FMA: bool>(bytes: &[u8], exponents: &[u8], out: &mut [f32]) {
    let groups = bytes.chunks_exact(BYTES).zip(exponents).zip(out.chunks_exact_mut(GROUP));
    for ((bytes, exponent), out) in groups {
        let bytes: &[u8; BYTES] = bytes.try_into().expect("a group");
        let out: &mut [f32; GROUP] = out.try_into().expect("a group");
        let half = half_power(*exponent);
        // Widened first, because vectors of bytes have no shifts by lanes.
        let codes: [i32; GROUP] =
            std::array::from_fn(|i| i32::from(bytes[i / 2]) >> (i % 2 * 4) & 15);
        for (out, code) in out.iter_mut().zip(codes) {
            let (exponent, mantissa) = (code >> 1 & 3, code & 1);
            let normal = i32::from(exponent > 0);
            // An exponent of 0 is that of 1, without the leading bit.
            let doubled = (2 * normal + mantissa) << (exponent - normal);
            let signed = if code & 8 == 0 { doubled } else { -doubled };
            // A sign stays where the element is 0.
            let zero = f32::from_bits((code as u32 >> 3) << 31);
            *out = if signed == 0 { zero * half } else { signed as f32 * half };
        }
    }
}

levels! {
    /// Elements as floats, from their bytes and the exponents of their groups, with the level's instructions.
    pub(crate) fn read_with(bytes: &[u8], exponents: &[u8], out: &mut [f32]) = read_body;
}

/// Elements as floats, from their bytes and the exponents of their groups.
pub(crate) fn read(bytes: &[u8], exponents: &[u8], out: &mut [f32]) {
    read_body::<false>(bytes, exponents, out);
}

/// A group of floats as elements and their exponent: that of the largest float, so that it becomes 4 to 6; rounded to the
/// nearest, ties to even, and what is larger than 6 becomes 6.
pub(crate) fn quantise(floats: &[f32], bytes: &mut [u8]) -> u8 {
    let most = floats.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let exponent = if most > 0.0 { most.log2().floor() as i32 - MOST_EXPONENT } else { 0 };
    let byte = (exponent - LOWEST).clamp(0, 254) as u8;
    let doubled = 2.0 / power(byte);
    bytes.fill(0);
    for (at, x) in floats.iter().enumerate() {
        let x = x * doubled;
        let distance = |code: &usize| (f32::from(DOUBLED[*code]) - x.abs()).abs();
        // The even one of two that are equally near comes first.
        let order = [0, 2, 4, 6, 1, 3, 5, 7];
        let nearest = order.into_iter().min_by(|a, b| distance(a).total_cmp(&distance(b)));
        let code = nearest.unwrap_or(0) as u8 | u8::from(x.is_sign_negative()) << 3;
        bytes[at / 2] |= code << (at % 2 * 4);
    }
    byte
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    #[test]
    fn every_element_times_every_power() {
        let bytes: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
        for exponent in 0..=255u8 {
            let mut out = [0.0; GROUP];
            read(&bytes, &[exponent], &mut out);
            for (at, found) in out.into_iter().enumerate() {
                let code = if at % 2 == 0 { at / 2 } else { 15 - at / 2 };
                let sign = if code < 8 { 1.0 } else { -1.0 };
                let want = sign * VALUES[code % 8] * power(exponent);
                match exponent {
                    255 => assert!(found.is_nan()),
                    _ => assert_eq!(found.to_bits(), want.to_bits(), "{code} by {exponent}"),
                }
            }
        }
    }

    #[test]
    fn quantising_takes_the_nearest() {
        let floats: Vec<f32> = (0..32).map(|i| (i as f32 - 15.5) * 0.37).collect();
        let mut bytes = [0; BYTES];
        let exponent = quantise(&floats, &mut bytes);
        let mut out = [0.0; GROUP];
        read(&bytes, &[exponent], &mut out);
        for (x, found) in floats.iter().zip(out) {
            let near = |value: &f32| (value * power(exponent) - x.abs()).abs();
            let best = VALUES.iter().map(near).fold(f32::INFINITY, f32::min);
            assert_eq!((found - x).abs(), best, "{x} became {found}");
        }
        let exact: Vec<f32> =
            (0..32).map(|i| VALUES[i % 8] * if i < 8 { -0.25 } else { 0.25 }).collect();
        let exponent = quantise(&exact, &mut bytes);
        read(&bytes, &[exponent], &mut out);
        assert_eq!(out[..], exact[..]);
        assert_eq!(quantise(&[0.0; GROUP], &mut bytes), 127);
        assert_eq!(bytes, [0; BYTES]);
    }
}
