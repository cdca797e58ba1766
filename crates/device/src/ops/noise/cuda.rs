//! `kernels/noise.cu`.

use crate::Result;
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, code};
use crate::op::Noise;

impl Noise {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let count = u64::from(self.to.rows) * u64::from(self.to.cols);
        let blocks = count.div_ceil(1024).min(u64::from(target.sms) * 8) as u32;
        let kernel = Kernel::new(target, "noise", "noise")
            .define("YT", code(self.to.dtype, "noise")?)
            .grid(blocks.max(1), 1, 1)
            .tensors(&[&self.to])
            .ints(&[self.to.rows, self.to.cols, self.to.stride])
            .arg(Arg::U64(self.seed))
            .arg(Arg::F32(self.mean))
            .arg(Arg::F32(self.scale));
        Ok(vec![kernel.lowered()])
    }
}
