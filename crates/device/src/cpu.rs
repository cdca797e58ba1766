//! The CPU as a device: the default where there is no GPU, and the reference for every op.
//!
//! Recording lowers each op once to a `step::Step`: addresses resolved, kernel chosen for this
//! processor. Replaying walks the steps with a small pinned pool and allocates nothing.

pub(crate) mod asan;
mod beside;
mod driver;
pub(crate) mod features;
pub(crate) mod ggml;
mod guard;
pub(crate) mod memory;
pub(crate) mod numerics;
pub mod pack;
pub mod peak;
pub(crate) mod pool;
pub(crate) mod quant;
pub(crate) mod simd;
pub(crate) mod step;
pub(crate) mod tables;
pub(crate) mod view;

pub use numerics::Numerics;

use crate::{Device, Result};
use numerics::Lowering;
use std::sync::Arc;

/// Opens the CPU with `threads` threads (all this process may use, if `None`). With `reference` every
/// op runs its scalar reference on the calling thread: slow, and what fast paths are compared with.
pub fn open(threads: Option<usize>, reference: bool) -> Result<Device> {
    open_limited(threads, reference, Limit::None)
}

/// An upper limit on the instruction sets of fast paths, so that all of them can be compared on one processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Limit {
    /// All the processor has.
    #[default]
    None,
    /// No matrix tiles.
    Avx512,
    /// No AVX-512 either.
    Avx2,
    /// What every processor has.
    Portable,
}

/// As [`open`], with fast paths limited to `limit`.
pub(crate) fn open_limited(
    threads: Option<usize>,
    reference: bool,
    limit: Limit,
) -> Result<Device> {
    let features = features::Features::detect().limited(limit);
    let how = (!reference).then(|| Lowering::new(features, Numerics::Fast));
    Ok(Device { driver: Arc::new(driver::CpuDriver::new(threads, how, None)) })
}

/// As [`open`], with fast paths that round as `numerics` says and use no more than `limit`.
pub fn open_rounding(threads: Option<usize>, numerics: Numerics, limit: Limit) -> Result<Device> {
    let features = features::Features::detect().limited(limit);
    let how = Some(Lowering::new(features, numerics));
    Ok(Device { driver: Arc::new(driver::CpuDriver::new(threads, how, None)) })
}

/// As [`open_rounding`], with the scratch of every step poisoned and fenced: a step that writes outside the scratch
/// it asked for panics. For tests that compare fast paths; steps take longer, and eager runs and replays allocate.
pub fn open_guarded(threads: Option<usize>, numerics: Numerics, limit: Limit) -> Result<Device> {
    let features = features::Features::detect().limited(limit);
    let how = Some(Lowering::new(features, numerics));
    Ok(Device { driver: Arc::new(driver::CpuDriver::new(threads, how, Some(guard::Guard))) })
}

/// What this processor offers that the fast paths use, in one line.
pub fn describe_features() -> String {
    features::Features::detect().to_string()
}
