//! `kernels/embed.cu`: a block per token.

use crate::Result;
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::Embed;
use crate::step::GIVEN_ROW;

impl Embed {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let plain_aligned = !self.table.dtype.is_plain() || aligned(&self.table);
        let kernel = Kernel::new(target, "embed", "embed")
            .define("XT", code(self.table.dtype, "embed")?)
            .define("YT", code(self.out.dtype, "embed")?)
            .define("ALIGNED", u32::from(plain_aligned && aligned(&self.out)))
            .grid(self.out.rows, 1, 1);
        let ints = [self.table.rows, self.out.cols, self.table.stride, self.out.stride];
        let kernel = match &self.given {
            None => kernel.tensors(&[&self.ids, &self.table, &self.out]).ints(&ints),
            Some(given) => kernel
                .define("GIVEN_ROW", format!("{GIVEN_ROW}u"))
                .tensors(&[&self.ids, &self.table, &self.out, given])
                .ints(&ints)
                .ints(&[given.rows, given.stride]),
        };
        Ok(vec![kernel.lowered()])
    }
}
