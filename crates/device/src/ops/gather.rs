//! `y[i] = x[index[i]]`: the last token of each row before the head. Equal dtypes; an index past `x`
//! reads row 0.

mod cuda;

use super::{Access, Contract, SpanVisitor, require, require_fit};
use crate::op::Gather;
use crate::{DType, Result};

impl Contract for Gather {
    const NAME: &'static str = "gather";

    fn check(&self) -> Result<()> {
        require_fit(&self.index, Self::NAME, "index")?;
        require_fit(&self.x, Self::NAME, "x")?;
        require_fit(&self.y, Self::NAME, "y")?;
        require(self.index.dtype == DType::U32, Self::NAME, || "index is not u32".into())?;
        require(self.index.cols >= self.y.rows, Self::NAME, || "fewer indices than rows".into())?;
        require(self.x.dtype == self.y.dtype && self.x.dtype.is_plain(), Self::NAME, || {
            "x and y differ in dtype".into()
        })?;
        require(self.x.cols == self.y.cols, Self::NAME, || "x and y differ in columns".into())
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.index.span, Access::Read);
        visit(self.x.span, Access::Read);
        visit(self.y.span, Access::Write);
    }
}
