//! `kernels/lora.cu`: a warp per column of `x · Aᵀ`, then a thread per column of `y`. Blocks of rows without an adapter
//! end at once.

use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::op::{Lora, LoraParts};
use crate::ops::{Named, require};
use crate::step::{PARAM_WORDS, param};
use crate::{Error, Result};

/// Parts that the kernel tells apart.
const MOST_PARTS: usize = 4;

impl Lora {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let Lora { x, a, b, y, state, .. } = self;
        let (inner, rank) = (self.inner(), b.cols);
        let mut ends = [u32::MAX; MOST_PARTS];
        let turns = match &self.parts {
            LoraParts::Stacked(all) => {
                require(all.len() <= MOST_PARTS, Self::NAME, || "too many parts".into())?;
                ends[..all.len()].copy_from_slice(all);
                0
            }
            LoraParts::Turns(count) => *count,
        };
        let bytes = SEMAPHORE_BYTES + self.sums_bytes();
        let Some(scratch) = self.scratch.filter(|scratch| scratch.len >= bytes) else {
            let problem = format!("needs {bytes} bytes of scratch");
            return Err(Error::Contract { op: Self::NAME.into(), problem });
        };
        // The semaphores of other ops stay zero.
        let sums = scratch.part(SEMAPHORE_BYTES, self.sums_bytes());
        let words = [("PARAM_WORDS", PARAM_WORDS), ("PARAM_ADAPTER", param::ADAPTER)];
        let tables = [&state.token_row, &state.row_seat, &state.params];
        let limits = [state.limits.rows, state.limits.seats, self.slots()];
        let by_row = u32::from(self.by_row);
        let shrink = Kernel::new(target, "lora", "lora_shrink")
            .define("XT", code(x.dtype, Self::NAME)?)
            .define("AT", code(a.dtype, Self::NAME)?)
            .define("BT", code(b.dtype, Self::NAME)?)
            .define("YT", code(y.dtype, Self::NAME)?)
            .define("ALIGNED", u32::from(aligned(x) && aligned(a)))
            .defines(&words)
            .grid(inner.div_ceil(8), x.rows, 1)
            .tensors(&[x, a])
            .arg(Arg::Address(sums))
            .tensors(&tables)
            .ints(&[x.cols, x.stride, a.stride, inner])
            .ints(&limits)
            .ints(&[by_row])
            .optional(self.live);
        let expand = Kernel::new(target, "lora", "lora_expand")
            .define("XT", code(x.dtype, Self::NAME)?)
            .define("AT", code(a.dtype, Self::NAME)?)
            .define("BT", code(b.dtype, Self::NAME)?)
            .define("YT", code(y.dtype, Self::NAME)?)
            .define("ALIGNED", u32::from(aligned(x) && aligned(a)))
            .defines(&words)
            .grid(y.cols.div_ceil(256), y.rows, 1)
            .shared(inner * 4)
            .arg(Arg::Address(sums))
            .tensors(&[b, y])
            .tensors(&tables)
            .ints(&[y.cols, y.stride, b.stride, inner, rank])
            .ints(&limits)
            .ints(&[by_row, turns])
            .ints(&ends)
            .optional(self.live);
        Ok(vec![shrink.lowered(), expand.lowered()])
    }
}
