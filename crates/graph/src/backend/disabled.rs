//! No recording: every node runs on its own. The slowest, and the one the others are compared with.

use super::segmented::Recorded;
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

    fn make(&mut self, _cx: &Context<'_>, _plan: &Plan) -> Result<Recorded> {
        Ok(Recorded { segments: Vec::new(), graphs: 0 })
    }

    fn keep(&mut self, _key: &ShapeKey, _recorded: Recorded) {}

    fn has(&self, _key: &ShapeKey) -> bool {
        false
    }

    fn replay(&self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        run_eagerly(cx, plan)
    }

    fn bytes(&self, _key: &ShapeKey) -> u64 {
        0
    }

    fn forget(&mut self, _key: &ShapeKey) -> Option<Recorded> {
        None
    }

    fn clear(&mut self) {}
}
