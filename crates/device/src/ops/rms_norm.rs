//! `y = x / sqrt(mean(x²) + eps) · weight` for each row; the mean and the scaling in f32.

pub(crate) mod cuda;

use super::{Access, Contract, SpanVisitor, require, require_fit, require_float, require_norm};
use crate::Result;
use crate::op::RmsNorm;

impl Contract for RmsNorm {
    const NAME: &'static str = "rms_norm";

    fn check(&self) -> Result<()> {
        for (tensor, what) in [(&self.x, "x"), (&self.y, "y")] {
            require_fit(tensor, Self::NAME, what)?;
            require_float(tensor, Self::NAME, what)?;
        }
        require_norm(&self.norm, self.x.cols, Self::NAME)?;
        require(self.x.rows == self.y.rows && self.x.cols == self.y.cols, Self::NAME, || {
            "x and y differ in shape".into()
        })
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Read);
        visit(self.norm.weight.span, Access::Read);
        visit(self.y.span, Access::Write);
    }
}
