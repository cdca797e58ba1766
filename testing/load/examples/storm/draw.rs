//! Random numbers that depend only on a seed.

/// SplitMix64.
pub(crate) struct Draw(u64);

impl Draw {
    /// The generator for one request of one storm.
    pub(crate) fn new(seed: u64, request: u64) -> Self {
        let mut draw = Self(seed ^ request.wrapping_mul(0xD1B5_4A32_D192_ED03));
        draw.next();
        draw
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is at least 1.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// A number from `least` to `most`, with each power of two equally likely.
    pub(crate) fn size(&mut self, least: u64, most: u64) -> usize {
        let doublings = (most / least.max(1)).max(1).ilog2() as u64;
        let base = least << self.below(doublings + 1);
        (base + self.below(base)).clamp(least, most) as usize
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize].clone()
    }
}
