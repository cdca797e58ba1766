//! `kernels/conv.cu`. Decode steps convolve and keep their inputs in one launch, with drafts and without. Other steps convolve
//! pieces of tokens, and a second launch replaces what is carried when no block reads it any more.

use crate::Result;
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, code};
use crate::op::Conv;
use crate::ops::Named;

/// Tokens of a block.
const PIECE: u32 = 16;

impl Conv {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let blocks = self.w.rows.div_ceil(256);
        if self.single || self.q_len > 1 {
            let kernel = self.kernel(target, "conv_step")?.grid(blocks, self.rows, 1);
            return Ok(vec![kernel.lowered()]);
        }
        let pieces = self.y.rows.div_ceil(PIECE);
        let conv = self.kernel(target, "conv")?.grid(blocks, pieces, 1);
        let carry = self.kernel(target, "conv_carry")?.grid(blocks, self.rows, 1);
        Ok(vec![conv.lowered(), carry.lowered()])
    }

    fn kernel(&self, target: &Target, entry: &str) -> Result<Kernel> {
        let (s, limits) = (&self.state, &self.state.limits);
        let weights = |tensor: Option<&crate::Tensor>| match tensor {
            Some(tensor) => code(tensor.dtype, Self::NAME),
            None => Ok(0),
        };
        let kernel = Kernel::new(target, "conv", entry)
            .defines(&[
                ("TAPS", self.w.cols),
                ("PLACES", self.places()),
                ("Q_LEN", self.q_len),
                ("PIECE", PIECE),
                ("BIAS", u32::from(self.bias.is_some())),
                ("XT", code(self.x.dtype, Self::NAME)?),
                ("WT", code(self.w.dtype, Self::NAME)?),
                ("BT", weights(self.bias.as_ref())?),
                ("YT", code(self.y.dtype, Self::NAME)?),
            ])
            .tensors(&[&self.x, &self.w])
            .optional(self.bias.as_ref().map(|bias| bias.span))
            .tensors(&[&self.carry, &self.y, &s.row_seat, &s.q_start, &s.kv_len, &s.token_row])
            .ints(&[self.w.rows, self.rows, self.y.rows, limits.seats, limits.context()])
            .ints(&[self.from, self.x.stride, self.w.stride, self.carry.stride, self.y.stride]);
        Ok(kernel)
    }
}
