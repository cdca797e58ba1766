//! `kernels/add.cu`: eight results per thread.

use crate::Result;
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::Add;

impl Add {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let all = [&self.a, &self.b, &self.y];
        let kernel = Kernel::new(target, "add", "add")
            .define("AT", code(self.a.dtype, Self::NAME)?)
            .define("BT", code(self.b.dtype, Self::NAME)?)
            .define("YT", code(self.y.dtype, Self::NAME)?)
            .define("ALIGNED", u32::from(all.into_iter().all(aligned)))
            .grid(self.y.cols.div_ceil(2048), self.y.rows, 1)
            .tensors(&all)
            .ints(&[self.y.cols, self.a.stride, self.b.stride, self.y.stride])
            .optional(self.live);
        Ok(vec![kernel.lowered()])
    }
}
