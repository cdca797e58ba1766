//! `kernels/silu_mul.cu`: four results per thread.

use crate::Result;
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::SiluMul;

impl SiluMul {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let kernel = Kernel::new(target, "silu_mul", "silu_mul")
            .define("XT", code(self.x.dtype, Self::NAME)?)
            .define("YT", code(self.y.dtype, Self::NAME)?)
            .define("ALIGNED", u32::from(aligned(&self.x)))
            .grid(self.y.cols.div_ceil(1024), self.y.rows, 1)
            .tensors(&[&self.x, &self.y])
            .ints(&[self.y.cols, self.x.stride, self.y.stride])
            .optional(self.live);
        Ok(vec![kernel.lowered()])
    }
}
