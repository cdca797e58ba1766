//! `kernels/features.cu`: a block per row.

use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::Kernel;
use crate::op::Recall;
use crate::{Error, Result};

impl Recall {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let Some(kept) = self.kept() else {
            let problem = "no tables for hidden states".into();
            return Err(Error::Contract { op: "recall".into(), problem });
        };
        let kernel = Kernel::new(target, "features", "recall")
            .define("BYTES", self.y.dtype.block_bytes())
            .grid(self.y.rows, 1, 1)
            .tensors(&[&self.state.row_seat, &kept, &self.y])
            .ints(&[self.y.cols, kept.stride, self.y.stride])
            .ints(&[u32::from(self.drafted), self.state.limits.seats]);
        Ok(vec![kernel.lowered()])
    }
}
