//! `y = epilogue(norm(x) · wᵀ + bias)`.
//!
//! The norm, when present, is applied to each row of `x` in f32 and rounded to `x`'s dtype before
//! the product. Products are summed in f32; the epilogue works on the f32 sum and rounds once, when
//! storing. For `SiluMul` the rows of `w` alternate gate and up, so `y` has n/2 columns.
//! Rows of `x` past the `live` count may be left uncomputed; their `y` is then unchanged.

mod cuda;

use super::{Access, Contract, SpanVisitor, require, require_fit, require_float, require_norm};
use crate::Result;
use crate::op::{Epilogue, Linear};

impl Contract for Linear {
    const NAME: &'static str = "linear";

    fn check(&self) -> Result<()> {
        let n = match self.epilogue {
            Epilogue::SiluMul => self.w.rows / 2,
            _ => self.w.rows,
        };
        require_fit(&self.x, Self::NAME, "x")?;
        require_fit(&self.w, Self::NAME, "w")?;
        require_fit(&self.y, Self::NAME, "y")?;
        require_float(&self.x, Self::NAME, "x")?;
        require_float(&self.y, Self::NAME, "y")?;
        require(self.x.cols == self.w.cols, Self::NAME, || {
            format!("x has {} columns, w has {}", self.x.cols, self.w.cols)
        })?;
        require(self.y.rows == self.x.rows && self.y.cols == n, Self::NAME, || {
            format!("y is {}×{}, not {}×{n}", self.y.rows, self.y.cols, self.x.rows)
        })?;
        if let Some(norm) = &self.norm {
            require_norm(norm, self.x.cols, Self::NAME)?;
        }
        if let Some(bias) = &self.bias {
            require_fit(bias, Self::NAME, "bias")?;
            require(bias.cols == self.w.rows, Self::NAME, || "bias length differs from n".into())?;
        }
        match &self.epilogue {
            Epilogue::Residual(residual) => {
                require_fit(residual, Self::NAME, "residual")?;
                require(residual.rows == self.y.rows && residual.cols == n, Self::NAME, || {
                    "residual and y differ in shape".into()
                })
            }
            Epilogue::SiluMul => require(self.w.rows % 2 == 0, Self::NAME, || {
                "gate and up rows are not paired".into()
            }),
            Epilogue::Store => Ok(()),
        }
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Read);
        visit(self.w.span, Access::Read);
        if let Some(norm) = &self.norm {
            visit(norm.weight.span, Access::Read);
        }
        if let Some(bias) = &self.bias {
            visit(bias.span, Access::Read);
        }
        if let Epilogue::Residual(residual) = &self.epilogue {
            visit(residual.span, Access::Read);
        }
        if let Some(live) = self.live {
            visit(live, Access::Read);
        }
        if let Some(scratch) = self.scratch {
            visit(scratch, Access::Write);
        }
        visit(self.y.span, Access::Write);
    }
}
