//! What a bucket's kernels need beyond their operands.

use super::stage::Stage;
use super::{CompileError, CompileTarget};
use crate::ShapeKey;
use crate::program::Program;
use device::StepLimits;

/// Bytes of scratch per stage, as the target's kernels ask for it.
pub fn scratch(
    _program: &Program,
    _target: &CompileTarget,
    _limits: &StepLimits,
    _key: &ShapeKey,
    stages: &[Stage],
) -> Result<Vec<u64>, CompileError> {
    Ok(vec![0; stages.len()])
}
