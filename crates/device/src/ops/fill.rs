//! Fills a span with a repeated 32-bit word.

use super::{Access, Contract, SpanVisitor, require};
use crate::Result;
use crate::op::Fill;

impl Contract for Fill {
    const NAME: &'static str = "fill";

    fn check(&self) -> Result<()> {
        require(self.to.len.is_multiple_of(4), Self::NAME, || "not whole words".into())
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.to, Access::Write);
    }
}
