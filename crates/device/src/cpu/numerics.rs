//! Where the CPU rounds, and in what order it adds.

use super::features::Features;
use super::simd::Level;

/// How the CPU's fast paths round and sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numerics {
    /// Whatever is fastest on this processor; sums are in its own order.
    #[default]
    Fast,
    /// As [`Numerics::Fast`], with every product of floats in f32.
    Exact,
    /// Computes as llama.cpp built for AVX-512, to the bit, on any processor with AVX2 and FMA: packed weights
    /// (except Q4_0, which llama.cpp stores in another form), Q4_K, Q5_K and Q6_K, F16 pages, attention without its
    /// flash kernel. Other weights are multiplied as by [`Numerics::Fast`]. Slower; see `cpu/ggml.rs`.
    Ggml,
}

/// What an op is lowered for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lowering {
    /// What the processor has.
    pub(crate) features: Features,
    /// The best level of these.
    pub(crate) level: Level,
    /// How to round.
    pub(crate) numerics: Numerics,
}

impl Lowering {
    /// For a processor with `features`.
    pub(crate) fn new(features: Features, numerics: Numerics) -> Lowering {
        Lowering { features, level: Level::of(&features), numerics }
    }

    /// Whether every bit must be the same as ggml's.
    pub(crate) fn ggml(&self) -> bool {
        self.numerics == Numerics::Ggml
    }
}
