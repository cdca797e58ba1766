//! For each token: normalise its q and k heads (if norms are given), rotate them by its position,
//! store q in place, and write k and v to the page slot of the token.
//!
//! Rotation pairs element i with i + head_dim/2:
//! `(a, b) → (a·cos − b·sin, b·cos + a·sin)` with the cosines and sines of the token's position.
//! All in f32, rounded once when storing. A pad token's slot lies in the scratch page (page 0), so it
//! may be written like any other; it never touches a live page.

mod cuda;

use super::{Access, Contract, SpanVisitor, require, require_fit, require_float, require_norm};
use crate::op::RopeKv;
use crate::{DType, Result};

impl Contract for RopeKv {
    const NAME: &'static str = "rope_kv";

    fn check(&self) -> Result<()> {
        require_fit(&self.qkv, Self::NAME, "qkv")?;
        require_fit(&self.rope, Self::NAME, "rope")?;
        require_float(&self.qkv, Self::NAME, "qkv")?;
        let dim = self.kv.head_dim;
        require(self.qkv.cols == (self.q_heads + 2 * self.kv.heads) * dim, Self::NAME, || {
            format!(
                "qkv has {} columns for {} + 2×{} heads of {dim}",
                self.qkv.cols, self.q_heads, self.kv.heads
            )
        })?;
        require(self.rope.dtype == DType::F32 && self.rope.cols == dim, Self::NAME, || {
            "rope table is not f32 with head_dim columns".into()
        })?;
        for norm in [&self.q_norm, &self.k_norm].into_iter().flatten() {
            require_norm(norm, dim, Self::NAME)?;
        }
        require(
            self.kv.page_bytes() * u64::from(self.kv.pages) <= self.kv.span.len,
            Self::NAME,
            || format!("{} pages do not fit the layer's span", self.kv.pages),
        )
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.qkv.span, Access::Update);
        for norm in [&self.q_norm, &self.k_norm].into_iter().flatten() {
            visit(norm.weight.span, Access::Read);
        }
        visit(self.rope.span, Access::Read);
        super::visit_step_tables(&self.state, visit);
        visit(self.kv.span, Access::Update);
    }
}
