//! From an op to launches: a pure function over plain data.
//!
//! Scratch: the caller reserves **one span in [`crate::Region::State`]**, as long as the largest
//! [`scratch_bytes`] of all ops of all its graphs, zero at the start, and gives it to every op as
//! `scratch`. Nothing in it outlives an op, but its first [`SEMAPHORE_BYTES`] count arrivals of blocks
//! and are zero again when an op ends; that is why it must not share memory with other values.

use super::launch::{Lowered, Target};
use crate::{Error, Op, Result};

/// Bytes at the front of a scratch span that are zero between ops.
pub const SEMAPHORE_BYTES: u64 = 64 << 10;

/// What an op becomes on `target`, in order.
pub fn lower(op: &Op, _target: &Target) -> Result<Vec<Lowered>> {
    Err(Error::Contract { op: op.name().into(), problem: "has no CUDA kernel yet".into() })
}

/// Bytes of scratch the op needs on `target`; 0 for most.
pub fn scratch_bytes(_op: &Op, _target: &Target) -> u64 {
    0
}
