//! Copies a span to another of the same length. Spans must not overlap.

use super::{Access, Contract, SpanVisitor, require};
use crate::Result;
use crate::op::Copy;

impl Contract for Copy {
    const NAME: &'static str = "copy";

    fn check(&self) -> Result<()> {
        require(self.from.len == self.to.len, Self::NAME, || "lengths differ".into())?;
        require(!self.from.overlaps(self.to), Self::NAME, || "spans overlap".into())
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.from, Access::Read);
        visit(self.to, Access::Write);
    }
}
