//! The decode phase: one token per row, or as many in every row to verify drafts; buckets count sequences.

use super::{PhaseRule, StepShape};
use crate::{Phase, ShapeKey};
use device::StepLimits;

/// The rule of the decode phase: the same number of tokens in every row; size in sequences.
#[derive(Debug)]
pub struct Decode;

impl PhaseRule for Decode {
    const PHASE: Phase = Phase::Decode;

    fn admits(shape: &StepShape) -> bool {
        shape.phase == Phase::Decode && shape.tokens.is_multiple_of(shape.rows.max(1))
    }

    fn size(shape: &StepShape) -> u32 {
        shape.rows
    }

    fn exact(shape: &StepShape, _limits: &StepLimits) -> ShapeKey {
        ShapeKey::verify(shape.rows, shape.tokens / shape.rows.max(1))
    }
}
