//! The random numbers of a run, which depend only on its seed.

/// SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// A separate stream for this seed and purpose.
    pub(crate) fn new(seed: u64, purpose: u64) -> Self {
        Self(mix(seed ^ mix(purpose)))
    }

    /// The next 64 bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Uniform in `low..=high`.
    pub(crate) fn range(&mut self, low: u32, high: u32) -> u32 {
        low + (self.bits() % (u64::from(high - low) + 1)) as u32
    }

    /// True once in `n`.
    pub(crate) fn one_in(&mut self, n: u32) -> bool {
        self.range(1, n) == 1
    }

    /// A random element.
    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.range(0, from.len() as u32 - 1) as usize]
    }
}

/// A 64-bit mixer: every input bit affects every output bit.
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
