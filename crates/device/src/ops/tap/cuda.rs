//! `kernels/features.cu`: a block per row.

use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::Kernel;
use crate::op::Tap;
use crate::{Error, Result};

impl Tap {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let Some((kept, column)) = self.kept() else {
            let problem = "no tables for hidden states".into();
            return Err(Error::Contract { op: "tap".into(), problem });
        };
        let kernel = Kernel::new(target, "features", "tap")
            .define("BYTES", self.x.dtype.block_bytes())
            .grid(self.x.rows, 1, 1)
            .tensors(&[&self.x, &kept])
            .ints(&[self.x.cols, self.x.stride, kept.stride, column]);
        Ok(vec![kernel.lowered()])
    }
}
