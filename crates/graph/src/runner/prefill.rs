//! The prefill phase: prompt chunks of any mix of requests, with decode rows beside them or not;
//! buckets count tokens. Attention takes row boundaries from device memory, so one graph serves every
//! mix of as many tokens.

use super::{PhaseRule, StepShape};
use crate::{Phase, ShapeKey};
use device::StepLimits;

/// The rule of the prefill phase: any mix of prompt chunks and decode rows; size in tokens.
#[derive(Debug)]
pub struct Prefill;

impl PhaseRule for Prefill {
    const PHASE: Phase = Phase::Prefill;

    fn admits(shape: &StepShape) -> bool {
        shape.rows <= shape.tokens
    }

    fn size(shape: &StepShape) -> u32 {
        shape.tokens
    }

    fn exact(shape: &StepShape, limits: &StepLimits) -> ShapeKey {
        ShapeKey::prefill(shape.tokens, shape.tokens.min(limits.rows))
    }
}
