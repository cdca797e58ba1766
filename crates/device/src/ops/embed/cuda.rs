//! `kernels/embed.cu`: a block per token.

use crate::Result;
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::{Embed, Lookup};
use crate::step::GIVEN_ROW;

impl Embed {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let plain_aligned = !self.table.dtype.is_plain() || aligned(&self.table);
        let kernel = Kernel::new(target, "embed", "embed")
            .define("XT", code(self.table.dtype, "embed")?)
            .define("YT", code(self.out.dtype, "embed")?)
            .define("ALIGNED", u32::from(plain_aligned && aligned(&self.out)))
            .grid(self.out.rows, 1, 1);
        let (given_rows, given_stride) =
            self.given.map_or((0, 0), |given| (given.rows, given.stride));
        let kernel = match self.given {
            None => kernel,
            Some(_) => kernel.define("GIVEN_ROW", format!("{GIVEN_ROW}u")),
        };
        let kernel = match self.by {
            Lookup::Token | Lookup::Position => kernel,
            Lookup::Low(by) => kernel.define("LOW", by),
            Lookup::High(by) => kernel.define("HIGH", by),
        };
        let kernel = kernel
            .tensors(&[&self.ids, &self.table, &self.out])
            .optional(self.given.map(|given| given.span))
            .ints(&[self.table.rows, self.out.cols, self.table.stride, self.out.stride])
            .ints(&[given_rows, given_stride]);
        Ok(vec![kernel.lowered()])
    }
}
