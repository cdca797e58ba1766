//! No recording: every node runs on its own. The slowest, and the one the others are compared with.

use super::{Backend, BackendKind, Context, run_eagerly};
use crate::{Plan, ShapeKey};
use device::Result;

/// Records nothing; every node runs on its own.
#[derive(Debug, Default)]
pub struct Disabled;

impl Backend for Disabled {
    fn kind(&self) -> BackendKind {
        BackendKind::Disabled
    }

    fn record(&mut self, _cx: &Context<'_>, _plan: &Plan) -> Result<usize> {
        Ok(0)
    }

    fn has(&self, _key: &ShapeKey) -> bool {
        false
    }

    fn replay(&self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        run_eagerly(cx, plan)
    }

    fn bytes(&self, _key: &ShapeKey) -> u64 {
        0
    }

    fn forget(&mut self, _key: &ShapeKey) {}

    fn clear(&mut self) {}
}
