//! `kernels/gather.cu`: a block per row, in the widest unit that divides a row.

use crate::Result;
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::Kernel;
use crate::op::Gather;

impl Gather {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let size = self.x.dtype.block_bytes() as u64;
        let bytes = |elems: u32| u64::from(elems) * size;
        let fits = |unit: u64| {
            [&self.x, &self.y].iter().all(|tensor| {
                bytes(tensor.cols).is_multiple_of(unit)
                    && bytes(tensor.stride).is_multiple_of(unit)
                    && tensor.span.offset.is_multiple_of(unit)
            })
        };
        let unit = [16, 4, 2].into_iter().find(|unit| fits(*unit)).unwrap_or(2);
        let kernel = Kernel::new(target, "gather", "gather")
            .define("UNIT", unit)
            .grid(self.y.rows, 1, 1)
            .tensors(&[&self.index, &self.x, &self.y])
            .ints(&[self.x.rows, (bytes(self.y.cols) / unit) as u32])
            .arg(Arg::U64(bytes(self.x.stride) / unit))
            .arg(Arg::U64(bytes(self.y.stride) / unit));
        Ok(vec![kernel.lowered()])
    }
}
