//! Linears of a few hundred to two thousand rows on Hopper: tiles of `kernels/linear_wgmma.cu` that are as wide as the
//! tokens divided by a whole number, so that all rounds are full.
//!
//! `tiles` has tiles of 256 tokens × 256 weight rows for 66 pairs of blocks, so 640 tokens of a matrix of 24,576 rows take
//! 5 rounds of which the last is a third full. As 4 × 160 tokens × 192 rows they are 512 tiles: 4 rounds of 128 blocks, a
//! quarter less. And 832 tokens are four of 208, not of 256.

use crate::cuda::launch::Target;
use crate::op::{Epilogue, LinearChain};
use crate::variant::WgmmaShape;

/// Most rows for which these tiles are considered; 0 leaves all of them to `tiles` and the library.
const MOST: u32 = 2047;

/// What a multiprocessor multiplies and reads in a microsecond: 690 TFLOP/s and 9 TB/s of 132.
const FLOPS: f64 = 5.2e6;
const BYTES: f64 = 68e3;

/// Microseconds of a tile beside its products: the epilogue, and the ring that fills.
const EACH: f64 = 1.5;

/// How much faster they must be than `tiles` by these prices: those of `tiles` are met, these are missed by up to 8 %.
const WORTH: f64 = 0.95;

impl LinearChain {
    /// The tiles for this many rows, if they take less time than those of `tiles`.
    pub(super) fn even(&self, target: &Target) -> Option<WgmmaShape> {
        let rows = self.x.rows;
        let gates = matches!(self.epilogue, Epilogue::GateMul(_));
        // What adds to a residual goes to the library, unless `tiles` would have it.
        let adds =
            matches!(self.epilogue, Epilogue::Residual(_)) && self.suits_tiles(target, false);
        let plain = self.handoff.is_nothing() && self.bias.is_none();
        if !plain || !(gates || adds) || rows <= 256 || rows > MOST {
            return None;
        }
        let (best, shape) = self.cheapest(target)?;
        (best <= WORTH * self.by_tiles(target)).then_some(shape)
    }

    /// The cheapest tiles whose rounds are nearly full, and their microseconds.
    fn cheapest(&self, target: &Target) -> Option<(f64, WgmmaShape)> {
        let (rows, n) = (self.x.rows, self.w.rows);
        let shapes = [192, 128].into_iter().flat_map(|wide| {
            (rows.div_ceil(256)..=rows.div_ceil(64)).map(move |across| (wide, across))
        });
        let priced = shapes.filter_map(|(wide, across)| {
            let columns = rows.div_ceil(across);
            let columns = columns.next_multiple_of(if columns > 128 { 16 } else { 8 });
            let across = rows.div_ceil(columns);
            let tiles = n.div_ceil(wide) * across;
            let rounds = tiles.div_ceil(target.sms);
            if tiles * 10 < rounds * target.sms * 9 {
                return None;
            }
            let shape = WgmmaShape {
                wide: Some(wide),
                columns: Some(columns),
                split: Some(1),
                even: Some(1),
                ..WgmmaShape::default()
            };
            Some((self.price(rounds, (wide, columns), wide), shape))
        });
        priced.min_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// Microseconds of so many rounds of tiles of weight rows × tokens, of which a block copies `weights` rows itself.
    fn price(&self, rounds: u32, (wide, columns): (u32, u32), weights: u32) -> f64 {
        let k = f64::from(self.x.cols) * 2.0;
        let multiplies = f64::from(wide) * f64::from(columns) * k / FLOPS;
        let reads = f64::from(weights + columns) * k / BYTES;
        f64::from(rounds) * (multiplies.max(reads) + EACH)
    }

    /// Microseconds by `tiles`.
    fn by_tiles(&self, target: &Target) -> f64 {
        let tiles = self.x.rows.div_ceil(256) * self.w.rows.div_ceil(256);
        self.price(tiles.div_ceil(target.sms / 2), (256, 128), 128)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Activation;
    use crate::{DType, OpenArena, Region, Tensor};

    fn h200() -> Target {
        Target {
            capability: (9, 0),
            sms: 132,
            shared_per_block: 227 << 10,
            shared_per_sm: 228 << 10,
            l2: 50 << 20,
            tuned: Default::default(),
        }
    }

    /// What the rule takes for so many rows: weight rows, tokens.
    fn chosen(rows: u32, (n, k): (u32, u32), gates: bool) -> Option<(u32, u32)> {
        let mut arena = OpenArena::new();
        let mut tensor = |name: &str, rows: u32, cols: u32| {
            let bytes = DType::BF16.bytes(rows as usize * cols as usize) as u64;
            Tensor::dense(arena.alloc(Region::State, name, bytes), DType::BF16, rows, cols)
        };
        let (x, w) = (tensor("x", rows, k), tensor("w", n, k));
        let y = tensor("y", rows, if gates { n / 2 } else { n });
        let epilogue = match gates {
            true => Epilogue::GateMul(Activation::Silu),
            false => Epilogue::Residual(y),
        };
        let linear = LinearChain { epilogue, ..LinearChain::new(x, w, y) };
        let shape = linear.even(&h200())?;
        Some((shape.wide?, shape.columns?))
    }

    #[test]
    fn tiles_divide_the_tokens_of_a_bucket() {
        let of_8b = |rows| chosen(rows, (24_576, 4096), true);
        assert_eq!(of_8b(256), None);
        assert_eq!(of_8b(320), Some((192, 160)));
        assert_eq!(of_8b(384), Some((192, 192)));
        assert_eq!(of_8b(640), Some((192, 160)));
        assert_eq!(of_8b(832), Some((192, 208)));
        assert_eq!(of_8b(1344), Some((192, 224)));
        // Rounds of `tiles` are full.
        assert_eq!([512, 1024, 2048].map(of_8b), [None; 3]);
        let down = |rows| chosen(rows, (4096, 12_288), false);
        assert_eq!([640, 1024, 1344].map(down), [None; 3], "the library's");
        assert_eq!(down(832), Some((128, 208)));
    }

    #[test]
    fn rounds_are_never_mostly_empty() {
        // 2,048 weight rows are 11 tiles: no number of tokens' tiles up to 320 fills 132 multiprocessors.
        assert_eq!(chosen(320, (2048, 1024), true), None);
    }
}
