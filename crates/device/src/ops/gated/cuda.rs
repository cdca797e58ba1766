//! `kernels/gated.cu`: a block for each row and group; without a norm, for each row and some columns.

use super::{Gate, GatedNorm};
use crate::Result;
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, code};
use crate::op::Gated;
use crate::ops::Named;

/// Columns of a block without a norm.
const COLUMNS: u32 = 1024;

impl Gated {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let cols = self.y.cols;
        let norm = self.norm.as_ref();
        let group = norm.map_or(COLUMNS.min(cols), |norm| norm.group);
        // About four columns of a thread, at most 256 threads.
        let threads = group.div_ceil(4).next_multiple_of(32).min(256);
        let weight = norm.map(|norm| &norm.norm.weight);
        let kernel = Kernel::new(target, "gated", "gated")
            .defines(&[
                ("GROUP", group),
                ("THREADS", threads),
                ("SILU", u32::from(self.gate == Gate::Silu)),
                ("NORM", u32::from(norm.is_some())),
                ("AFTER", u32::from(norm.is_some_and(|norm| norm.after))),
                ("SHARED", u32::from(weight.is_some_and(|weight| weight.cols == group))),
                ("XT", code(self.x.dtype, Self::NAME)?),
                ("ZT", code(self.z.dtype, Self::NAME)?),
                ("WT", weight.map_or(Ok(0), |weight| code(weight.dtype, Self::NAME))?),
                ("YT", code(self.y.dtype, Self::NAME)?),
            ])
            .grid(cols.div_ceil(group), self.y.rows, 1)
            .threads(threads)
            .tensors(&[&self.x, &self.z])
            .optional(weight.map(|weight| weight.span))
            .tensors(&[&self.y])
            .ints(&[cols, self.from, self.x.stride, self.z.stride, self.y.stride])
            .optional(self.live)
            .arg(Arg::F32(norm.map_or(0.0, |GatedNorm { norm, .. }| norm.eps)));
        Ok(vec![kernel.lowered()])
    }
}
