//! `kernels/rms_norm.cu`: a block per row.

use crate::Result;
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::RmsNorm;

impl RmsNorm {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let all = [&self.x, &self.norm.weight, &self.y];
        let kernel = Kernel::new(target, "rms_norm", "rms_norm")
            .define("XT", code(self.x.dtype, "rms_norm")?)
            .define("WT", code(self.norm.weight.dtype, "rms_norm")?)
            .define("YT", code(self.y.dtype, "rms_norm")?)
            .define("ALIGNED", u32::from(all.into_iter().all(aligned)))
            .grid(self.x.rows, 1, 1)
            .tensors(&all)
            .ints(&[self.x.cols, self.x.stride, self.y.stride])
            .arg(Arg::F32(self.norm.eps));
        Ok(vec![kernel.lowered()])
    }
}
