//! The counter RNG: no state, so the same seed gives the same text whatever else is in the batch,
//! after a preemption, and on every device.

/// Philox4x32-10. The key is the seed, low word first; the counter is `(position, 0, 0, 0)`, where
/// the position is that of the token to be drawn: the number of tokens before it.
pub fn philox(seed: u64, position: u32) -> [u32; 4] {
    block([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32])
}

/// The number a draw uses, strictly between 0 and 1: `(x0 >> 8) · 2⁻²⁴ + 2⁻²⁵`.
pub fn uniform(seed: u64, position: u32) -> f32 {
    let top = philox(seed, position)[0] >> 8;
    top as f32 / (1u32 << 24) as f32 + 1.0 / (1u32 << 25) as f32
}

fn block(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let low = u64::from(counter[0]) * 0xD251_1F53;
        let high = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (high >> 32) as u32 ^ counter[1] ^ key[0],
            high as u32,
            (low >> 32) as u32 ^ counter[3] ^ key[1],
            low as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_the_published_vectors() {
        assert_eq!(block([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            block([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            block([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniforms_stay_inside_and_fill_their_bins() {
        let mut bins = [0f64; 64];
        let draws = 1 << 16;
        for position in 0..draws {
            let u = uniform(7 << 40 | 3, position);
            assert!(0.0 < u && u < 1.0);
            bins[(u * 64.0) as usize] += 1.0;
        }
        let expected = f64::from(draws) / 64.0;
        let chi: f64 = bins.iter().map(|n| (n - expected).powi(2) / expected).sum();
        // 63 degrees of freedom: beyond 119 once in a hundred thousand.
        assert!(chi < 119.0, "{chi}");
    }
}
