//! Half formats: `kernels/head_linear.cu`. Everything else: `kernels/head_linear_ref.cu`, a block for each row and head.

use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::HeadLinear;
use crate::ops::Named;
use crate::{DType, Result};

/// How a block of the kernel is divided.
struct Shape {
    /// Warps along the tokens.
    along: u32,
    /// Warps along the columns.
    across: u32,
    /// Tiles of eight columns of a warp.
    tiles: u32,
}

impl Shape {
    fn columns(&self) -> u32 {
        8 * self.tiles * self.across
    }
}

impl HeadLinear {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let shape = self.shape_on(target);
        let kernel = match &shape {
            Some(shape) => self.fast(target, shape)?,
            None => self.reference_launch(target)?,
        };
        Ok(vec![kernel.lowered()])
    }

    /// Few tokens: many small blocks, so that every multiprocessor reads weights.
    fn shape_on(&self, target: &Target) -> Option<Shape> {
        let (k, n) = self.sizes();
        let few = self.x.rows <= 16;
        let shape = match (few, n >= 512) {
            (true, true) => Shape { along: 1, across: 4, tiles: 2 },
            (true, false) => Shape { along: 1, across: 1, tiles: 2 },
            (false, true) => Shape { along: 4, across: 1, tiles: 8 },
            (false, false) => Shape { along: 4, across: 1, tiles: 4 },
        };
        let half = matches!(self.x.dtype, DType::F16 | DType::BF16) && self.x.dtype == self.w.dtype;
        let fits = k.is_multiple_of(32) && n.is_multiple_of(shape.columns());
        let wide = [&self.x, &self.w, &self.y].into_iter().all(aligned);
        let room = self.shared(&shape) <= target.shared_per_block;
        (half && fits && wide && room && target.capability.0 >= 8).then_some(shape)
    }

    /// Bytes of the block's weights and inputs.
    fn shared(&self, shape: &Shape) -> u32 {
        let (k, _) = self.sizes();
        let (rows, cols) = if self.turned { (k, shape.columns()) } else { (shape.columns(), k) };
        rows * (2 * cols + 16) + 16 * shape.along * (2 * k + 16)
    }

    /// A kernel with the macros that both have.
    fn kernel(&self, target: &Target, name: &str) -> Result<Kernel> {
        let (k, n) = self.sizes();
        let kernel = Kernel::new(target, name, name).defines(&[
            ("K", k),
            ("N", n),
            ("EACH", self.each),
            ("TURNED", u32::from(self.turned)),
            ("YT", code(self.y.dtype, Self::NAME)?),
        ]);
        Ok(kernel)
    }

    fn fast(&self, target: &Target, shape: &Shape) -> Result<Kernel> {
        let (_, n) = self.sizes();
        let kernel = self
            .kernel(target, "head_linear")?
            .defines(&[
                ("WM", shape.along),
                ("WN", shape.across),
                ("TILES", shape.tiles),
                ("COLUMNS", shape.columns()),
                ("TYPE", code(self.x.dtype, Self::NAME)?),
            ])
            .grid(n / shape.columns(), self.heads, self.x.rows.div_ceil(16 * shape.along))
            .threads(32 * shape.along * shape.across)
            .shared(self.shared(shape))
            .tensors(&[&self.x, &self.w, &self.y])
            .ints(&[self.x.rows, self.x.stride, self.w.stride, self.y.stride])
            .optional(self.live);
        Ok(kernel)
    }

    fn reference_launch(&self, target: &Target) -> Result<Kernel> {
        let kernel = self
            .kernel(target, "head_linear_ref")?
            .defines(&[
                ("XT", code(self.x.dtype, Self::NAME)?),
                ("WT", code(self.w.dtype, Self::NAME)?),
            ])
            .grid(self.x.rows, self.heads, 1)
            .tensors(&[&self.x, &self.w, &self.y])
            .ints(&[self.x.stride, self.w.stride, self.y.stride])
            .optional(self.live);
        Ok(kernel)
    }
}
