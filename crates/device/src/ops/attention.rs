//! Causal attention over pages. Token j of row r has position p = kv_len[r] − q_len[r] + j and
//! attends to positions `max(0, p + 1 − window) ..= p` of its row's pages:
//! `out = softmax(scale · q·kᵀ) · v`, scores and sums in f32, one rounding when storing.
//! Query head h reads KV head h / (q_heads / kv_heads).
//!
//! Rows and lengths come from the step's tables on the device, so the launch never depends on them.
//! With `single` every live row has exactly one token and row r's token index is r. Pad rows have
//! kv_len 0: their output is zeros in the decode form; pad tokens of the varlen form are not written.

mod cuda;

use super::{Access, Contract, SpanVisitor, require, require_fit, require_float};
use crate::Result;
use crate::op::Attention;

impl Contract for Attention {
    const NAME: &'static str = "attention";

    fn check(&self) -> Result<()> {
        require_fit(&self.qkv, Self::NAME, "qkv")?;
        require_fit(&self.out, Self::NAME, "out")?;
        require_float(&self.qkv, Self::NAME, "qkv")?;
        require_float(&self.out, Self::NAME, "out")?;
        let dim = self.kv.head_dim;
        require(self.q_heads % self.kv.heads == 0, Self::NAME, || {
            format!("{} query heads over {} kv heads", self.q_heads, self.kv.heads)
        })?;
        require(self.qkv.cols >= self.q_heads * dim, Self::NAME, || "qkv lacks q columns".into())?;
        require(self.out.cols == self.q_heads * dim, Self::NAME, || {
            "out is not q_heads·head_dim wide".into()
        })?;
        require(self.out.rows == self.qkv.rows, Self::NAME, || {
            "out and qkv differ in rows".into()
        })?;
        require(!self.single || self.rows == self.out.rows, Self::NAME, || {
            "a decode step has one token per row".into()
        })?;
        require(self.rope.is_none() || self.single, Self::NAME, || {
            "fused rope needs single".into()
        })?;
        require(
            self.kv.page_bytes() * u64::from(self.kv.pages) <= self.kv.span.len,
            Self::NAME,
            || format!("{} pages do not fit the layer's span", self.kv.pages),
        )?;
        self.rope.as_ref().map_or(Ok(()), |rope| rope.check())
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        match &self.rope {
            Some(rope) => rope.visit_spans(visit),
            None => {
                visit(self.qkv.span, Access::Read);
                super::visit_step_tables(&self.state, visit);
                visit(self.kv.span, Access::Read);
            }
        }
        if let Some(scratch) = self.scratch {
            visit(scratch, Access::Write);
        }
        visit(self.out.span, Access::Write);
    }
}
