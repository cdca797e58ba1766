//! Dummy weights: element i (row-major, i = row · cols + col) is `mean + scale · u` with u in [−1, 1):
//! u = (h >> 40) · 2⁻²³ − 1, h = mix(seed + (i + 1) · 0x9E3779B97F4A7C15) in wrapping 64-bit arithmetic,
//! mix = the SplitMix64 finaliser: z = (z ^ z >> 30) · 0xBF58476D1CE4E5B9;
//! z = (z ^ z >> 27) · 0x94D049BB133111EB; z ^ z >> 31.
//! `mean + scale · u` is one f32 multiplication, one f32 addition, then a rounding to nearest even to the
//! dtype: every device gives the same bits. Only F32, F16 and BF16.

mod cuda;

use super::{Access, Contract, SpanVisitor, require_fit, require_float};
use crate::Result;
use crate::op::Noise;

impl Contract for Noise {
    const NAME: &'static str = "noise";

    fn check(&self) -> Result<()> {
        require_fit(&self.to, Self::NAME, "to")?;
        require_float(&self.to, Self::NAME, "to")
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.to.span, Access::Write);
    }
}
